"""The interface of engines. An engine starts the supervisor process of each trial and reports when it has ended.

The supervisor writes the trial's result to a file. If it ended without writing one, this module determines the outcome
from the evidence that the engine returns, such as the exit code. The module also loads engines by name.
"""

import importlib
import inspect
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

from flopwatch.errors import InputError
from flopwatch.records.trial import Outcome, TrialSpec
from flopwatch.sweep.folder import Trial as Trial
from flopwatch.sweep.host.processes import check_system
from flopwatch.sweep.spec.parsing import did_you_mean


@dataclass(frozen=True, slots=True)
class Ended:
    """An engine's report that the supervisor of a trial has ended.

    `evidence` is what the engine knows about the end, in values of JSON and with the keys of `ending_from_evidence`. It
    is used if the trial has no `result.json`.
    """

    name: str
    evidence: Mapping[str, Any] = field(default_factory=dict)


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


# Causes of an end, by the state of the Slurm job and by the class of Ray's exception. They hold even if the supervisor
# wrote a result, because SIGTERM did not tell it the cause.
_STATES: Mapping[str, tuple[Outcome, str]] = {
    "TIMEOUT": ("timeout", "Slurm ended the job at its time limit; give it more with --engine-option time=MINUTES"),
    "DEADLINE": ("timeout", "Slurm ended the job at its deadline"),
    "OUT_OF_MEMORY": ("oom_host", "Slurm ended the job because it ran out of host memory; request more memory"),
    "CANCELLED": ("cancelled", "the job was cancelled"),
    "PREEMPTED": ("lost", "Slurm preempted the job"),
    "NODE_FAIL": ("lost", "its node failed"),
    "BOOT_FAIL": ("lost", "its node did not boot"),
    "REVOKED": ("lost", "Slurm moved the job to another cluster"),
}
_ERRORS: Mapping[str, tuple[Outcome, str]] = {
    "OutOfMemoryError": (
        "oom_host",
        "Ray's memory monitor killed the trial because its node ran out of memory, perhaps because of another trial; "
        "run fewer trials per node",
    ),
    "TaskCancelledError": ("cancelled", "the task was cancelled"),
    "NodeDiedError": ("lost", "its node died"),
    "WorkerCrashedError": ("lost", "its Ray worker died"),
    "RaySystemError": ("lost", "Ray itself failed"),
    "RayDriverEnded": ("lost", "the connection to Ray was lost, so Ray ended the trial"),
}
_OVER_MEMORY = ("exceeded memory limit", "exceeded job memory limit", "oom-kill", "oom_kill")
_NO_OUTPUT_FILE = 53  # Slurm could not open the file for the job's output


def ending_from_evidence(evidence: Mapping[str, Any]) -> tuple[Outcome, str]:
    """Return the outcome of a trial whose supervisor ended without a `result.json`, and the reason in one line.

    Args:
        evidence: What is known about the end. Keys: `state` (of the Slurm job), `error` (class of Ray's exception),
            `detail` (Slurm's or Ray's message), `exit_code` and `signal` of the supervisor, `log` (end of its output),
            `host`.

    >>> ending_from_evidence({"state": "NODE_FAIL", "host": "n1"})
    ('lost', 'its node failed (n1)')
    """
    outcome, reason = _cause(evidence) or ("lost", _end_of_the_supervisor(evidence))
    return outcome, f"{reason} ({evidence['host']})" if evidence.get("host") else reason


def outcome_known_to_engine(evidence: Mapping[str, Any]) -> tuple[Outcome, str] | None:
    """Return the true outcome of a trial whose supervisor wrote `cancelled`; None if the engine does not know it.

    A supervisor writes `cancelled` after SIGTERM, which may come from Slurm (time limit), from Ray's memory monitor, or
    from the kernel if the supervisor's guard (`guard.py`) was killed. Only then does the engine, which waits for
    the guard, see SIGKILL although the supervisor has written a result.

    >>> outcome_known_to_engine({"state": "TIMEOUT"})[0], outcome_known_to_engine({"exit_code": 0})
    ('timeout', None)
    """
    if _cause(evidence) is not None:
        return ending_from_evidence(evidence)
    is_guard_killed = evidence.get("signal") == signal.SIGKILL
    return ("lost", "the trial's guard process was killed by SIGKILL") if is_guard_killed else None


def _cause(evidence: Mapping[str, Any]) -> tuple[Outcome, str] | None:
    # Slurm without cgroups reports a job with too much memory as FAILED, but slurmstepd writes a line to the job's
    # output. The trial's own output is in another file.
    own_lines = [line.lower() for line in _lines(evidence) if line.lower().startswith("slurmstepd")]
    if _state(evidence) and any(words in line for line in own_lines for words in _OVER_MEMORY):
        return "oom_host", "the job used more host memory than it had requested; request more memory"
    return _STATES.get(_state(evidence)) or _ERRORS.get(str(evidence.get("error")))


def _end_of_the_supervisor(evidence: Mapping[str, Any]) -> str:
    """How the supervisor ended, which without a cause is all there is to say about a trial without a result.

    An error of Ray comes first, because then no supervisor ran; Slurm's FAILED says less than a signal.
    """
    error, number, exit_code, state = (*map(evidence.get, ("error", "signal", "exit_code")), _state(evidence))
    if state == "FAILED" and number == _NO_OUTPUT_FILE:
        return "the node cannot write to the sweep's folder; use a folder that all nodes share"
    how = "its supervisor ended without a result, for an unknown reason"
    if error:
        detail = f": {evidence['detail']}" if evidence.get("detail") else ""
        how = f"its supervisor could not be run: {error}{detail}"
    elif number:
        how = f"its supervisor was killed by signal {number}"
    elif exit_code:
        how = f"its supervisor left with exit code {exit_code} and wrote no result"
    elif state:
        how = f"its supervisor wrote no result; Slurm reports the state {state}"
    return how + "".join(f"; its last output line: {line[:200]}" for line in _lines(evidence)[-1:])


def _state(evidence: Mapping[str, Any]) -> str:
    return str(evidence.get("state") or "").partition(" ")[0].rstrip("+")  # "CANCELLED by 1000"


def _lines(evidence: Mapping[str, Any]) -> list[str]:
    return [line.strip() for line in str(evidence.get("log") or "").splitlines() if line.strip()]
