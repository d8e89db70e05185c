"""Where a rank's own time goes: input, compute, host. Whatever is left of a step is waiting for the other ranks.

All ranks of a synchronous training have the same step time, since each waits for the slowest in every collective: step
times cannot tell who is slow. What tells is the part of the step a rank is busy itself. On a CPU that is the processor
time of the training's thread, which does not grow while it waits. A thread that is held up elsewhere (a slow disk, a
lock, a sleep) uses no processor time either, so `HoldUps` looks now and then where it stands.
"""

import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from itertools import islice
from statistics import median
from types import FrameType

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


# Looks now and then whether the training's thread stands still, and whether it does so waiting for other ranks.


_LOOK_SECONDS = 0.001
"""A thread that has used no processor time for so long stands still."""
_BUSY_SHARE = 0.2
_SHARE_OF_A_CORE = 0.0003
"""What looking may cost: decides how often it is done."""
_SHORTEST_PAUSE_SECONDS = 0.02
_LOOKS_REMEMBERED = 150
"""Enough to tell 10 % of the step from nothing in 98 of 100 cases (binomial), at about two looks per second."""
_FEWEST_LOOKS = 40
_WAITS_FOR_OTHERS = ("/torch/autograd/", "/torch/distributed/", "/torch/nn/parallel/")


class HoldUps:
    """A thread that samples the one it was made in."""

    def __init__(self, own_time: OwnTime) -> None:
        self._own_time = own_time
        self._ident = threading.get_ident()
        self._looks: deque[bool] = deque(maxlen=_LOOKS_REMEMBERED)
        self._is_over = False
        self.cpu_seconds = 0.0
        if hasattr(time, "pthread_getcpuclockid"):
            self._clock = time.pthread_getcpuclockid(self._ident)
            threading.Thread(target=self._run, name="flopwatch-hold-ups", daemon=True).start()

    def share(self) -> float | None:
        """Of the looks at a step under way, those that found the thread held up; None before there are enough."""
        looks = list(self._looks)
        return sum(looks) / len(looks) if len(looks) >= _FEWEST_LOOKS else None

    def stop(self) -> None:
        self._is_over = True

    def _run(self) -> None:
        # Plain sleeps: a wait with a time limit is Python code, which is not in the caches after a training step.
        clock, own_time, look = self._clock, self._own_time, self._look
        began, pause = time.monotonic(), _SHORTEST_PAUSE_SECONDS
        while not self._is_over:
            time.sleep(pause)
            try:
                before = time.clock_gettime(clock)
                time.sleep(_LOOK_SECONDS)
                busy = time.clock_gettime(clock) - before
            except OSError:  # the training's thread has ended
                return
            if own_time.is_in_step:
                look(busy)
            self.cpu_seconds = time.thread_time()
            pause = max(_SHORTEST_PAUSE_SECONDS, self.cpu_seconds / _SHARE_OF_A_CORE - time.monotonic() + began)

    def _look(self, busy_seconds: float) -> None:
        """A thread that used the processor is not held up; of one that did not, the place is looked at."""
        is_held = False
        if busy_seconds < _BUSY_SHARE * _LOOK_SECONDS:
            frame = sys._current_frames().get(self._ident)
            is_held = frame is not None and not _waits_for_others(frame)
        self._looks.append(is_held)


_known: dict[str, bool | None] = {}
"""By file: code objects of different files can be equal."""


def _waits_for_others(frame: FrameType | None) -> bool:
    """Whether torch is running a backward pass or a collective; the first frame outside torch ends the search."""
    while frame is not None:
        file = frame.f_code.co_filename
        kind = _known.get(file, ...)
        if kind is ...:
            path = file.replace("\\", "/")
            kind = True if any(part in path for part in _WAITS_FOR_OTHERS) else (None if "/torch/" in path else False)
            if len(_known) < 10_000:
                _known[file] = kind
        if kind is not None:
            return kind
        frame = frame.f_back
    return False
