"""Who looks at a sweep can never end it: an observer that fails is told of once and not called again."""

import contextlib
import sys
from collections.abc import Callable, Mapping

from flopwatch.plain_text import one_line
from flopwatch.sweep.engines.protocol import Trial
from flopwatch.trial_records import TrialResult


class SafeObserver:
    """Passes on to an observer what happens, as long as that one does not raise.

    Args:
        observer: With the methods of `flopwatch.sweep.runner.Observer`.
    """

    def __init__(self, observer: object) -> None:
        self._observer: object | None = observer

    def started(self, trial: Trial) -> None:
        self._tell("started", trial)

    def ended(self, result: TrialResult) -> None:
        self._tell("ended", result)

    def ticked(self, running: Mapping[str, Trial], waiting: int, engine_state: str) -> None:
        self._tell("ticked", running, waiting, engine_state)

    def tries_again(self, lost: TrialResult, retry: int, most: int) -> None:
        if hasattr(self._observer, "tries_again"):
            self._tell("tries_again", lost, retry, most)

    def _tell(self, what: str, *facts: object) -> None:
        if self._observer is None:
            return
        try:
            call: Callable[..., None] = getattr(self._observer, what)
            call(*facts)
        except (Exception, SystemExit) as error:  # rich answers a closed pipe with SystemExit
            self._observer = None
            with contextlib.suppress(Exception):
                said = one_line(f"{type(error).__name__}: {error}", 300)
                sys.stderr.write(f"flopwatch: what shows the sweep failed ({said}); the sweep goes on unseen\n")
