"""Follows a sweep that another process runs, by its folder alone."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

from flopwatch.clock import Clock, monotonic_seconds
from flopwatch.file_reading import UnreadableError, opened_regular
from flopwatch.record_reading import BrokenRecordError
from flopwatch.sweep.engines.protocol import Trial
from flopwatch.sweep.plan import Plan
from flopwatch.sweep.runner_file import RunnerState, is_alive, read_runner
from flopwatch.sweep_reading import NewerFormatError, read_trial_list, result_from
from flopwatch.sweep_results import read_results
from flopwatch.trial_files import RESULTS
from flopwatch.trial_records import UNSETTLED, TrialResult, TrialSpec

_SILENCE_SECONDS = 90.0
"""A runner on another host writes every second; file systems show that up to a minute late."""


class Follower:
    """What happens in a sweep's folder.

    Args:
        sweep: The folder.
        clock: Measures the runner's silence.
    """

    def __init__(self, sweep: Path, clock: Clock = monotonic_seconds) -> None:
        self._sweep, self._clock = sweep, clock
        self._file = sweep / RESULTS
        self._offset = self._file.stat().st_size if self._file.is_file() else 0
        self._trials = _listed_trials(sweep)
        results = read_results(sweep)
        settled = {name: result for name, result in results.items() if result.outcome not in UNSETTLED}
        kept = {name: result for name, result in settled.items() if name in self._trials}
        todo = tuple(trial for name, trial in self._trials.items() if name not in kept)
        self.plan = Plan(tuple(self._trials.values()), todo, kept)
        self._last: RunnerState | None = None
        self._heard = clock()

    def new_results(self) -> Iterator[TrialResult]:
        """Ends since the last call; a line that is only half there waits for the next."""
        try:
            with opened_regular(self._file) as stream:
                stream.seek(self._offset)
                content = stream.read()
        except (FileNotFoundError, UnreadableError):
            return
        whole, newline, _ = content.rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        for line in whole.splitlines():
            try:
                yield result_from(json.loads(line))
            except (ValueError, RecursionError, BrokenRecordError, NewerFormatError):
                continue  # the next run of the sweep tells of it

    def running(self, state: RunnerState | None) -> dict[str, Trial]:
        names = (state.running or {}) if state is not None else {}
        return {name: self._trials[name] for name in names if name in self._trials}

    def runner(self) -> RunnerState | None:
        """What the runner told last; None when there is none, or none any more."""
        state = read_runner(self._sweep)
        if state != self._last:
            self._last, self._heard = state, self._clock()
        if state is None or is_alive(state) is False:
            return None
        is_silent = is_alive(state) is None and self._clock() - self._heard > _SILENCE_SECONDS
        return None if is_silent else state


def _listed_trials(sweep: Path) -> dict[str, Trial]:
    found = {}
    for name, entry in read_trial_list(sweep).trials.items():
        with contextlib.suppress(BrokenRecordError, KeyError):
            found[name] = Trial(sweep, name, str(entry.get("key")), TrialSpec.from_json(entry["spec"]))
    return found
