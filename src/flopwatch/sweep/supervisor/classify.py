"""Determines the outcome of a trial from the known facts about its end. Standard library only. Does no I/O.

The evidence in order, strongest first: the supervisor killed the worker; the trial reported an outcome (the worker's
exception, or the outcome in a command's `metrics.json`); the kernel counted out-of-memory kills; the sampled memory was
near its limit; the exit status. The exit status comes last because SIGKILL may come from the supervisor, the kernel or
another user. The text of the log does not change the outcome; a line about memory is only shown as a hint.
"""

import math
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from flopwatch.records.trial import OUT_OF_MEMORY, Outcome
from flopwatch.text import first_line

OwnKill = Literal["timeout", "hang", "cancelled", "oom_host"]

# Texts that allocators print when an allocation fails. "error" or "memory" alone would match too many lines.
_MEMORY_WORDS = re.compile(
    r"OutOfMemoryError|out of memory|CUBLAS_STATUS_ALLOC_FAILED|std::bad_alloc|Cannot allocate memory|"
    r"DefaultCPUAllocator: (?:can't|not enough) .*memory|\bMemoryError\b|exceeded memory limit",
    re.IGNORECASE,
)
_HINT_CHARACTERS = 200  # longer log lines are cut to this length

NEAR_LIMIT = 0.95
"""If SIGKILL or SIGABRT ended a trial that used more than this share of its memory limit, the outcome is `oom_host`."""


@dataclass(frozen=True, slots=True)
class ExitFacts:
    """The known facts about the end of a trial's worker process.

    The supervisor sets those of the first group, and those of the second follow from the files of the trial.
    """

    own_kill: OwnKill | None = None  # the outcome that the supervisor chose when it killed the worker
    own_kill_detail: str = ""
    status: int | None = None  # exit code, or negative number of the signal; None if the worker survived SIGKILL
    oom_kills: int = 0  # processes that the kernel killed for memory in the trial's cgroup
    has_own_group: bool = True  # no other trial shares this cgroup
    held_bytes: int = 0  # lower bound of the peak host memory, without pages of files
    limit_bytes: int | None = None

    is_command: bool = False
    has_finished: bool = False
    has_finished_steps: bool = False
    exception: Mapping[str, Any] | None = None
    reported: Outcome | None = None
    log_tail: str = ""

    @property
    def exit_code(self) -> int | None:
        return self.status if self.status is not None and self.status >= 0 else None

    @property
    def signal_number(self) -> int | None:
        return -self.status if self.status is not None and self.status < 0 else None


def classify(facts: ExitFacts) -> tuple[Outcome, str]:
    """Return the outcome of a trial and the reason in one line.

    A trial whose steps are all measured is `ok` even if it failed later, because the later phases are measurements by
    flopwatch and not part of the training. A cancelled trial stays `cancelled`, so that it runs again.
    """
    outcome, reason = next((outcome, reason) for is_so, outcome, reason in _endings(facts) if is_so)
    if outcome not in ("ok", "cancelled") and facts.has_finished_steps:
        return ok_after_steps(reason)
    return outcome, reason


def ok_after_steps(reason: str) -> tuple[Outcome, str]:
    return "ok", f"all steps were measured; the trial failed after them: {reason}"


def _endings(facts: ExitFacts) -> Sequence[tuple[object, Any, str]]:
    """Return whether the facts show this ending, its outcome and its reason. The first ending that they show counts."""
    number, code, has_exited = facts.signal_number, facts.exit_code, facts.signal_number is None
    is_killed = number == signal.SIGKILL or code == 128 + signal.SIGKILL
    is_aborted = number == signal.SIGABRT  # C++ aborts the process after an uncaught std::bad_alloc
    exception = facts.exception or {"outcome": "error", "type": "", "message": ""}
    raised = f"{exception['type']}: {first_line(exception['message'], 300)}"
    kills = f"{facts.oom_kills} of its processes"
    limit, held = facts.limit_bytes or math.inf, facts.held_bytes
    used = f"it used {held / 2**20:,.0f} MiB of its limit of {limit / 2**20:,.0f} MiB"
    is_near = held > NEAR_LIMIT * limit
    return (
        # The worker may have finished just before the supervisor killed it. Then its result is complete.
        (code == 0 and facts.has_finished and not facts.oom_kills, "ok", "ran to its end"),
        (code == 0 and facts.has_finished, "ok", f"ran to its end; {kills} were killed for memory"),
        (facts.own_kill, facts.own_kill, facts.own_kill_detail),
        (facts.reported, facts.reported, "reported by the command in metrics.json"),
        (exception["outcome"] != "error", exception["outcome"], raised),
        (facts.oom_kills and is_killed, "oom_host", "the kernel killed it: its memory limit was reached"),
        (
            facts.oom_kills and facts.has_own_group and has_exited,
            "oom_host",
            f"the kernel killed {kills}: its memory limit was reached",
        ),
        (facts.exception, "error", raised),
        (is_killed and is_near, "oom_host", f"ended by SIGKILL while {used}"),
        (is_aborted and is_near, "oom_host", f"ended by SIGABRT while {used}"),
        (has_exited and held > limit, "oom_host", f"{used}, and exited before flopwatch killed it"),
        (
            number == signal.SIGKILL,
            "crash",
            "killed by SIGKILL from outside; the kernel counted no out-of-memory kill in the trial's cgroup",
        ),
        (number is not None, "crash", f"ended by {signal_name(number or 0)}"),
        (code == 0 and facts.is_command, "ok", "ran to its end"),
        (code == 0, "error", "left with exit code 0 before its last step; does the trainer call sys.exit()?"),
        (True, "error", f"left with exit code {code}"),
    )


def memory_hint(facts: ExitFacts, outcome: Outcome) -> str | None:
    if outcome in ("ok", "cancelled", *OUT_OF_MEMORY):
        return None
    lines = [line for line in facts.log_tail.splitlines() if _MEMORY_WORDS.search(line)]
    said = lines[-1].strip()[:_HINT_CHARACTERS] if lines else ""
    return "".join(letter if letter.isprintable() else " " for letter in said) or None


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
