"""The interface of engines. An engine starts the supervisor process of each trial and reports when it has ended.

The supervisor writes the trial's result to a file. If it ended without writing one, this module determines the outcome
from the evidence that the engine returns, such as the exit code. The module also loads engines by name.
"""

import importlib
import inspect
import json
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias, cast

from flopwatch.errors import InputError
from flopwatch.records.trial import Outcome, TrialSpec
from flopwatch.sweep.folder import Trial as Trial
from flopwatch.sweep.host.processes import check_system
from flopwatch.sweep.spec.parsing import did_you_mean
from flopwatch.text import cut


@dataclass(frozen=True, slots=True)
class Ended:
    """An engine's report that the supervisor of a trial has ended.

    Attributes:
        name: The name of the trial.
        evidence: What the engine knows about the end. It is used if the trial has no `result.json`. The keys are those
            of `ending_from_evidence`. Values that JSON cannot represent are replaced by their text.
    """

    name: str
    evidence: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # The runner writes the evidence to results.jsonl, but a user's own engine may return any object.
        found: Any = {} if self.evidence is None else self.evidence
        found = found if isinstance(found, Mapping) else {"detail": found}
        object.__setattr__(self, "evidence", {str(key): _as_json(value) for key, value in found.items()})


def _as_json(value: Any) -> Any:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return cut(str(value))
    return value


class Engine(Protocol):
    """The methods of an engine. The runner calls all of them in the same thread."""

    name: str

    def open(self, sweep: Path, unfinished: Sequence[Trial]) -> Sequence[str]:
        """Prepare the engine. Return the names of the trials in `unfinished` that an earlier runner submitted and that
        are still queued or running. `wait` must report their ends.
        """

    def room(self, next_up: TrialSpec) -> int:
        """Return how many trials like `next_up` the engine accepts now; 0 if it is full."""

    def submit(self, trials: Sequence[Trial]) -> None:
        """Start these trials, at most as many as `room` returned."""

    def wait(self, seconds: float) -> Sequence[Ended]:
        """Wait until a trial ends, but at most `seconds`. Return the trials that ended since the last call."""

    def withdraw(self) -> Sequence[str]:
        """Withdraw submitted trials that have not begun; return the names of those withdrawn since the last call.

        The runner calls this repeatedly while the sweep is stopping. This method is optional.
        """

    def cancel(self) -> None:
        """Kill all running trials with all their processes. `wait` must still report their ends."""

    def close(self) -> None:
        """Release slots and connections. The runner calls this after the last trial has ended."""

    def state(self) -> str:
        """Return a short text for the live table: `2 slots`, `waiting for GPU 0 (sweep in /data/a)`, `3 queued`."""


_ENGINES = {
    "local": "flopwatch.sweep.engines.local:LocalEngine",
    "ray": "flopwatch.sweep.engines.ray:RayEngine",
    "slurm": "flopwatch.sweep.engines.slurm:SlurmEngine",
}


def load_engine(name: str, settings: Mapping[str, Any]) -> Engine:
    """Create an engine with these settings as arguments. The name is a known one or `package.module:Class`.

    >>> load_engine("local", {"jobs": 1}).name
    'local'
    """
    check_system()
    module, colon, attribute = _ENGINES.get(name, name).partition(":")
    if not colon:
        raise InputError(f"there is no engine {name!r}; use {', '.join(_ENGINES)} or your own as package.module:Class")
    try:
        make = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise InputError(f"cannot load the engine {name!r}: {error}") from error
    try:
        known = inspect.signature(make).parameters
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
        if unknown := [] if takes_all else [key for key in settings if key not in known]:
            raise InputError(f"the engine {name!r} does not take {unknown[0]!r}{did_you_mean(unknown[0], list(known))}")
        return cast("Engine", make(**settings))
    except TypeError as error:
        raise InputError(f"the engine {name!r} does not take the settings {dict(settings)}: {error}") from None


_ANY = object()

# What the evidence must contain, and the outcome and reason that follow. `_ANY` stands for any value but an empty one;
# a reason may name keys of `_facts`.
_Ending: TypeAlias = tuple[Mapping[str, object], Outcome, str]

# The causes of an end. They hold even if the supervisor wrote a result, because SIGTERM did not tell it the cause.
# The lines of slurmstepd come before Slurm's state, because Slurm without cgroups reports a job with too much memory
# as FAILED.
_CAUSES: tuple[_Ending, ...] = (
    (
        {"state": _ANY, "is_over_memory": True},
        "oom_host",
        "the job used more host memory than it had requested; request more memory",
    ),
    (
        {"state": "TIMEOUT"},
        "timeout",
        "Slurm ended the job at its time limit; give it more with --engine-option time=MINUTES",
    ),
    ({"state": "DEADLINE"}, "timeout", "Slurm ended the job at its deadline"),
    (
        {"state": "OUT_OF_MEMORY"},
        "oom_host",
        "Slurm ended the job because it ran out of host memory; request more memory",
    ),
    ({"state": "CANCELLED"}, "cancelled", "the job was cancelled"),
    ({"state": "PREEMPTED"}, "lost", "Slurm preempted the job"),
    ({"state": "NODE_FAIL"}, "lost", "its node failed"),
    ({"state": "BOOT_FAIL"}, "lost", "its node did not boot"),
    ({"state": "REVOKED"}, "lost", "Slurm moved the job to another cluster"),
    (
        {"error": "OutOfMemoryError"},
        "oom_host",
        "Ray's memory monitor killed the trial because its node ran out of memory, perhaps because of another trial; "
        "run fewer trials per node",
    ),
    ({"error": "TaskCancelledError"}, "cancelled", "the task was cancelled"),
    ({"error": "NodeDiedError"}, "lost", "its node died"),
    ({"error": "WorkerCrashedError"}, "lost", "its Ray worker died"),
    ({"error": "RaySystemError"}, "lost", "Ray itself failed"),
    ({"error": "RayDriverEnded"}, "lost", "the connection to Ray was lost, so Ray ended the trial"),
)

# How the supervisor ended. Without a cause, that is all there is to say about a trial without a result. An error of Ray
# comes first, because then no supervisor ran; Slurm's state comes last, because FAILED says less than a signal.
_EXITS: tuple[_Ending, ...] = (
    (
        {"state": "FAILED", "signal": "signal 53"},  # Slurm could not open the file for the job's output
        "lost",
        "the node cannot write to the sweep's folder; use a folder that all nodes share",
    ),
    ({"error": _ANY, "detail": _ANY}, "lost", "its supervisor could not be run: {error}: {detail}{last_line}"),
    ({"error": _ANY}, "lost", "its supervisor could not be run: {error}{last_line}"),
    ({"signal": _ANY}, "lost", "its supervisor was killed by {signal}{last_line}"),
    ({"exit_code": _ANY}, "lost", "its supervisor left with exit code {exit_code} and wrote no result{last_line}"),
    ({"state": _ANY}, "lost", "its supervisor wrote no result; Slurm reports the state {state}{last_line}"),
    ({}, "lost", "its supervisor ended without a result, for an unknown reason{last_line}"),
)

_OVER_MEMORY = ("exceeded memory limit", "exceeded job memory limit", "oom-kill", "oom_kill")


def ending_from_evidence(evidence: Mapping[str, Any]) -> tuple[Outcome, str]:
    """Return the outcome of a trial whose supervisor ended without a `result.json`, and the reason in one line.

    Args:
        evidence: What is known about the end. Keys: `state` (of the Slurm job), `error` (class of Ray's exception),
            `detail` (Slurm's or Ray's message), `exit_code` and `signal` of the supervisor, `log` (end of its output),
            `host`.

    >>> ending_from_evidence({"state": "NODE_FAIL", "host": "n1"})
    ('lost', 'its node failed (n1)')
    """
    ending = _first((*_CAUSES, *_EXITS), evidence)
    assert ending is not None, "the last row fits all evidence"
    return ending


def outcome_known_to_engine(evidence: Mapping[str, Any]) -> tuple[Outcome, str] | None:
    """Return the true outcome of a trial whose supervisor wrote `cancelled`; None if the engine does not know it.

    A supervisor writes `cancelled` after SIGTERM, which may come from Slurm (time limit), from Ray's memory monitor, or
    from the kernel if the supervisor's guard (`guard.py`) was killed. Only then does the engine, which waits for
    the guard, see SIGKILL although the supervisor has written a result.

    >>> outcome_known_to_engine({"state": "TIMEOUT"})[0], outcome_known_to_engine({"exit_code": 0})
    ('timeout', None)
    """
    if (cause := _first(_CAUSES, evidence)) is not None:
        return cause
    is_guard_killed = evidence.get("signal") == signal.SIGKILL
    return ("lost", "the trial's guard process was killed by SIGKILL") if is_guard_killed else None


def _first(endings: Sequence[_Ending], evidence: Mapping[str, Any]) -> tuple[Outcome, str] | None:
    facts = _facts(evidence)
    host = f" ({evidence['host']})" if evidence.get("host") else ""
    for wanted, outcome, reason in endings:
        if all(facts[key] if value is _ANY else facts[key] == value for key, value in wanted.items()):
            return outcome, reason.format_map(facts) + host
    return None


def _facts(evidence: Mapping[str, Any]) -> dict[str, Any]:
    lines = [line.strip() for line in str(evidence.get("log") or "").splitlines() if line.strip()]
    number = evidence.get("signal")
    return {
        **{key: evidence.get(key) for key in ("detail", "exit_code")},
        "state": str(evidence.get("state") or "").partition(" ")[0].rstrip("+"),  # "CANCELLED by 1000"
        "error": str(evidence.get("error") or ""),
        "signal": f"signal {number}" if number and isinstance(number, int) else number,
        # Slurm writes these lines to the job's output. The trial's own output is in another file.
        "is_over_memory": any(
            line.lower().startswith("slurmstepd") and any(text in line.lower() for text in _OVER_MEMORY)
            for line in lines
        ),
        "last_line": f"; its last output line: {lines[-1][:200]}" if lines else "",
    }
