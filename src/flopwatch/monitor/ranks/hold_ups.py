"""Looks now and then whether the training's thread stands still, and whether it does so waiting for other ranks."""

import sys
import threading
import time
from collections import deque
from types import FrameType

from flopwatch.monitor.ranks.own_time import OwnTime

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
