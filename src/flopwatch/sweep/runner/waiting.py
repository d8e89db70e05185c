"""Between an engine's word that a supervisor is gone and the trial's end: a result may come into sight late.

On the host of the supervisor, files are seen at once. What another host has written is waited for, longer than a file
system hides it, before a trial is called lost; and as long as the supervisor gives signs of life, nothing is decided.
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
    """Holds ends back until they can be told.

    Args:
        clock: Of this process.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ended: dict[str, Ended] = {}
        self._deadlines: dict[str, float] = {}

    def sift(self, ended: Iterable[Ended], running: Mapping[str, Trial], *, is_patient: bool = True) -> list[Ended]:
        """Of these ends, and of those held back, the ones that can be told now.

        Args:
            ended: New from the engine.
            running: The trials, by name; an end of any other is dropped.
            is_patient: False tells them all, for a sweep that is being cancelled.
        """
        for end in ended:
            if end.name in running:
                self._ended.setdefault(end.name, end)
        told = [name for name in self._ended if not is_patient or self.is_over(running[name])]
        return [_with_guards_word(self._ended.pop(name), running[name]) for name in told]

    def is_over(self, trial: Trial) -> bool:
        """True when the trial's result is in sight, or when certainly nobody runs it and no result will come."""
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
        return self._clock() > deadline or not _may_be_hidden(trial_folder(trial.sweep, trial.name))


def _may_be_hidden(folder: Path) -> bool:
    """True when a supervisor on another host has, or may have, begun this trial."""
    claimed = read_json(folder / STARTED)
    if not isinstance(claimed, dict):
        return not withdraw(folder)  # from now on none can begin it, and if one has, this fails
    return not is_withdrawn(claimed) and is_alive_here(claimed) is None


def _with_guards_word(ended: Ended, trial: Trial) -> Ended:
    """A guard that killed its supervisor for its silence has written that down."""
    word = read_json(trial_folder(trial.sweep, trial.name) / GUARD)
    if isinstance(word, dict) and word.get("attempt") == attempt_of(trial.sweep, trial.name):
        return replace(ended, evidence={"stuck": word.get("reason"), **ended.evidence})
    return ended


# Supervisors that live and do nothing: stopped, or waiting for a file system that hangs. Found by their silence.
#
# The guard on the supervisor's own host kills it first (`trial_guard.py`); what is found here has lost its guard, or
# its host does not answer.


class SilentSupervisors:
    """Ends them, once each.

    Args:
        clock: Of this process.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next_look = 0.0
        self._reasons: dict[str, str] = {}

    def end_them(self, engine: Engine, running: Mapping[str, Trial]) -> None:
        """Ask the engine to kill those that have been silent for longer than their trial may be, and our patience."""
        end = getattr(engine, "end", None)
        if end is None or self._clock() < self._next_look:
            return
        self._next_look = self._clock() + BEAT_SECONDS
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
        who = f"pid {claimed.get('pid')} on {claimed.get('host')}"
        return f"its supervisor ({who}) had given no sign of life for {silent:.0f} s and was ended"

    def explain(self, ended: Ended) -> Ended:
        """With why it was ended, if it was by us."""
        reason = self._reasons.pop(ended.name, None)
        return ended if reason is None else replace(ended, evidence={"stuck": reason, **ended.evidence})


# Errors of a file system that may pass, as a disk that is full for a while: a sweep of a week waits them out.


_PASSING = frozenset(
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

_PAUSE_SECONDS = 5.0


def is_transient(error: OSError) -> bool:
    return error.errno in _PASSING


class Pause:
    """Says when to try again, and why not now.

    Args:
        seconds: Between two tries.
        clock: Of this process.

    Attributes:
        why: Empty while all is well.
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
    """Writes results into the sweep's list, later if it must: the trials' own folders have them anyway.

    Args:
        write: Writes one.
    """

    def __init__(self, write: Callable[[TrialResult], None]) -> None:
        self._write = write
        self._waiting: deque[TrialResult] = deque()
        self.pause = Pause()

    def add(self, result: TrialResult) -> None:
        self._waiting.append(result)
        self.catch_up()

    def catch_up(self) -> None:
        """Write what waits, in order."""
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
        """Write what still waits; how many could not be."""
        deadline = time.monotonic() + patience_seconds
        while self._waiting and time.monotonic() < deadline:
            time.sleep(0.05)
            self.catch_up()
        return len(self._waiting)
