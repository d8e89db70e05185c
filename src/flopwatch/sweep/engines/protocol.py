"""What every engine does: place supervisors, and say when they have ended. How a trial ended is in its files."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from flopwatch.plain_text import cut
from flopwatch.trial_records import TrialSpec


@dataclass(frozen=True, slots=True)
class Trial:
    """A trial whose folder is ready: `trials/NAME/spec.json` is written.

    What an engine starts, in a process of its own: `python -m flopwatch.sweep.supervisor SWEEP_FOLDER NAME`.

    Attributes:
        sweep: The sweep's folder.
        name: Of the trial.
        key: Hash of its content.
        spec: Its configuration.
        retries: How often it is tried again at most when it is lost.
        earlier_attempts: Those that were lost, as `TrialResult.earlier_attempts`.
        avoid: Hosts to keep it from, where the engine can.
    """

    sweep: Path
    name: str
    key: str
    spec: TrialSpec
    retries: int = 0
    earlier_attempts: tuple[Mapping[str, Any], ...] = ()
    avoid: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Ended:
    """A supervisor is gone.

    Attributes:
        name: Of the trial.
        evidence: What the engine saw; the runner reads it when the supervisor left no `result.json`. Keys in use:
            `exit_code`, `signal` (of the supervisor), `state` (Slurm's word), `error` (Ray's), `host`. Values that
            JSON cannot hold are replaced by their text.
    """

    name: str
    evidence: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # The runner writes the evidence to results.jsonl, and a user's own engine may put any object into it.
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
    """Places supervisors. All calls come from one thread."""

    name: str

    def open(self, sweep: Path, unfinished: Sequence[Trial]) -> Sequence[str]:
        """Get ready. Of the unfinished trials of an earlier runner, name those still running that it will wait for."""

    def room(self, next_up: TrialSpec) -> int:
        """How many trials like this one it would take now; 0 while full."""

    def submit(self, trials: Sequence[Trial]) -> None:
        """Place them; at most as many as there was room for."""

    def wait(self, seconds: float) -> Sequence[Ended]:
        """The trials that ended since; returns at the first end, or with nothing after so many seconds."""

    def end(self, names: Sequence[str]) -> None:
        """Kill these alone, with SIGKILL: their supervisors do not answer. Their ends come out of `wait` within a
        minute, also of those that would not die. An engine without this method cannot, and they are waited for.
        """

    def withdraw(self) -> Sequence[str]:
        """Take back what is placed and has not begun; the names of those that are back since the last call.

        Called again and again once nothing new is to start. An engine without this method has nothing queued.
        """

    def cancel(self) -> None:
        """Kill everything that runs, trees included. The ends still come out of `wait`."""

    def close(self) -> None:
        """Let go of slots and connections. Nothing is running any more."""

    def state(self) -> str:
        """A word for the live table: `2 slots`, `waiting for GPU 0 (sweep in /data/a)`, `3 queued`."""
