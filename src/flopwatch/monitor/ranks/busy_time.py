"""Measures how long a rank is busy in each step, to find the rank that slows down the others.

In synchronous training every rank waits for the slowest one in each collective. So all step times are equal, and only
the busy time shows which rank is slow. On a CPU it is measured as processor time of the training's thread, which does
not grow while the thread waits. A thread that is blocked by a slow disk, a lock or a sleep uses no processor time
either, so `StallSampler` samples the thread's stack to find such stalls.
"""

import sys
import threading
import time
from collections import deque
from itertools import islice
from statistics import median
from types import FrameType
from typing import Protocol

from flopwatch.monitor.ranks.reports import Profile

_SECONDS_REMEMBERED = 60.0
_FEWEST_STEPS, _MOST_STEPS = 32, 512


class Worker(Protocol):
    """What shows whether the training works on a batch."""

    is_working: bool


def profile_of(
    steps: int, seconds: float, input_seconds: float, busy_seconds_per_step: float, stalled_share: float
) -> Profile | None:
    """Compute a rank's busy seconds per step by cause; None if no step was timed.

    The busy time of the training's thread does not include the input wait. Of the rest, `stalled_share` is the share in
    which the thread was blocked by something other than another rank.

    >>> profile_of(10, 2.0, 0.1, 0.12, 0.1)
    Profile(input=0.01, compute=0.12, host=0.019)
    """
    if steps == 0 or seconds <= 0:
        return None
    stalled = stalled_share * max(0.0, seconds - input_seconds)
    return Profile(input_seconds / steps, busy_seconds_per_step, stalled / steps)


_SAMPLE_SECONDS = 0.001
"""Length of one observation. A thread that uses the processor for less than `_BUSY_SHARE` of it counts as blocked."""
_BUSY_SHARE = 0.2
_SHARE_OF_A_CORE = 0.0003
"""Share of a core that sampling may use; the pauses between samples are chosen accordingly."""
_SHORTEST_PAUSE_SECONDS = 0.02
_SAMPLES_KEPT = 150
"""Enough samples to detect a stall of 10 % of the step in 98 of 100 cases (binomial distribution). At about two samples
per second they cover the last minute."""
_FEWEST_SAMPLES = 40
_WAITS_FOR_RANKS = ("/torch/autograd/", "/torch/distributed/", "/torch/nn/parallel/")
"""Folders of torch whose code waits for other ranks. Autograd is one of them: DDP's all-reduce runs in backward."""


class StallSampler:
    """Samples in its own thread how often the thread that created it is idle without waiting for other ranks."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._ident = threading.get_ident()
        self._samples: deque[bool] = deque(maxlen=_SAMPLES_KEPT)
        self._is_over = False
        self.cpu_seconds = 0.0
        if hasattr(time, "pthread_getcpuclockid"):
            self._clock = time.pthread_getcpuclockid(self._ident)
            threading.Thread(target=self._run, name="flopwatch-stalls", daemon=True).start()

    def share(self) -> float | None:
        """Of the samples inside steps, the share in which the thread was stalled; None with too few samples."""
        samples = list(self._samples)
        return sum(samples) / len(samples) if len(samples) >= _FEWEST_SAMPLES else None

    def stop(self) -> None:
        self._is_over = True

    def _run(self) -> None:
        # This uses `sleep`, because `Event.wait` with a timeout runs Python code, which is slow right after a step.
        clock, worker, sample = self._clock, self._worker, self._sample
        began, pause = time.monotonic(), _SHORTEST_PAUSE_SECONDS
        while not self._is_over:
            time.sleep(pause)
            try:
                before = time.clock_gettime(clock)
                time.sleep(_SAMPLE_SECONDS)
                busy = time.clock_gettime(clock) - before
            except OSError:  # the training's thread has ended
                return
            if worker.is_working:
                sample(busy)
            self.cpu_seconds = time.thread_time()
            pause = max(_SHORTEST_PAUSE_SECONDS, self.cpu_seconds / _SHARE_OF_A_CORE - time.monotonic() + began)

    def _sample(self, busy_seconds: float) -> None:
        """Add a sample: the thread is stalled if it was idle and its stack shows no wait for other ranks."""
        is_stalled = False
        if busy_seconds < _BUSY_SHARE * _SAMPLE_SECONDS:
            # Despite its underscore, `sys._current_frames` is the documented way to get another thread's stack.
            frame = sys._current_frames().get(self._ident)
            is_stalled = frame is not None and not _waits_for_ranks(frame)
        self._samples.append(is_stalled)


class BusyTime:
    """Processor time of the training's thread in each step, and what `StallSampler` finds."""

    def __init__(self) -> None:
        self._steps: deque[float] = deque(maxlen=_MOST_STEPS)
        self._stalls: StallSampler | None = None

    def sample(self, worker: Worker) -> None:
        """Look for stalls from now on, in a thread of its own."""
        self._stalls = StallSampler(worker)

    def stop(self) -> None:
        if self._stalls is not None:
            self._stalls.stop()

    @property
    def cpu_seconds(self) -> float:
        return 0.0 if self._stalls is None else self._stalls.cpu_seconds

    def stalled_share(self) -> float | None:
        return None if self._stalls is None else self._stalls.share()

    def add(self, seconds: float) -> None:
        self._steps.append(seconds)

    def typical_seconds(self, step_seconds: float) -> float | None:
        """Median busy seconds per step over the last minute; None before the first step.

        The median covers a minute, because other processes can slow the machine down for some seconds.
        """
        wanted = _MOST_STEPS if step_seconds <= 0 else int(_SECONDS_REMEMBERED / step_seconds)
        first = max(0, len(self._steps) - min(max(wanted, _FEWEST_STEPS), _MOST_STEPS))
        return median(islice(self._steps, first, None)) if self._steps else None


_file_kinds: dict[str, bool | None] = {}
"""By file name, whether the file's code waits for other ranks. None for other files of torch, where the calling frame
decides. The keys are file names, because code objects of different files can compare equal."""


def _waits_for_ranks(frame: FrameType | None) -> bool:
    """Whether the stack is in a backward pass or a collective; the search ends at the first frame outside torch."""
    while frame is not None:
        file = frame.f_code.co_filename
        kind = _file_kinds.get(file, ...)
        if kind is ...:
            path = file.replace("\\", "/")
            kind = True if any(part in path for part in _WAITS_FOR_RANKS) else (None if "/torch/" in path else False)
            if len(_file_kinds) < 10_000:  # a limit, because code made by exec can have any number of file names
                _file_kinds[file] = kind
        if kind is not None:
            return kind
        frame = frame.f_back
    return False
