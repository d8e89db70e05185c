"""Which time belongs to a step: from the end of the step before to its own end, without what happens apart from it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from flopwatch.clock import Clock
from flopwatch.monitor.ranks.own_time import OwnTime
from flopwatch.monitor.timers import StepTimer

Segments = tuple[tuple[Any, Any], ...]
"""Pairs of marks; their lengths add up to the step."""


class StepClock:
    """Cuts the time of a run into steps and what lies between them.

    Step times are in marks of the timer (events on an accelerator); phases and input wait are host time.

    Attributes:
        first_step_began: Host time; None until the first step is opened, and for a loop that opens none.
        seconds_before_first_step: Spent in phases by then.
    """

    def __init__(self, timer: StepTimer, clock: Clock, own_time: OwnTime | None = None) -> None:
        self._own_time = own_time
        self._was_in_step = False
        self._timer = timer
        self._clock = clock
        self._start: Any = None
        self._segments: list[tuple[Any, Any]] = []
        self._waiting_since: float | None = None
        self._wait_seconds: float | None = None
        self._depth = 0
        self.first_step_began: float | None = None
        self.seconds_before_first_step = 0.0

    def start_step(self) -> None:
        """The batch is there: the wait for it ends. Opens the first step of a session."""
        if self._start is None:
            self._start = self._timer.mark()
            self.first_step_began = self._clock()
        if self._waiting_since is not None:
            self._wait_seconds = (self._wait_seconds or 0.0) + self._clock() - self._waiting_since
            self._waiting_since = None
        elif self._wait_seconds is None:
            self._wait_seconds = 0.0
        if self._own_time is not None:
            self._own_time.batch_is_here()

    def end_step(self) -> tuple[Segments | None, float | None]:
        """The step's segments and its input wait; None for what was not seen."""
        now = self._timer.mark()
        if self._own_time is not None:
            self._own_time.step_ends()
        segments = None if self._start is None else (*self._segments, (self._start, now))
        wait = self._wait_seconds
        self._start = now
        if self._segments:
            self._segments = []
        self._wait_seconds = None
        self._waiting_since = self._clock()
        return segments, wait

    @contextmanager
    def apart(self) -> Iterator[list[float]]:
        """Time that is not the step's. Yields a list that gets the seconds; nested, the outermost counts."""
        self._leave()
        began = self._clock()
        seconds: list[float] = []
        try:
            yield seconds
        finally:
            now = self._clock()
            is_outermost = self._depth == 1
            seconds.append(now - began if is_outermost else 0.0)
            if self._start is None:
                self.seconds_before_first_step += seconds[0]
            self._come_back(now)

    def book(self) -> float:
        """Take the time since the last step's end (or the last booking) out of the next step, and return it."""
        now = self._clock()
        seconds = 0.0 if self._waiting_since is None else now - self._waiting_since
        if self._waiting_since is not None:
            self._waiting_since = now
            self._start = self._timer.mark()
            self._segments.clear()
        return seconds

    def _leave(self) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        if self._own_time is not None:
            self._was_in_step = self._own_time.leave()
        if self._start is not None:
            self._segments.append((self._start, self._timer.mark()))
        if self._waiting_since is not None:
            self._wait_seconds = (self._wait_seconds or 0.0) + self._clock() - self._waiting_since

    def _come_back(self, now: float) -> None:
        self._depth -= 1
        if self._depth:
            return
        if self._own_time is not None:
            self._own_time.come_back(self._was_in_step)
        if self._start is not None:
            self._start = self._timer.mark()
        if self._waiting_since is not None:
            self._waiting_since = now
