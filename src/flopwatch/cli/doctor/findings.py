"""What `flopwatch doctor` finds: parts that are there or missing, problems, and results of checks."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from flopwatch.clock import Clock, monotonic_seconds
from flopwatch.text import first_line

State = Literal["there", "missing", "unusable", "broken"]
Outcome = Literal["passed", "failed", "not possible"]
_LONGEST = 400


@dataclass(frozen=True, slots=True)
class Part:
    """An extra, a program or a source of counters.

    Attributes:
        state: `broken` if it is installed and does not work; `unusable` if that need not be wrong, as with Slurm's
            commands on a machine without a cluster.
        said: Its version, or why it is not there; empty if it just is not installed.
        command: The command that brings or repairs it; empty if there is none.
        use: What it is for.
    """

    name: str
    state: State
    said: str
    command: str = ""
    use: str = ""


@dataclass(frozen=True, slots=True)
class Problem:
    """Something about this machine that makes a part of flopwatch fail or measure less.

    Attributes:
        command: The command that removes it.
        is_failure: Whether flopwatch does not work at all with it.
    """

    what: str
    command: str = ""
    is_failure: bool = False


@dataclass(frozen=True, slots=True)
class Checked:
    """What a check has found; `figures` are the numbers behind the sentence."""

    outcome: Outcome
    said: str
    figures: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of a check, with its name and the seconds that it took."""

    name: str
    outcome: Outcome
    said: str
    figures: Mapping[str, Any]
    seconds: float


class NotPossibleError(Exception):
    """A check cannot be made on this machine; the message says why."""


def passed_if(is_right: bool, said: str, **figures: Any) -> Checked:
    return Checked("passed" if is_right else "failed", said, figures)


def run_check(name: str, check: Callable[[], Checked], clock: Clock = monotonic_seconds) -> CheckResult:
    """Run a check. Whatever it raises is its result: an exception that says so means that it is not possible."""
    began = clock()
    try:
        found = check()
    except NotPossibleError as reason:
        found = Checked("not possible", first_line(reason, _LONGEST))
    except Exception as error:  # noqa: BLE001 - whatever goes wrong on this machine is the result of the check
        found = Checked("failed", f"{type(error).__name__}: {first_line(error, _LONGEST)}")
    return CheckResult(name, found.outcome, found.said, found.figures, clock() - began)
