"""One rank of a training: reports each logging window to the rank that writes the log, which merges all reports.

In synchronous training every rank waits for the slowest one in each collective. So all step times are equal, and only
the busy time shows which rank is slow. On a CPU it is measured as processor time of the training's thread, which does
not grow while the thread waits. A thread that is blocked by a slow disk, a lock or a sleep uses no processor time
either, so `StallSampler` samples the thread's stack to find such stalls. An accelerator's busy time is measured by
events in its stream (`DeviceTime`), because the host runs ahead of it.
"""

import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from itertools import islice
from statistics import median
from types import FrameType
from typing import Protocol

import torch
import torch.distributed as dist

from flopwatch.monitor import notices
from flopwatch.monitor.measured_step import MeasuredStep, input_wait_share, seconds_of
from flopwatch.monitor.notices import Notify
from flopwatch.monitor.ranks.device_time import DeviceTime
from flopwatch.monitor.ranks.exchange import RankLink
from flopwatch.monitor.ranks.job_store import RunKey
from flopwatch.monitor.ranks.layout import device_identity, ranks_by_launcher
from flopwatch.monitor.ranks.reports import Profile, RankDoubt, Window, report_of
from flopwatch.monitor.ranks.waits import KnownWaits

_runs_of: Counter[int] = Counter()
"""Number of runs that monitors of this process have joined, by logging rank."""
_runs_in: Counter[str] = Counter()
"""Number of runs that monitors of this process have joined, by log path."""
_known_logs: set[str] = set()
"""Log path of each run of this process, plus `/` and a number, because several runs may write to one path."""
_MOST_INCOMPLETE = 200
"""The logging rank keeps up to this many windows while it waits for other ranks; then it continues without them."""


class Rank:
    """One of the `world_size` ranks of a training: this process.

    Attributes:
        link: The link to the other ranks; None with one rank, before the run starts, and after the link has failed.
        has_started: Whether the first step has ended.
        is_off: Whether this rank has stopped reporting to the logging rank.
        may_wait: Whether a checkpoint may wait for other ranks; False once it has waited in vain.
        busy: Processor time of the training's thread in its steps; None with one rank, or on an accelerator.
        device: The accelerator's time for this rank's own work; None with one rank, or on a CPU.
        window_steps: Steps per window by the logging rank's plan; None until the plan arrives.
    """

    def __init__(self, rank: int, world_size: int, logging_rank: int, notify: Notify) -> None:
        self.rank = rank
        self.world_size = world_size
        self._logging_rank = logging_rank
        self._notify = notify
        self.link: RankLink | None = None
        self.has_started = self.is_off = False
        self.may_wait = True
        self.busy = BusyTime() if world_size > 1 else None
        self.device: DeviceTime | None = None
        self.window_steps: int | None = None
        self._device_type = "cpu"
        self._incomplete: deque[Window] = deque()

    def start(self, log: str, device: torch.device, worker: "Worker") -> None:
        """Start the link to the other ranks of this run, without waiting for them."""
        self.has_started, self._device_type = True, device.type
        if self.world_size == 1:
            return
        if not (dist.is_available() and dist.is_initialized()):
            self.is_off = not self.is_logging
            self._notify(*notices.notice("ranks_unknown", rank=self.rank, world_size=self.world_size))
            return
        _runs_of[self._logging_rank] += 1
        _runs_in[log] += 1
        numbered, by_launcher = f"{log}/{_runs_in[log]}", ranks_by_launcher(device.type)
        _known_logs.add(numbered)
        key = RunKey(self._logging_rank, _runs_of[self._logging_rank], numbered, _known_logs)
        self.link = RankLink(key, self.rank, self.world_size, device_identity(device), by_launcher)
        if self.busy is not None:
            self.busy.sample(worker)

    def use_device_time(self) -> KnownWaits | None:
        """Measure from now on how busy an accelerator is, which processor time does not show.

        Returns what knows where passes wait for other ranks; None with one rank.
        """
        self.busy = None
        self.device = DeviceTime(self.world_size) if self.world_size > 1 else None
        return None if self.device is None else self.device.waits

    @property
    def is_logging(self) -> bool:
        return self.rank == self._logging_rank

    @property
    def ranks_on_device(self) -> int:
        """How many ranks compute on this rank's device; until they are counted, as many as the launcher says."""
        if self.world_size == 1:
            return 1
        counted = None if self.link is None else self.link.ranks_on_device
        return ranks_by_launcher(self._device_type) if counted is None else counted

    @property
    def is_complete(self) -> bool:
        """Whether all ranks have sent all windows that this rank has sent."""
        return not self._incomplete

    @property
    def waits_for_plan(self) -> bool:
        return not self.is_logging and self.window_steps is None

    @property
    def cpu_seconds(self) -> float:
        parts = (self.link, self.busy)
        return sum(part.cpu_seconds for part in parts if part is not None)

    def plan(self, steps: Sequence[MeasuredStep], log_every: int, log_seconds: float) -> None:
        """On the logging rank, send the steps per logging window to the other ranks, once."""
        if self.link is None or not self.is_logging or self.window_steps is not None:
            return
        seconds = [step.seconds for step in steps if step.seconds and not step.is_warm_up]
        self.window_steps = window_steps(median(seconds) if seconds else None, log_every, log_seconds)
        self.link.announce(self.window_steps)

    def profile(self, window: Window) -> Profile | None:
        """Busy time of this rank by cause in the steps that were not slowed down; None if those are less than half."""
        measured = [step for step in window.steps if not step.is_warm_up]
        is_typical = 2 * len(measured) > len(window.steps) and all(step.seconds is not None for step in measured)
        if is_typical and self.device is not None:
            return self.device.profile(measured)
        if window.busy_seconds_per_step is None or not is_typical:
            return None
        stalled = None if self.busy is None else self.busy.stalled_share()
        seconds = seconds_of(measured)
        waited = (input_wait_share(measured) or 0.0) * seconds
        return profile_of(len(measured), seconds, waited, window.busy_seconds_per_step, stalled or 0.0)

    def send_window(self, window: Window, peak_flops_per_s: float | None) -> None:
        """Send the report of a window; the logging rank keeps its own steps until all ranks have sent their reports."""
        if self.is_logging:
            self._incomplete.append(window)
        if self.link is not None:
            profile = self.profile(window)
            why = None if self.device is None else self.device.why_unknown
            if self.is_logging and why is not None and profile is not None and profile.compute is None:
                self._notify(*notices.notice("own_time_unknown", why=why))
            report = report_of(
                self.rank,
                window.steps,
                peak_flops_per_s=peak_flops_per_s,
                profile=profile,
                counter_values=window.counter_values,
            )
            self.link.send(report)

    def doubt(self, first_step: int) -> None:
        """Tell the logging rank that steps from this one on are not exact on this rank, although they were sent so."""
        if self.link is not None and not self.is_logging:
            self.link.add_doubt(RankDoubt(first_step, self.rank))

    def take_doubt(self) -> RankDoubt | None:
        """On the logging rank, the earliest doubt of other ranks since the last call; None without one."""
        return self.link.take_doubt() if self.link is not None and self.is_logging else None

    def complete(self, *, give_up: bool = False) -> Iterator[Window]:
        """On the logging rank, yield the windows that all ranks have sent; with `give_up`, incomplete ones too."""
        link = self.link
        if link is not None:
            while link.merged:
                report = link.merged.popleft()
                own: list[Window] = []
                while self._incomplete and self._incomplete[0].steps[-1].step <= report.last_step:
                    own.append(self._incomplete.popleft())
                if own:  # there are none if the monitor has failed on this rank only
                    steps = tuple(step for window in own for step in window.steps)
                    counters = tuple(each for window in own for each in window.counters)
                    yield Window(steps, report, None, counters, own[-1].counter_values)
            if link.failure is not None:
                self._leave_because(f"the connection to the other ranks has failed: {link.failure}")
            elif len(self._incomplete) > _MOST_INCOMPLETE:
                self._leave_because(f"the other ranks have sent nothing for {_MOST_INCOMPLETE} windows")
        while self._incomplete and (self.link is None or give_up):
            yield self._incomplete.popleft()

    def finish(self, seconds: float) -> None:
        """End this rank's reports and wait at most `seconds` for the other ranks."""
        if self.busy is not None:
            self.busy.stop()
        if self.link is None:
            return
        is_in_time = self.link.finish(seconds)
        if self.is_logging and self.link.absent:
            self._notify(*notices.ranks_absent(self.link.absent))
        elif self.is_logging and not is_in_time:
            self._notify(*notices.notice("ranks_late", seconds=seconds))

    def leave(self) -> None:
        """Stop exchanging reports with other ranks, without waiting."""
        self.is_off = not self.is_logging
        if self.busy is not None:
            self.busy.stop()
        if self.link is not None:
            self.link.give_up()

    def _leave_because(self, why: str) -> None:
        if self.is_logging:
            self._notify(*notices.notice("ranks_lost", rank=self.rank, why=why))
        self.leave()
        self.link = None


def window_steps(step_seconds: float | None, log_every: int, log_seconds: float) -> int:
    """The largest number of steps that divides `log_every` and takes at most `log_seconds`; at least 1.

    >>> window_steps(0.2, 50, 10.0), window_steps(0.9, 50, 10.0), window_steps(60.0, 50, 10.0)
    (50, 10, 1)
    """
    if step_seconds is None or step_seconds <= 0:
        return log_every
    divisors = [steps for steps in range(1, log_every + 1) if log_every % steps == 0]
    return max([steps for steps in divisors if steps * step_seconds <= log_seconds], default=1)


def ends_window(step: int, previous: int | None, window_steps: int) -> bool:
    """Whether a window ends with this step. Step numbers can have gaps, so `previous` gives the step before.

    >>> ends_window(49, 48, 50), ends_window(50, 49, 50), ends_window(1024, 512, 50)
    (True, False, True)
    """
    before = step if previous is None else previous + 1
    return (step + 1) // window_steps != before // window_steps


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
    Profile(input=0.01, compute=0.12, host=0.019, variance=0.0)
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


def _waits_for_ranks(frame: FrameType | None) -> bool:
    """Whether the stack is in a backward pass or a collective; the search ends at the first frame outside torch."""
    while frame is not None:
        path = frame.f_code.co_filename.replace("\\", "/")
        if "/torch/" not in path:
            return False
        if any(part in path for part in _WAITS_FOR_RANKS):
            return True
        frame = frame.f_back
    return False
