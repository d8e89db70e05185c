"""Which time belongs to a step, and which part of it was spent waiting for a batch.

A step runs from the end of the step before to its own end, without phases. Between two steps, or two micro-batches,
lies a gap. Where the fetching of batches is timed (`monitor.batches`, the callbacks of Trainer and Lightning) the wait
is exactly that; the rest of the gap is the loop's own. Where it is not, a gap that ends with a batch being handed over
is taken for the wait, unless it is far longer than gaps usually are: such a gap is reported as time outside steps.

A wait lies between two marks of the timer, as a step does. On an accelerator the second mark passes when the batch has
come and the work queued before is done, so a wait during which the device was still busy is none.
"""

import multiprocessing
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from flopwatch.clock import Clock
from flopwatch.monitor.ranks.busy_time import BusyTime

# When a step ends: host time on a CPU, events in the device's own stream elsewhere, read one window late.
#
# On an accelerator the host runs ahead of the device, so host times say when work was queued, not when it was done. An
# event costs a few microseconds to record and is never waited for.


class StepTimer(Protocol):
    """Marks moments; the time between two marks is known once the later one has passed."""

    def mark(self) -> Any:
        """A mark at this moment."""

    def has_passed(self, mark: Any) -> bool:
        """Whether the device has reached the mark."""

    def seconds(self, start: Any, end: Any) -> float:
        """Seconds between two marks that have passed."""


class HostTimer:
    """Marks are seconds of the host's clock."""

    def __init__(self, clock: Clock) -> None:
        self.mark = clock

    def has_passed(self, mark: float) -> bool:
        return True

    def seconds(self, start: float, end: float) -> float:
        return end - start


class EventTimer:
    """Marks are events in the current stream. Written to torch's documented API; not yet run on a GPU."""

    def __init__(self, device: torch.device, event: Any = torch.Event) -> None:
        self._device = device
        self._event = event

    def mark(self) -> Any:
        event = self._event(self._device, enable_timing=True)
        event.record()
        return event

    def has_passed(self, mark: Any) -> bool:
        return bool(mark.query())

    def seconds(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end)) / 1e3


def timer_for(device: torch.device, clock: Clock) -> StepTimer:
    return HostTimer(clock) if device.type in ("cpu", "meta", "mps") else EventTimer(device)


# How long the gaps between steps usually are, so that an evaluation among them is not taken for a slow loader.


_REMEMBERED = 32
_FEWEST = 4
"""Gaps that must have been seen before one can be unusual."""
_FACTOR = 5.0
SHORT_GAP_SECONDS = 0.05
"""A gap of at most this length is never unusual: a busy machine alone makes gaps of some tens of milliseconds."""
_IDLE_SHARE = 0.2


def _has_worker_processes() -> bool:
    return bool(multiprocessing.active_children())


def _middle(values: Iterable[float]) -> float:
    """The median; `statistics.median` takes four times as long after a training step, and this runs on each."""
    ordered = sorted(values)
    half = len(ordered) // 2
    return (ordered[half] + ordered[~half]) / 2


class UsualGaps:
    """Decides whether a gap is unusual, by comparing it with the gaps before it.

    A gap is unusual when it is more than 5 times as long as the median of the last 32, and longer than a typical step.
    It is still taken for waiting when the process has workers and its thread stood idle: a loader with several workers
    delivers several batches at once, and then none for a while.
    """

    def __init__(
        self,
        cpu_seconds: Callable[[], float] = time.thread_time,
        has_worker_processes: Callable[[], bool] = _has_worker_processes,
    ) -> None:
        self._cpu_seconds = cpu_seconds
        self._has_worker_processes = has_worker_processes
        self._gaps: deque[float] = deque(maxlen=_REMEMBERED)
        self._gaps_seen = self._sorted_at = 0
        self._sorted: list[float] = []
        """The gaps, sorted at the time when `_gaps_seen` was `_sorted_at`."""
        self._works: deque[float] = deque(maxlen=_REMEMBERED)
        self._cpu_at_gap = self._cpu_at_phase = 0.0
        self._gaps_begun = 0
        self._has_workers = False

    def gap_begins(self, short: tuple[float, float] | None = None) -> None:
        """Start a gap. Reads the processor's clock, which is a system call, only where the loader has worker processes.

        Args:
            short: A gap before that was too short to be unusual, and what the loop worked before it.
        """
        if short is not None:
            self._gaps.append(short[0])
            self._gaps_seen += 1
            if short[1]:
                self._works.append(short[1])
        if self._gaps_begun % _REMEMBERED == 0:
            self._has_workers = self._has_worker_processes()
        self._gaps_begun += 1
        if self._has_workers:
            self._cpu_at_gap = self._cpu_seconds()

    def leave_gap(self) -> None:
        """A phase begins; its processor time does not belong to the gap."""
        if self._has_workers:
            self._cpu_at_phase = self._cpu_seconds()

    def come_back_to_gap(self) -> None:
        if self._has_workers:
            self._cpu_at_gap += self._cpu_seconds() - self._cpu_at_phase

    def is_outside(self, gap_seconds: float, work_seconds: float, has_seen_other_work: bool) -> bool:
        """Whether the gap that has just ended was time outside steps rather than waiting for a batch.

        Args:
            gap_seconds: How long it was.
            work_seconds: What the loop worked before it; 0 when it has not since the last gap.
            has_seen_other_work: Whether the model was called in it.
        """
        is_outside = gap_seconds > SHORT_GAP_SECONDS and self._is_long(gap_seconds)
        if is_outside and not has_seen_other_work:
            is_outside = not self._waited_for_workers(gap_seconds)
        self._gaps.append(gap_seconds)
        self._gaps_seen += 1
        if work_seconds:
            self._works.append(work_seconds)
        return is_outside

    def _is_long(self, gap_seconds: float) -> bool:
        if len(self._gaps) < _FEWEST or not self._works:
            return False
        # A new gap (and the oldest gone) moves the median by at most one place of the sorted list, so this is a bound
        # from below; it spares ordinary steps the sorting, 16 µs after a training step.
        place = (len(self._sorted) - 1) // 2 - (self._gaps_seen - self._sorted_at)
        if place >= 0 and gap_seconds <= _FACTOR * self._sorted[place]:
            return False
        self._sorted, self._sorted_at = sorted(self._gaps), self._gaps_seen
        usual = _middle(self._gaps)
        return gap_seconds > _FACTOR * usual and gap_seconds > usual + _middle(self._works)

    def _waited_for_workers(self, gap_seconds: float) -> bool:
        if not self._has_workers:
            return False
        busy_seconds = self._cpu_seconds() - self._cpu_at_gap
        return busy_seconds < _IDLE_SHARE * gap_seconds and self._has_worker_processes()


Segments = tuple[tuple[Any, Any], ...]
"""Pairs of marks; their lengths add up to the step."""

_APART, _WORK, _GAP, _WAIT, _OWN = range(5)
"""States of the loop: in a phase or before the first step, in a step, in a gap, fetching a batch, in the monitor."""


class StepClock:
    """Divides the time of a run into steps, input waits, phases and gaps.

    Steps and waits are in marks of the timer (events on an accelerator); phases and gaps are host time.

    `start_step`, `end_step` and `begin_gap` run on every step and hold the code of `_turn` and `_cut` themselves: after
    a training step each Python function that is called costs about a microsecond to find again in memory.

    Attributes:
        first_step_began: Host time; None until the first step is opened, and for a loop that opens none.
        seconds_before_first_step: Spent in phases by then.
    """

    def __init__(
        self,
        timer: StepTimer,
        clock: Clock,
        busy_time: BusyTime | None = None,
        *,
        on_time_outside: Callable[[float], None] = lambda seconds: None,
        on_wait_unknown: Callable[[], None] = lambda: None,
        seconds_before_first_step: float = 0.0,
    ) -> None:
        """Start outside any step.

        Args:
            timer: Marks the ends of steps.
            clock: Host time.
            busy_time: Adds up processor time between the marks; None where it is not measured.
            on_time_outside: Called with the seconds of a gap that is no step's and not known to be waiting.
            on_wait_unknown: Called once, when steps take micro-batches whose arrival is not seen.
            seconds_before_first_step: Spent in phases so far.
        """
        self._busy_time = busy_time
        self._was_in_step = self._worked_before_wait = False
        self._timer = timer
        self._clock = clock
        self._marks_by_clock = timer.mark is clock
        """Whether marks are host times, so that one reading of the clock serves as both."""
        self._thread = threading.get_ident()
        self._usual = UsualGaps()
        self._short_gap: tuple[float, float] | None = None
        """The gap before the current step, and the work before that gap; recorded when the next gap begins."""
        self._start: Any = None
        self._segments: list[tuple[Any, Any]] = []
        self._gap_at = 0
        """Index in `_segments` of the first that belongs to the current gap."""
        self._wait_began: Any = None
        self._state = _APART
        self._since = 0.0
        self._seconds = [0.0] * 5
        """Time in each state since it was last taken."""
        self._before_phase = self._before_wait = _APART
        self._depth = 0
        self._fetches_are_timed = False
        self._has_batch = self._has_seen_other_work = False
        self._forget_step()
        self._has_told_unknown = False
        self.first_step_began: float | None = None
        self.seconds_before_first_step = seconds_before_first_step
        self._on_time_outside = on_time_outside
        self._on_wait_unknown = on_wait_unknown

    def _forget_step(self) -> None:
        self._waits: list[tuple[Any, Any]] = []
        self._arrivals = self._micro_batches = 0
        self._is_unclear = False
        """Whether part of the step's wait is unknown, or lies in a gap that was taken out of the step."""

    def start_step(self, has_batch: bool = True) -> None:
        """A step is opened, or its next micro-batch begins.

        Args:
            has_batch: Whether the batch is there: then the wait for it has ended. Else it is fetched in the step.
        """
        if self._start is None:
            self._open_first()
        if self._state == _GAP:
            now = self._clock()
            seconds = self._seconds
            seconds[_GAP] += now - self._since
            self._state, self._since = _WORK, now
            if seconds[_GAP] <= SHORT_GAP_SECONDS and not self._has_seen_other_work:
                self._short_gap = seconds[_GAP], seconds[_WORK]
                seconds[_GAP] = seconds[_WORK] = 0.0
                is_kept = True
            else:
                is_kept = self._is_gap_kept()
            if is_kept and not self._fetches_are_timed:
                mark = now if self._marks_by_clock else self._timer.mark()
                wait = self._start, mark
                self._start = mark
                self._waits += self._segments[self._gap_at :]
                self._waits.append(wait)
                self._segments.append(wait)
            self._has_batch = False
        elif self._state == _APART:
            self._go(_WORK)
        else:
            has_batch = False  # the loop did not call `end_micro_batch`
        self._arrivals += has_batch
        if self._busy_time is not None:
            self._busy_time.batch_is_here()

    def typical_busy_seconds(self, step_seconds: float) -> float | None:
        """Processor time of the training's thread in the typical step; None where it is not measured."""
        return None if self._busy_time is None else self._busy_time.typical(step_seconds)

    def micro_batch(self) -> None:
        """Count a micro-batch of the current step."""
        self._micro_batches += 1

    def end_micro_batch(self) -> None:
        """End the work on a micro-batch and begin the gap before the next one."""
        if self._busy_time is not None:
            self._busy_time.leave()
        self._end_work()
        self.begin_gap()

    def end_step(self) -> tuple[Segments | None, Segments | None]:
        """The step's segments and those of its input wait; None where unknown."""
        now = self._clock()
        end = now if self._marks_by_clock else self._timer.mark()
        if self._busy_time is not None:
            self._busy_time.step_ends()
        start, self._start = self._start, end
        segments = None if start is None else (*self._segments, (start, end))
        self._segments = []
        if self._depth or self._has_batch:
            self._end_work()
        else:
            self._seconds[self._state] += now - self._since
            self._state, self._since = _OWN, now
        if segments is None:
            waits = None
        elif self._fetches_are_timed or (self._micro_batches <= self._arrivals and not self._is_unclear):
            waits = tuple(self._waits) if self._fetches_are_timed or self._arrivals else None
        else:
            waits = self._waits_of_step()
        self._waits = []
        self._arrivals = self._micro_batches = 0
        self._is_unclear = False
        return segments, waits

    def begin_gap(self) -> None:
        """Begin the gap before the next batch: after `end_step` and the monitor's own work."""
        now = self._clock()
        if self._depth:
            self._before_phase = _GAP
        else:
            self._seconds[self._state] += now - self._since
            self._state, self._since = _GAP, now
        if self._start is not None:
            mark = now if self._marks_by_clock else self._timer.mark()
            self._segments.append((self._start, mark))
            self._start = mark
        self._gap_at = len(self._segments)
        self._usual.gap_begins(self._short_gap)
        self._short_gap = None

    def _waits_of_step(self) -> Segments | None:
        if self._fetches_are_timed:
            return tuple(self._waits)
        if self._micro_batches > self._arrivals and not self._has_told_unknown:
            self._has_told_unknown = True
            self._on_wait_unknown()
        is_known = 0 < self._arrivals >= self._micro_batches and not self._is_unclear
        return tuple(self._waits) if is_known else None

    def begin_wait(self) -> bool:
        """Begin to fetch a batch. Returns False in a phase or in another thread, where the fetch is not timed."""
        if self._depth or self._state == _WAIT or threading.get_ident() != self._thread:
            return False
        self._fetches_are_timed = True
        self._before_wait = self._state
        self._turn(_WAIT)
        if self._before_wait == _GAP:
            self._is_gap_kept()
        elif self._busy_time is not None:
            self._worked_before_wait = self._busy_time.leave()
        self._wait_began = self._timer.mark()
        return True

    def end_wait(self, *, has_batch: bool = True) -> None:
        """End the fetch, with a batch or without, and return to the step or gap in which it began."""
        before = self._before_wait
        self._has_batch = has_batch
        if before == _APART:  # the first batch is waited for before the first step
            self._go(_GAP if has_batch else _APART)
            if has_batch:
                self._open_first()
        else:
            self._go(before)
            self._cut()
            self._waits.append((self._wait_began, self._start))
            self._gap_at = len(self._segments)
        if self._busy_time is not None and has_batch and before != _WORK:
            self._busy_time.batch_is_here()
        elif self._busy_time is not None and before == _WORK:
            self._busy_time.come_back(self._worked_before_wait)

    @contextmanager
    def apart(self) -> Iterator[list[float]]:
        """Take time out of the step. Yields a list that receives the seconds; only the outermost use counts."""
        self._leave()
        began = self._clock()
        seconds: list[float] = []
        try:
            yield seconds
        finally:
            is_outermost = self._depth == 1
            seconds.append(self._clock() - began if is_outermost else 0.0)
            if self._start is None:
                self.seconds_before_first_step += seconds[0]
            self._come_back()

    def book(self) -> float:
        """Take the current gap, since the last booking, out of the next step; returns its seconds."""
        if self._state != _GAP:
            return 0.0
        self._turn(_GAP)
        return self._take_gap_out()

    def begin_own_work(self) -> tuple[int, float] | None:
        """Begin work of the monitor in a gap; pass the returned value to `end_own_work`."""
        if self._state != _GAP or self._start is None:
            return None
        self._turn(_GAP)
        self._cut()
        return len(self._segments), self._seconds[_GAP]

    def end_own_work(self, began: tuple[int, float] | None) -> None:
        """The monitor's own work is part of the step, but neither waiting nor a reason to call the gap long."""
        if self._state != _GAP or began is None:
            return
        self._turn(_GAP)
        self._cut()
        at, self._seconds[_GAP] = began
        own = self._segments[at:]
        del self._segments[at:]
        self._segments[self._gap_at : self._gap_at] = own
        self._gap_at += len(own)

    def other_work(self) -> None:
        """Note a call of the model without gradients: a gap that contains one is not only waiting for a batch."""
        if self._state == _GAP:
            self._has_seen_other_work = True

    def _open_first(self) -> None:
        self._start = self._timer.mark()
        self.first_step_began = self._clock()

    def _end_work(self) -> None:
        self._go(_OWN)
        if self._has_batch:  # a loop that opens no steps: its step began with the batch
            self._seconds[_WORK] += self._seconds[_GAP]
            self._seconds[_GAP] = 0.0
            self._has_batch = False

    def _is_gap_kept(self) -> bool:
        """Whether the gap that has just ended stays in the step; else it is taken out and reported."""
        seconds = self._seconds
        is_outside = self._usual.is_outside(seconds[_GAP], seconds[_WORK], self._has_seen_other_work)
        if is_outside or self._has_seen_other_work:
            self._is_unclear = True
            self._has_seen_other_work = False
        if is_outside:
            self._on_time_outside(self._take_gap_out())
        seconds[_GAP] = seconds[_WORK] = 0.0
        return not is_outside

    def _cut(self) -> None:
        """End the current segment of the step and begin the next one."""
        mark = self._timer.mark()
        self._segments.append((self._start, mark))
        self._start = mark

    def _take_gap_out(self) -> float:
        seconds, self._seconds[_GAP] = self._seconds[_GAP], 0.0
        del self._segments[self._gap_at :]
        self._start = self._timer.mark()
        return seconds

    def _turn(self, state: int) -> None:
        now = self._clock()
        self._seconds[self._state] += now - self._since
        self._state, self._since = state, now

    def _go(self, state: int) -> None:
        """Change the state; in a phase, the state that follows it."""
        if self._depth:
            self._before_phase = state
        else:
            self._turn(state)

    def _leave(self) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        if self._busy_time is not None:
            self._was_in_step = self._busy_time.leave()
        if self._start is not None:
            self._segments.append((self._start, self._timer.mark()))
        self._before_phase = self._state
        self._turn(_APART)
        self._usual.leave_gap()

    def _come_back(self) -> None:
        self._depth -= 1
        if self._depth:
            return
        if self._busy_time is not None:
            self._busy_time.come_back(self._was_in_step)
        if self._start is not None:
            self._start = self._timer.mark()
        self._usual.come_back_to_gap()
        self._turn(self._before_phase)
