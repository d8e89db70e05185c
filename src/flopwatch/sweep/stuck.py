"""Supervisors that live and do nothing: stopped, or waiting for a file system that hangs. Found by their silence.

The guard on the supervisor's own host kills it first (`trial_guard.py`); what is found here has lost its guard, or
its host does not answer.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from flopwatch.file_reading import read_json
from flopwatch.sweep.claims import BEAT_SECONDS, STARTED, is_withdrawn, visible_seconds
from flopwatch.sweep.engines.protocol import Ended, Engine, Trial
from flopwatch.sweep.folder import silent_seconds
from flopwatch.sweep.supervisor import allowed_silence
from flopwatch.trial_files import trial_folder


class StuckSupervisors:
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
