"""Where a rank's busy time goes: input, compute, host. The rest of a step is waiting for the other ranks.

In synchronous training every rank waits for the slowest one in each collective, so all step times are equal and do not
show which rank is slow. The time a rank is busy does. On a CPU that is the processor time of the training's thread,
which does not grow while the thread waits. A thread that is blocked elsewhere (a slow disk, a lock, a sleep) uses no
processor time either, so `StallSampler` samples its stack to find such stalls.
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


class BusyTime:
    """Adds up the processor time of the training's thread between the marks of the step clock."""

    def __init__(self, cpu_seconds: Callable[[], float] = time.thread_time) -> None:
        self._cpu = cpu_seconds
        self._last = cpu_seconds()
        self._busy = 0.0
        self._steps: deque[float] = deque(maxlen=_MOST_STEPS)
        self.is_in_step = False
        """True while the training works on a batch; the sampling thread reads it."""

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
        """Pause busy-time accounting; pass the returned flag to `come_back`."""
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

        The median over more than one window, because other processes on the machine slow some seconds down.
        """
        wanted = _MOST_STEPS if step_seconds <= 0 else int(_SECONDS_REMEMBERED / step_seconds)
        first = max(0, len(self._steps) - min(max(wanted, _FEWEST_STEPS), _MOST_STEPS))
        return median(islice(self._steps, first, None)) if self._steps else None


def profile_of(
    steps: int, seconds: float, input_seconds: float | None, busy_seconds_per_step: float, stalled_share: float | None
) -> Profile | None:
    """Seconds per step by cause; None when nothing was timed.

    Args:
        steps: Steps of the window.
        seconds: Their time.
        input_seconds: Part of it before the batch was there.
        busy_seconds_per_step: Processor time of the training's thread in the rest of a step.
        stalled_share: Share of the rest in which the thread was blocked outside collectives and backward passes.

    >>> profile_of(10, 2.0, 0.1, 0.12, 0.1)
    Profile(input=0.01, compute=0.12, host=0.019)
    """
    if steps == 0 or seconds <= 0:
        return None
    waited = input_seconds or 0.0
    stalled = (stalled_share or 0.0) * max(0.0, seconds - waited)
    return Profile(waited / steps, busy_seconds_per_step, stalled / steps)


_SAMPLE_SECONDS = 0.001
"""A thread that uses less than `_BUSY_SHARE` of this as processor time is blocked."""
_BUSY_SHARE = 0.2
_SHARE_OF_A_CORE = 0.0003
"""Processor time that sampling may use; it decides the time between two samples."""
_SHORTEST_PAUSE_SECONDS = 0.02
_SAMPLES_KEPT = 150
"""Enough to distinguish a stall of 10 % of the step from none in 98 of 100 cases (binomial distribution); at about two
samples per second they cover the last minute or so."""
_FEWEST_SAMPLES = 40
_WAITS_FOR_RANKS = ("/torch/autograd/", "/torch/distributed/", "/torch/nn/parallel/")
"""Folders whose code waits for other ranks: DDP's all-reduce runs inside the backward pass."""


class StallSampler:
    """A thread that samples the thread it was made in: is it blocked, and not because it waits for other ranks?"""

    def __init__(self, busy_time: BusyTime) -> None:
        self._busy_time = busy_time
        self._ident = threading.get_ident()
        self._samples: deque[bool] = deque(maxlen=_SAMPLES_KEPT)
        self._is_over = False
        self.cpu_seconds = 0.0
        if hasattr(time, "pthread_getcpuclockid"):
            self._clock = time.pthread_getcpuclockid(self._ident)
            threading.Thread(target=self._run, name="flopwatch-stalls", daemon=True).start()

    def share(self) -> float | None:
        """Share of the samples inside steps in which the thread was stalled; None before there are enough."""
        samples = list(self._samples)
        return sum(samples) / len(samples) if len(samples) >= _FEWEST_SAMPLES else None

    def stop(self) -> None:
        self._is_over = True

    def _run(self) -> None:
        # Plain sleeps, because Event.wait with a timeout is Python code that a training step evicts from the caches.
        clock, busy_time, sample = self._clock, self._busy_time, self._sample
        began, pause = time.monotonic(), _SHORTEST_PAUSE_SECONDS
        while not self._is_over:
            time.sleep(pause)
            try:
                before = time.clock_gettime(clock)
                time.sleep(_SAMPLE_SECONDS)
                busy = time.clock_gettime(clock) - before
            except OSError:  # the training's thread has ended
                return
            if busy_time.is_in_step:
                sample(busy)
            self.cpu_seconds = time.thread_time()
            pause = max(_SHORTEST_PAUSE_SECONDS, self.cpu_seconds / _SHARE_OF_A_CORE - time.monotonic() + began)

    def _sample(self, busy_seconds: float) -> None:
        """A thread that used the processor is not stalled; otherwise its stack decides."""
        is_stalled = False
        if busy_seconds < _BUSY_SHARE * _SAMPLE_SECONDS:
            # The documented way to another thread's stack; its underscore only warns that it is for special purposes.
            frame = sys._current_frames().get(self._ident)
            is_stalled = frame is not None and not _waits_for_ranks(frame)
        self._samples.append(is_stalled)


_file_kinds: dict[str, bool | None] = {}
"""By file name, because code objects of different files can compare equal. True: waits for ranks; None: other torch
code, so its caller decides; False: code outside torch."""


def _waits_for_ranks(frame: FrameType | None) -> bool:
    """Whether torch is running a backward pass or a collective; the first frame outside torch ends the search."""
    while frame is not None:
        file = frame.f_code.co_filename
        kind = _file_kinds.get(file, ...)
        if kind is ...:
            path = file.replace("\\", "/")
            kind = True if any(part in path for part in _WAITS_FOR_RANKS) else (None if "/torch/" in path else False)
            if len(_file_kinds) < 10_000:  # code made by exec has ever new names
                _file_kinds[file] = kind
        if kind is not None:
            return kind
        frame = frame.f_back
    return False
