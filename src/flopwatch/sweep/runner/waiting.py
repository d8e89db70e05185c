"""What a runner waits for before it decides: results of other hosts, silent supervisors, a full disk.

When an engine reports that a supervisor is gone, the trial's result may become visible later, because a file system
may show the files of another host only after a minute. A trial is called lost only after that time, and not while its
supervisor still shows signs of life.
"""

import errno
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from flopwatch.records.reading import read_json
from flopwatch.records.trial import TrialResult
from flopwatch.records.trial_files import GUARD, STARTED, trial_folder
from flopwatch.sweep.claims import BEAT_SECONDS, is_alive_here, is_withdrawn, visible_seconds, withdraw
from flopwatch.sweep.engines.protocol import Ended, Engine
from flopwatch.sweep.folder import Trial, attempt_of, is_supervised, own_result, silent_seconds
from flopwatch.sweep.supervisor.supervise import allowed_silence


class LateResults:
    """Holds ended trials back until their results are visible, or can no longer appear.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ended: dict[str, Ended] = {}
        self._deadlines: dict[str, float] = {}

    def ready(self, ended: Iterable[Ended], running: Mapping[str, Trial], *, is_patient: bool = True) -> list[Ended]:
        """The ended trials, of these and of those held back, that can be settled now.

        Args:
            ended: New from the engine.
            running: The trials, by name; others are dropped.
            is_patient: False returns all of them, for a sweep that is being cancelled.
        """
        for end in ended:
            if end.name in running:
                self._ended.setdefault(end.name, end)
        ready = [name for name in self._ended if not is_patient or self.is_over(running[name])]
        return [_with_guards_reason(self._ended.pop(name), running[name]) for name in ready]

    def is_over(self, trial: Trial) -> bool:
        """True when the trial's result is visible, or when no supervisor runs it and no result can appear any more."""
        is_over = self._is_over(trial)
        if is_over:
            self._deadlines.pop(trial.name, None)
        return is_over

    def _is_over(self, trial: Trial) -> bool:
        deadline = self._deadlines.setdefault(trial.name, self._clock() + visible_seconds())
        if own_result(trial.sweep, trial.name) is not None:
            return True
        if is_supervised(trial.sweep, trial.name):
            return False
        return self._clock() > deadline or not _may_have_begun_elsewhere(trial_folder(trial.sweep, trial.name))


def _may_have_begun_elsewhere(folder: Path) -> bool:
    """True when a supervisor on another host has begun this trial, or may have."""
    claimed = read_json(folder / STARTED)
    if not isinstance(claimed, dict):
        return not withdraw(folder)  # after this no supervisor can begin it; it fails if one has
    return not is_withdrawn(claimed) and is_alive_here(claimed) is None


def _with_guards_reason(ended: Ended, trial: Trial) -> Ended:
    """Add the note of a guard that killed its supervisor because it did not respond."""
    note = read_json(trial_folder(trial.sweep, trial.name) / GUARD)
    if isinstance(note, dict) and note.get("attempt") == attempt_of(trial.sweep, trial.name):
        return replace(ended, evidence={"stuck": note.get("reason"), **ended.evidence})
    return ended


class SilentSupervisors:
    """Ends supervisors that are alive but stuck: stopped, or blocked by a file system that hangs.

    The guard on the supervisor's own host kills it first (`trial_guard.py`). What is found here has lost its guard, or
    its host does not respond.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next_check = 0.0
        self._reasons: dict[str, str] = {}

    def end_silent(self, engine: Engine, running: Mapping[str, Trial]) -> None:
        """Have the engine kill each one that was silent for longer than its trial's limits and visibility allow."""
        end = getattr(engine, "end", None)
        if end is None or self._clock() < self._next_check:
            return
        self._next_check = self._clock() + BEAT_SECONDS
        found = {name: reason for name, trial in running.items() if (reason := self._reason(trial))}
        if found:
            self._reasons |= found
            end(list(found))

    def _reason(self, trial: Trial) -> str | None:
        if trial.name in self._reasons:
            return None
        claimed = read_json(trial_folder(trial.sweep, trial.name) / STARTED)
        if not isinstance(claimed, dict) or is_withdrawn(claimed):
            return None
        silent = silent_seconds(trial.sweep, trial.name)
        if silent <= allowed_silence(trial.spec.limits) + visible_seconds():
            return None
        process = f"pid {claimed.get('pid')} on {claimed.get('host')}"
        return f"its supervisor ({process}) showed no sign of life for {silent:.0f} s and was ended"

    def explain(self, ended: Ended) -> Ended:
        """Add why the supervisor was ended, if we ended it."""
        reason = self._reasons.pop(ended.name, None)
        return ended if reason is None else replace(ended, evidence={"stuck": reason, **ended.evidence})


_TRANSIENT = frozenset(
    (
        errno.ENOSPC,
        errno.EDQUOT,
        errno.ESTALE,
        errno.EIO,
        errno.ETIMEDOUT,
        errno.EAGAIN,
        errno.EMFILE,
        errno.ENFILE,
        errno.EREMOTEIO,
    )
)

_PAUSE_SECONDS = 5.0  # between two tries on a full disk


def is_transient(error: OSError) -> bool:
    """Whether the error may go away, such as a full disk; a sweep of a week waits for that."""
    return error.errno in _TRANSIENT


class Pause:
    """A pause between two tries of something that failed for now.

    Args:
        seconds: Between two tries.
        clock: Monotonic seconds.

    Attributes:
        why: The reason, for a user; empty when there is no pause.
    """

    def __init__(self, seconds: float | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._clock = _PAUSE_SECONDS if seconds is None else seconds, clock
        self._until = 0.0
        self.why = ""

    def begin(self, error: OSError) -> None:
        self.why = f"waiting: {error.strerror or error}" + (f" ({error.filename})" if error.filename else "")
        self._until = self._clock() + self._seconds

    def is_over(self) -> bool:
        return not self.why or self._clock() >= self._until

    def end(self) -> None:
        self.why = ""


class ResultWriter:
    """Appends results to the sweep's list, and retries what failed. The trials' own folders have them already.

    Args:
        write: Writes one result.
    """

    def __init__(self, write: Callable[[TrialResult], None]) -> None:
        self._write = write
        self._waiting: deque[TrialResult] = deque()
        self.pause = Pause()

    def add(self, result: TrialResult) -> None:
        self._waiting.append(result)
        self.catch_up()

    def catch_up(self) -> None:
        """Write the queued results, in order."""
        while self._waiting and self.pause.is_over():
            try:
                self._write(self._waiting[0])
            except OSError as error:
                if not is_transient(error):
                    raise
                self.pause.begin(error)
                return
            self._waiting.popleft()
            self.pause.end()

    def close(self, patience_seconds: float = 60.0) -> int:
        """Write what is still queued; returns how many results could not be written."""
        deadline = time.monotonic() + patience_seconds
        while self._waiting and time.monotonic() < deadline:
            time.sleep(0.05)
            self.catch_up()
        return len(self._waiting)
