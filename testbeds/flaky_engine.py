"""An engine for `flopwatch sweep --engine testbeds.flaky_engine:FlakyEngine`, with which a long sweep takes seconds."""

import os
from collections.abc import Sequence
from pathlib import Path
from random import Random
from time import sleep

from flopwatch.clock import monotonic_seconds
from flopwatch.files import write_json
from flopwatch.records.trial import TrialResult
from flopwatch.records.trial_files import STARTED, trial_folder
from flopwatch.sweep.engines.protocol import Ended
from flopwatch.sweep.folder import Trial
from flopwatch.testing import InProcessEngine


class FlakyEngine(InProcessEngine):
    """An engine that runs no processes: trials succeed without doing anything, or are lost as if their node had failed.

    Which attempts are lost depends only on the trial's name, the number of the attempt and the seed.

    Args:
        share_lost: Probability that an attempt is lost.
        seed: Determines which attempts are lost.
        room: Number of trials that the engine accepts at once.
        seconds: Time that passes before trials end.
    """

    def __init__(self, share_lost: float = 0.01, seed: int = 0, room: int = 8, seconds: float = 0.0) -> None:
        super().__init__(self._answer, room)
        self._share_lost, self._seed, self._seconds = share_lost, seed, seconds

    def _answer(self, trial: Trial) -> TrialResult | None:
        chance = Random(f"{trial.name} {len(trial.earlier_attempts)} {self._seed}").random()
        if chance < self._share_lost:
            write_json(trial_folder(trial.sweep, trial.name) / STARTED, {"pid": 0, "host": "n1"})
            return None
        facts: dict[str, float] = {"runner_pid": os.getpid(), "runner_rss_bytes": _own_rss_bytes()}
        facts["end_monotonic_seconds"] = monotonic_seconds()
        return TrialResult(trial.name, trial.key, trial.spec, "ok", "ran to its end", facts, seconds=0.0)

    def submit(self, trials: Sequence[Trial]) -> None:
        super().submit(trials)
        self.submitted.clear()  # otherwise the list would grow with every trial of a long sweep

    def wait(self, seconds: float) -> Sequence[Ended]:
        sleep(self._seconds)
        return [Ended(ended.name, {"state": "NODE_FAIL", "host": "n1"}) for ended in super().wait(seconds)]


def _own_rss_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
