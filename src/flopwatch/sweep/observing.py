"""Who looks at a sweep can never end it: an observer that fails is told of once and not called again."""

import contextlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from flopwatch.plain_text import one_line
from flopwatch.sweep.engines.protocol import Trial
from flopwatch.trial_records import TrialResult


class Observer(Protocol):
    """Is told what happens; the command line draws its table from it. One that raises is not called again."""

    def started(self, trial: Trial) -> None: ...

    def ended(self, result: TrialResult) -> None: ...

    def ticked(self, running: Mapping[str, Trial], waiting: int, engine_state: str) -> None: ...


@runtime_checkable
class HearsOfRetries(Protocol):
    """An observer that also wants to know of attempts that were lost."""

    def tries_again(self, lost: TrialResult, retry: int, most: int) -> None: ...


@dataclass
class Stop:
    """Set from outside. `finish` starts nothing new and withdraws what is queued, `kill` also ends what runs.

    Attributes:
        finish: Asked for by a person.
        kill: Likewise.
        is_over_budget: Set by the runner once the sweep's time is used up; does what `finish` does.
    """

    finish: bool = False
    kill: bool = False
    is_over_budget: bool = False

    @property
    def is_finishing(self) -> bool:
        return self.finish or self.kill or self.is_over_budget


class SafeObserver:
    """Passes on to an observer what happens, as long as that one does not raise.

    Args:
        observer: With the methods of `Observer`.
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
