"""Where a rank's own time goes: input, compute, host. Whatever is left of a step is waiting for the other ranks.

All ranks of a synchronous training have the same step time, since each waits for the slowest in every collective: step
times cannot tell who is slow. What tells is the part of the step a rank is busy itself. On a CPU that is the processor
time of the training's thread, which does not grow while it waits. A thread that is held up elsewhere (a slow disk, a
lock, a sleep) uses no processor time either, so `HoldUps` looks now and then where it stands.
"""

import time
from collections import deque
from collections.abc import Callable
from itertools import islice
from statistics import median

from flopwatch.monitor.ranks.reports import Profile

_SECONDS_REMEMBERED = 60.0
_FEWEST_STEPS, _MOST_STEPS = 32, 512


class OwnTime:
    """Adds up the processor time of the training's thread between the marks of the step clock."""

    def __init__(self, cpu_seconds: Callable[[], float] = time.thread_time) -> None:
        self._cpu = cpu_seconds
        self._last = cpu_seconds()
        self._busy = 0.0
        self._steps: deque[float] = deque(maxlen=_MOST_STEPS)
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

    def typical(self, step_seconds: float) -> float | None:
        """Busy seconds of the typical step of the last minute.

        The median, over more than one window: neighbours on the same machine make some seconds dear now and then.
        """
        wanted = _MOST_STEPS if step_seconds <= 0 else int(_SECONDS_REMEMBERED / step_seconds)
        first = max(0, len(self._steps) - min(max(wanted, _FEWEST_STEPS), _MOST_STEPS))
        return median(islice(self._steps, first, None)) if self._steps else None


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
