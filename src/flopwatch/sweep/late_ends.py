"""Between an engine's word that a supervisor is gone and the trial's end: a result may come into sight late.

On the host of the supervisor, files are seen at once. What another host has written is waited for, longer than a file
system hides it, before a trial is called lost; and as long as the supervisor gives signs of life, nothing is decided.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from flopwatch.file_reading import read_json
from flopwatch.sweep.claims import STARTED, is_alive_here, is_withdrawn, visible_seconds, withdraw
from flopwatch.sweep.engines.protocol import Ended, Trial
from flopwatch.sweep.folder import attempt_of, is_supervised, own_result
from flopwatch.sweep.leftovers import GUARD
from flopwatch.trial_files import trial_folder


class LateEnds:
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
