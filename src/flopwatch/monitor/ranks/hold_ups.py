"""Looks now and then whether the training's thread stands still, and whether it does so waiting for other ranks."""

import sys
import threading
import time
from collections import deque
from types import CodeType, FrameType

from flopwatch.monitor.ranks.own_time import OwnTime

_LOOK_SECONDS = 0.001
"""A thread that has used no processor time for so long stands still."""
_BUSY_SHARE = 0.2
_SHARE_OF_A_CORE = 0.0005
"""What looking may cost: decides how often it is done."""
_SHORTEST_PAUSE_SECONDS = 0.02
_LOOKS_REMEMBERED = 150
"""Enough to tell 10 % of the step from nothing in 98 of 100 cases (binomial), at 5 to 10 looks per second."""
_FEWEST_LOOKS = 40
_WAITS_FOR_OTHERS = ("/torch/autograd/", "/torch/distributed/", "/torch/nn/parallel/")


class HoldUps:
    """A thread that samples the one it was made in."""

    def __init__(self, own_time: OwnTime) -> None:
        self._own_time = own_time
        self._ident = threading.get_ident()
        self._looks: deque[bool] = deque(maxlen=_LOOKS_REMEMBERED)
        self._stop = threading.Event()
        self.cpu_seconds = 0.0
        if hasattr(time, "pthread_getcpuclockid"):
            self._clock = time.pthread_getcpuclockid(self._ident)
            threading.Thread(target=self._run, name="flopwatch-hold-ups", daemon=True).start()

    def share(self) -> float | None:
        """Of the looks at a step under way, those that found the thread held up; None before there are enough."""
        looks = list(self._looks)
        return sum(looks) / len(looks) if len(looks) >= _FEWEST_LOOKS else None

    def stop(self) -> None:
        self._stop.set()

    def _run(self) -> None:
        began = time.monotonic()
        while not self._stop.wait(self._pause(time.monotonic() - began)):
            if self._own_time.is_in_step:
                self._look()
            self.cpu_seconds = time.thread_time()

    def _pause(self, elapsed: float) -> float:
        """So long that all looks together stay below their share of a core."""
        return max(_SHORTEST_PAUSE_SECONDS, self.cpu_seconds / _SHARE_OF_A_CORE - elapsed)

    def _look(self) -> None:
        try:
            before = time.clock_gettime(self._clock)
            began = time.monotonic()
            time.sleep(_LOOK_SECONDS)
            busy = time.clock_gettime(self._clock) - before
            if not self._own_time.is_in_step:
                return
            stands_still = busy < _BUSY_SHARE * (time.monotonic() - began)
            frame = sys._current_frames().get(self._ident)
            self._looks.append(stands_still and frame is not None and not _waits_for_others(frame))
        except OSError:  # the thread has ended
            self._stop.set()


_known: dict[CodeType, bool | None] = {}


def _waits_for_others(frame: FrameType | None) -> bool:
    """Whether torch is running a backward pass or a collective; the first frame outside torch ends the search."""
    while frame is not None:
        kind = _known.get(frame.f_code, ...)
        if kind is ...:
            path = frame.f_code.co_filename.replace("\\", "/")
            kind = True if any(part in path for part in _WAITS_FOR_OTHERS) else (None if "/torch/" in path else False)
            if len(_known) < 10_000:
                _known[frame.f_code] = kind
        if kind is not None:
            return kind
        frame = frame.f_back
    return False
