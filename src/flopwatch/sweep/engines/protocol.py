"""The interface of engines. An engine starts the supervisor process of each trial and reports when it has ended.

The supervisor writes the trial's result to a file. If it ended without writing one, this module determines the outcome
from the evidence that the engine returns, such as the exit code. The module also loads engines by name.
"""

import contextlib
import importlib
import inspect
import json
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
        # The runner writes the evidence to results.jsonl, but a user's own engine may put any object into it.
        object.__setattr__(self, "evidence", _as_json(self.evidence))


def _as_json(evidence: Any) -> dict[str, Any]:
    if isinstance(evidence, Mapping):
        return {_text(key): value if _is_json(value) else _text(value) for key, value in evidence.items()}
    return {} if evidence is None else {"detail": _text(evidence)}


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def _text(value: Any) -> str:
    try:
        return cut(str(value))
    except Exception:  # the value's own __str__ may raise anything
        return type(value).__name__


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

    def end(self, names: Sequence[str]) -> None:
        """Kill these trials with SIGKILL, because their supervisors do not respond. `wait` must report their ends
        within a minute, even if they survive SIGKILL. This method is optional.
        """

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
    known: Mapping[str, inspect.Parameter] = {}
    takes_all = True
    with contextlib.suppress(TypeError, ValueError):  # a callable of the user's may not say what it takes
        known = inspect.signature(make).parameters
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
    if unknown := [] if takes_all else [key for key in settings if key not in known]:
        raise InputError(f"the engine {name!r} does not take {unknown[0]!r}{did_you_mean(unknown[0], list(known))}")
    try:
        return cast("Engine", make(**settings))
    except TypeError as error:
        raise InputError(f"the engine {name!r} does not take the settings {dict(settings)}: {error}") from None


# The states of Slurm's jobs and the classes of Ray's exceptions that say how a trial ended.
_KNOWN: dict[str, tuple[Outcome, str]] = {
    "TIMEOUT": ("timeout", "Slurm ended the job at its time limit; increase `time_minutes`, an option of the engine"),
    "DEADLINE": ("timeout", "Slurm ended the job at its deadline"),
    "OUT_OF_MEMORY": ("oom_host", "Slurm ended the job because it ran out of host memory; request more memory"),
    "CANCELLED": ("cancelled", "the job was cancelled"),
    "PREEMPTED": ("lost", "Slurm preempted the job"),
    "NODE_FAIL": ("lost", "its node failed"),
    "BOOT_FAIL": ("lost", "its node did not boot"),
    "REQUEUED": ("lost", "Slurm requeued the job"),
    "REVOKED": ("lost", "Slurm moved the job to another cluster"),
    "OutOfMemoryError": (
        "oom_host",
        "Ray's memory monitor killed the trial because its node ran out of memory, perhaps because of another trial; "
        "run fewer trials per node",
    ),
    "TaskCancelledError": ("cancelled", "the task was cancelled"),
    "NodeDiedError": ("lost", "its node died"),
    "WorkerCrashedError": ("lost", "its Ray worker died"),
    "RaySystemError": ("lost", "Ray itself failed"),
    "RayDriverEnded": ("lost", "Ray's head did not answer for too long, so Ray ended the trial"),
}

# If Slurm runs without cgroups and a job uses too much memory, Slurm reports only FAILED and SIGKILL. It writes the
# reason to the job's output in lines that begin with slurmstepd. The trial's own output is in another file.
_SLURM_SAYS = "slurmstepd"
_OVER_MEMORY = ("exceeded memory limit", "exceeded job memory limit", "oom-kill", "oom_kill")

_NO_OUTPUT_FILE = 53
"""Slurm reports `0:53` (exit code 0, signal 53) if it could not open the file for the job's output."""


def ending_from_evidence(evidence: Mapping[str, Any]) -> tuple[Outcome, str]:
    """Return the outcome of a trial whose supervisor ended without a `result.json`, and the reason in one line.

    Args:
        evidence: What is known about the end. Keys: `state` (of the Slurm job), `error` (class of Ray's exception),
            `detail` (Slurm's or Ray's message), `exit_code` and `signal` of the supervisor, `log` (end of its output),
            `host`, `stuck` (why a supervisor that did not respond was killed).

    >>> ending_from_evidence({"state": "NODE_FAIL", "host": "n1"})
    ('lost', 'its node failed (n1)')
    """
    outcome, reason = _ending(evidence)
    host = evidence.get("host")
    return outcome, f"{reason} ({host})" if host else reason


def outcome_known_to_engine(evidence: Mapping[str, Any]) -> tuple[Outcome, str] | None:
    """Return the true outcome of a trial whose supervisor wrote `cancelled`; None if the engine does not know it.

    A supervisor writes `cancelled` after SIGTERM, which may come from Slurm (time limit), from Ray's memory monitor, or
    from the kernel if the supervisor's guard (`guard.py`) was killed. Only then does the engine, which waits for
    the guard, see SIGKILL although the supervisor has written a result.

    >>> outcome_known_to_engine({"state": "TIMEOUT"})[0], outcome_known_to_engine({"exit_code": 0})
    ('timeout', None)
    """
    outcome, reason = ending_from_evidence(evidence)
    if outcome != "lost" or evidence.get("stuck") or _state(evidence) in _KNOWN or evidence.get("error") in _KNOWN:
        return outcome, reason
    if evidence.get("signal") == signal.SIGKILL:
        return "lost", "the trial's guard process was killed by SIGKILL"
    return None


def _ending(evidence: Mapping[str, Any]) -> tuple[Outcome, str]:
    if stuck := evidence.get("stuck"):
        return "lost", str(stuck)
    log, state, error = str(evidence.get("log") or ""), _state(evidence), str(evidence.get("error") or "")
    if state and _is_over_memory(log):
        return "oom_host", "the job used more host memory than it had requested; request more memory"
    if known := _KNOWN.get(state) or _KNOWN.get(error):
        return known
    detail = evidence.get("detail")
    if state == "REFUSED":
        return "invalid", f"Slurm rejected the job: {detail}; correct the engine's settings and run with --only failed"
    if state == "NOT_TAKEN":
        return "lost", str(detail)
    if state == "FAILED" and evidence.get("signal") == _NO_OUTPUT_FILE:
        return "lost", "the node cannot write to the sweep's folder; use a folder that all nodes share"
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    last_line = f"; its last output line: {lines[-1][:200]}" if lines else ""
    return "lost", _how_it_left(evidence, state, error) + last_line


def _is_over_memory(log: str) -> bool:
    lines = [line for line in log.lower().splitlines() if line.startswith(_SLURM_SAYS)]
    return any(text in line for line in lines for text in _OVER_MEMORY)


def _state(evidence: Mapping[str, Any]) -> str:
    return str(evidence.get("state") or "").partition(" ")[0].rstrip("+")  # "CANCELLED by 1000"


def _how_it_left(evidence: Mapping[str, Any], state: str, error: str) -> str:
    number, exit_code, detail = evidence.get("signal"), evidence.get("exit_code"), evidence.get("detail")
    if error:
        return f"its supervisor could not be run: {error}" + (f": {detail}" if detail else "")
    if number:
        return f"its supervisor was killed by {signal_text(number)}"
    if exit_code:
        return f"its supervisor left with exit code {exit_code} and wrote no result"
    if state:
        return f"its supervisor wrote no result; Slurm reports the state {state}"
    return "its supervisor ended without a result, for an unknown reason"


def signal_text(signal: Any) -> str:
    return f"signal {signal}" if isinstance(signal, int) else str(signal)
