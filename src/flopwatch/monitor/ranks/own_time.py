"""Where a rank's own time goes: input, compute, host. Whatever is left of a step is waiting for the other ranks.

All ranks of a synchronous training have the same step time, since each waits for the slowest in every collective: step
times cannot tell who is slow. What tells is the part of the step a rank is busy itself. On a CPU that is the processor
time of the training's thread, which does not grow while it waits. A thread that is held up elsewhere (a slow disk, a
lock, a sleep) uses no processor time either, so `HoldUps` looks now and then where it stands.
"""

import time
from collections import deque
from collections.abc import Callable
from statistics import median

from flopwatch.monitor.ranks.reports import Profile

_STEPS_REMEMBERED = 128


class OwnTime:
    """Adds up the processor time of the training's thread between the marks of the step clock."""

    def __init__(self, cpu_seconds: Callable[[], float] = time.thread_time) -> None:
        self._cpu = cpu_seconds
        self._last = cpu_seconds()
        self._busy = 0.0
        self._steps: deque[float] = deque(maxlen=_STEPS_REMEMBERED)
        self.is_in_step = False
        """True while the training works on a batch; read by another thread."""

    def batch_is_here(self) -> None:
        self._last = self._cpu()
        self.is_in_step = True

    def step_ends(self) -> None:
        now = self._cpu()
        if self.is_in_step:
            self._busy += now - self._last
        self._last = now
        self.is_in_step = False
        self._steps.append(self._busy)
        self._busy = 0.0

    def leave(self) -> bool:
        """Something apart from the step begins; returns what to give to `come_back`."""
        was_in_step = self.is_in_step
        if was_in_step:
            self._busy += self._cpu() - self._last
        self.is_in_step = False
        return was_in_step

    def come_back(self, was_in_step: bool) -> None:
        self._last = self._cpu()
        self.is_in_step = was_in_step

    def typical(self) -> float | None:
        """Busy seconds of the typical step of late.

        The median, over more than one window: neighbours on the same machine make a few seconds dear now and then.
        """
        return median(self._steps) if self._steps else None


def profile_of(
    steps: int, seconds: float, input_seconds: float | None, busy_seconds_per_step: float, held_share: float | None
) -> Profile | None:
    """Seconds per step by cause; None when nothing was timed.

    Args:
        steps: Steps of the window.
        seconds: Their time.
        input_seconds: Part of it before the batch was there.
        busy_seconds_per_step: Processor time of the training's thread in the rest of a step.
        held_share: Share of the rest in which the thread stood still outside collectives and backward passes.

    >>> profile_of(10, 2.0, 0.1, 0.12, 0.1)
    Profile(input=0.01, compute=0.12, host=0.019)
    """
    if steps == 0 or seconds <= 0:
        return None
    waited = input_seconds or 0.0
    held = (held_share or 0.0) * max(0.0, seconds - waited)
    return Profile(waited / steps, busy_seconds_per_step, held / steps)
