"""Measures how long steps take, and how much of that time is spent waiting for batches (the input wait).

A step lasts from the end of the step before to its own end, without phases such as evaluation. The time between two
steps, or between two micro-batches, is called a gap. If fetching is timed (`monitor.batches`, the callbacks of Trainer
and Lightning), the input wait is the time of the fetches. Otherwise it is the whole gap before a batch is given, unless
the gap is far longer than usual: such a gap is reported as time outside steps.

On an accelerator, times are measured with events in the device's stream. A fetch during which the device still
works on earlier steps therefore takes no time.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from flopwatch.clock import Clock
from flopwatch.monitor.ranks.busy_time import BusyTime
from flopwatch.monitor.timing.timers import StepTimer
from flopwatch.monitor.timing.usual_gaps import SHORT_GAP_SECONDS, UsualGaps

Segments = tuple[tuple[Any, Any], ...]
"""Pairs of marks (start, end). The time of a step is the sum of the times from start to end."""


class OptimizerPlace(NamedTuple):
    """Which segments of a step belong to the optimizer.

    Attributes:
        spans: Pairs (first, last + 1) of indices, one for each step of an optimizer; empty if none stepped.
        rest_at: Index of the first segment after the last of them; None if another batch or forward pass followed.
        waits_at: Index of the step's first input wait after the last of them.
    """

    spans: tuple[tuple[int, int], ...]
    rest_at: int | None
    waits_at: int = 0


_DIVIDED_STEPS, _DIVIDED_EVERY = 256, 7
"""The optimizer is timed in this many steps at first, and then in one of seven, because its two marks cost time."""
_APART, _WORK, _GAP, _WAIT, _OWN = range(5)
"""States of the loop: in a phase or before all steps, in a step, between steps, fetching a batch, in the monitor."""


def _is_divided(number: int) -> bool:
    """Whether the optimizer is timed in a step. Each place among seven steps has its turn.

    Otherwise an optimizer that steps every seventh time would be timed each time or never.
    """
    return number < _DIVIDED_STEPS or number % _DIVIDED_EVERY == number // _DIVIDED_EVERY % _DIVIDED_EVERY


class StepClock:
    """Divides the time of a run into steps, input waits, phases (such as evaluation) and gaps (between steps).

    Steps and waits are measured with the timer (events on an accelerator), phases and gaps with the host's clock.

    `start_step`, `end_step` and `begin_gap` run on every step. They repeat the code of `_turn` and `_cut` instead of
    calling it, because right after a training step each call of a Python function costs about a microsecond.

    Attributes:
        timer: Measures steps and input waits.
        divides: Whether optimizer and passes of the current step are timed.
        optimizer_place: Where the optimizer's part of the newest ended step is; None if that is unknown.
        first_step_began: Host time when the first step was opened; None before that, or if the loop opens no steps.
        seconds_before_first_step: Time spent in phases before the first step.
    """

    def __init__(
        self,
        timer: StepTimer,
        clock: Clock,
        busy_time: BusyTime | None = None,
        *,
        on_time_outside: Callable[[float], None] = lambda seconds: None,
        on_wait_unknown: Callable[[], None] = lambda: None,
        on_work_between: Callable[[float], None] = lambda seconds: None,
        seconds_before_first_step: float = 0.0,
    ) -> None:
        """Create a clock that is outside any step.

        Args:
            timer: Measures steps and input waits.
            clock: Host time.
            busy_time: Adds up the processor time of steps; None if that is not measured.
            on_time_outside: Called with the seconds of each gap between steps that was not spent waiting for a batch.
            on_wait_unknown: Called once, if steps fetch micro-batches in a way that cannot be timed.
            on_work_between: Called with the seconds of each gap that counts in the step although the model was called
                in it without gradients.
            seconds_before_first_step: Initial value of the attribute of this name, if this clock replaces another one.
        """
        self._busy_time = busy_time
        self._was_in_step = self._worked_before_wait = False
        self.timer = timer
        self._clock = clock
        self._marks_by_clock = timer.mark is clock
        """Whether marks are readings of `clock`. If so, one reading serves as the time and as the mark."""
        self._thread = threading.get_ident()
        self._usual = UsualGaps()
        self._short_gap: tuple[float, float] | None = None
        """If the gap before this step was short: its seconds and those of the step before it. See `UsualGaps`."""
        self._start: Any = None
        self._segments: list[tuple[Any, Any]] = []
        self._gap_at = 0
        """Index in `_segments` of the first segment since the last step, micro-batch or timed fetch ended."""
        self._wait_began: Any = None
        self._state = _APART
        self._since = 0.0
        self._seconds = [0.0] * 5
        """For each state, the seconds spent in it since this entry was last set to 0."""
        self._before_phase = self._before_wait = _APART
        self._depth = 0
        self._fetches_are_timed = False
        self._has_batch = self._has_seen_other_work = self._trained_another = False
        self._waits: list[tuple[Any, Any]] = []
        self._arrivals = self._micro_batches = 0
        self._is_unclear = False
        """Whether the time before a batch was also spent on other work, so that the step's input wait is unknown."""
        self._has_reported_unknown = False
        self._steps_ended = 0
        self.divides = True
        self._optimizer: list[tuple[int, int]] = []
        self._optimizer_at: int | None = None
        """Index of the first segment of the optimizer's step that is running; None if none is."""
        self._running_optimizer: object = None
        self._untimed_optimizer: object = None
        """An optimizer whose step in this step of the training cannot be timed."""
        self._has_seen_optimizer = False
        self._rest_at: int | None = None
        self._waits_at = 0
        self.optimizer_place: OptimizerPlace | None = None
        self.first_step_began: float | None = None
        self.seconds_before_first_step = seconds_before_first_step
        self._on_time_outside = on_time_outside
        self._on_wait_unknown = on_wait_unknown
        self._on_work_between = on_work_between

    def start_step(self, has_batch: bool = True) -> None:
        """Begin a step, or the next micro-batch of a step.

        Args:
            has_batch: Whether the batch was already fetched; False if the step itself fetches it.
        """
        if self._start is None:
            self._open_first()
        self._optimizer_at = None  # an optimizer that has raised an exception did not end
        if self._state == _GAP:
            now = self._clock()
            seconds = self._seconds
            seconds[_GAP] += now - self._since
            self._state, self._since = _WORK, now
            if seconds[_GAP] <= SHORT_GAP_SECONDS and not self._has_seen_other_work and not self._trained_another:
                self._short_gap = seconds[_GAP], seconds[_WORK]
                seconds[_GAP] = seconds[_WORK] = 0.0
                is_kept = True
            else:
                is_kept = self._is_gap_kept()
            if is_kept and not self._fetches_are_timed:
                mark = now if self._marks_by_clock else self.timer.mark()
                wait = self._start, mark
                self._start = mark
                self._waits += self._segments[self._gap_at :]
                self._waits.append(wait)
                self._segments.append(wait)
            self._has_batch = False
            self._rest_at = None
        elif self._state == _APART:
            self._go(_WORK)
        else:
            has_batch = False  # without `end_micro_batch` it is unknown when the batch arrived
        self._arrivals += has_batch
        if self._busy_time is not None:
            self._busy_time.batch_is_here()

    def typical_busy_seconds(self, step_seconds: float) -> float | None:
        """Processor time of the training's thread in a typical step; None if it is not measured."""
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
        """End a step; return its time and its input wait, each as pairs of start and end marks, or None if unknown."""
        now = self._clock()
        end = now if self._marks_by_clock else self.timer.mark()
        if self._busy_time is not None:
            self._busy_time.step_ends()
        start, self._start = self._start, end
        segments = None if start is None else (*self._segments, (start, end))
        self.optimizer_place = None
        if self.divides and self._has_seen_optimizer:
            self._take_optimizer()
        self._steps_ended += 1
        self.divides = _is_divided(self._steps_ended)
        self._segments = []
        if self._depth or self._has_batch:
            self._end_work()
        else:
            self._seconds[self._state] += now - self._since
            if self._state == _GAP:  # a loop that opens no steps: this was the step, not what follows it
                self._seconds[_GAP] = 0.0
            self._state, self._since = _OWN, now
        if segments is None:
            waits = None
        elif self._fetches_are_timed or (self._micro_batches <= self._arrivals and not self._is_unclear):
            waits = tuple(self._waits) if self._fetches_are_timed or self._arrivals else None
        else:
            waits = None
            if self._micro_batches > self._arrivals and not self._has_reported_unknown:
                self._has_reported_unknown = True
                self._on_wait_unknown()
        self._waits = []
        self._arrivals = self._micro_batches = 0
        self._is_unclear = False
        return segments, waits

    def begin_gap(self) -> None:
        """Begin the gap, the time until the next batch arrives; called after `end_step` and the monitor's own work."""
        now = self._clock()
        if self._depth:
            self._before_phase = _GAP
        else:
            self._seconds[self._state] += now - self._since
            self._state, self._since = _GAP, now
        if self._start is not None:
            mark = now if self._marks_by_clock else self.timer.mark()
            self._segments.append((self._start, mark))
            self._start = mark
        self._gap_at = len(self._segments)
        self._trained_another = False
        self._usual.gap_begins(self._short_gap)
        self._short_gap = None

    def optimizer_begins(self, optimizer: object = None, *, is_own: bool = True) -> None:
        """Begin the part of a step in which an optimizer changes the parameters.

        Args:
            optimizer: Tells optimizers apart: one that another one calls is part of that one.
            is_own: Whether it is an optimizer of this run. Between steps, one of another training is not timed.
        """
        if not self.divides or self._start is None or self._depth or self._optimizer_at is not None:
            return
        if self._is_elsewhere() or (self._state == _GAP and not is_own):
            return
        self._cut()
        self._optimizer_at, self._running_optimizer = len(self._segments), optimizer
        self._has_seen_optimizer = True
        if self._untimed_optimizer == optimizer:
            self._untimed_optimizer = None

    def optimizer_is_untimed(self, optimizer: object) -> None:
        """Note that an optimizer steps in this step of the training, and that it is unknown when it begins."""
        if not self._depth and not self._is_elsewhere():
            self._untimed_optimizer = optimizer

    def optimizer_ends(self, optimizer: object = None, *, is_own: bool = True) -> None:
        if self._state == _GAP and not is_own and not self._has_batch and not self._is_elsewhere():
            self._trained_another = True
        if self._optimizer_at is None and (self._state != _GAP or not is_own):
            return
        if self._optimizer_at is not None and optimizer != self._running_optimizer:
            return
        if self._start is None or self._depth or self._is_elsewhere():
            return
        self._cut()
        if self._optimizer_at is not None:
            self._optimizer.append((self._optimizer_at, len(self._segments)))
            self._optimizer_at = None
            self._rest_at, self._waits_at = len(self._segments), len(self._waits)
        if self._state == _GAP:  # the loop steps the optimizer outside of `step()`; none of that was input wait
            self._turn(_GAP)
            self._gap_at = len(self._segments)
            if not self._has_batch:
                self._seconds[_WORK] += self._seconds[_GAP]
                self._seconds[_GAP] = 0.0

    def _is_elsewhere(self) -> bool:
        return threading.get_ident() != self._thread

    def _take_optimizer(self) -> None:
        """Set `optimizer_place` for the step that ends. If a hook ends the step, the optimizer may not be done."""
        if self._optimizer_at is not None:
            self._optimizer.append((self._optimizer_at, len(self._segments) + 1))
            self._optimizer_at, self._rest_at = None, len(self._segments) + 1
            self._waits_at = len(self._waits)
        if self._untimed_optimizer is None:
            self.optimizer_place = OptimizerPlace(tuple(self._optimizer), self._rest_at, self._waits_at)
        self._optimizer, self._rest_at, self._untimed_optimizer = [], None, None

    def begin_wait(self) -> bool:
        """Begin to time a fetch. Returns False if it is not timed: in a phase such as evaluation, or another thread."""
        if self._depth or self._state == _WAIT or threading.get_ident() != self._thread:
            return False
        self._fetches_are_timed = True
        self._before_wait = self._state
        self._turn(_WAIT)
        if self._before_wait == _GAP:
            self._is_gap_kept()
        elif self._busy_time is not None:
            self._worked_before_wait = self._busy_time.leave()
        self._wait_began = self.timer.mark()
        return True

    def end_wait(self, *, has_batch: bool = True) -> None:
        """End a timed fetch; `has_batch` says whether it has returned a batch."""
        before = self._before_wait
        self._has_batch = has_batch
        if before == _APART:  # the first batch is fetched before the first step
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
        """A context whose time belongs to no step. At exit, its seconds (0 if nested) are added to the yielded list."""
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
        """Return the seconds of the current gap between two steps, and leave them out of the next step."""
        if self._state != _GAP:
            return 0.0
        self._turn(_GAP)
        if self._has_seen_other_work:
            self._is_unclear, self._has_seen_other_work = True, False
        self._usual.gap_begins_again()
        return self._take_gap_out()

    def begin_own_work(self) -> tuple[int, float] | None:
        """Begin the monitor's own work between two steps; pass the returned value to `end_own_work`."""
        if self._state != _GAP or self._start is None:
            return None
        self._turn(_GAP)
        self._cut()
        return len(self._segments), self._seconds[_GAP]

    def end_own_work(self, began: tuple[int, float] | None) -> None:
        """End the monitor's own work. Its time counts in the step, but not as a gap between steps or as input wait."""
        if self._state != _GAP or began is None:
            return
        self._turn(_GAP)
        self._cut()
        at, self._seconds[_GAP] = began
        own = self._segments[at:]
        del self._segments[at:]
        self._segments[self._gap_at : self._gap_at] = own
        self._gap_at += len(own)

    def model_is_called(self, has_grad: bool) -> None:
        """Note a forward pass. If it has gradients, the optimizer before it was not the last work of the step.

        Without gradients and between two steps, it shows that this time is not only input wait.
        """
        if has_grad and not self._depth:
            self._rest_at = None
        elif self._state == _GAP:
            self._has_seen_other_work = True

    def _open_first(self) -> None:
        self._start = self.timer.mark()
        self.first_step_began = self._clock()
        self._thread = threading.get_ident()  # the monitor may have been made in another thread than the training's

    def open_first(self, seconds: float, micro_batches: int) -> None:
        """Open the first step, which has worked for so many seconds since its first batch, before this clock existed.

        On an accelerator, its time stays unknown: no event was recorded when it began.
        """
        if self._start is None and self._marks_by_clock:
            self._open_first()
            self._start = self.first_step_began = self._since = self._clock() - seconds
            self._state = _WORK
            self._arrivals, self._micro_batches = 1, micro_batches

    def _end_work(self) -> None:
        self._go(_OWN)
        if self._has_batch:  # the loop does not call `step()`, so the step began when the batch was fetched
            self._seconds[_WORK] += self._seconds[_GAP]
            self._seconds[_GAP] = 0.0
            self._has_batch = False

    def _is_gap_kept(self) -> bool:
        """Whether the gap that has just ended is part of the step. If not, remove it from the step and report it."""
        seconds = self._seconds
        is_outside = self._usual.is_outside(seconds[_GAP], seconds[_WORK], self._has_seen_other_work)
        is_outside = is_outside or self._trained_another
        if is_outside:
            self._is_unclear = True
            self._on_time_outside(self._take_gap_out())
        elif self._has_seen_other_work:
            self._is_unclear = True
            self._on_work_between(seconds[_GAP])
        self._has_seen_other_work = False
        seconds[_GAP] = seconds[_WORK] = 0.0
        return not is_outside

    def _cut(self) -> None:
        """End the current segment of the step and begin the next one."""
        mark = self.timer.mark()
        self._segments.append((self._start, mark))
        self._start = mark

    def _take_gap_out(self) -> float:
        seconds, self._seconds[_GAP] = self._seconds[_GAP], 0.0
        del self._segments[self._gap_at :]
        self._optimizer = [span for span in self._optimizer if span[1] <= self._gap_at]
        self._start = self.timer.mark()
        return seconds

    def _turn(self, state: int) -> None:
        now = self._clock()
        self._seconds[self._state] += now - self._since
        self._state, self._since = state, now

    def _go(self, state: int) -> None:
        """Set the state; during a phase, set the state to which the clock returns after the phase."""
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
            mark = self.timer.mark()
            self._segments.append((self._start, mark))
            if self._state == _WAIT:
                self._waits.append((self._wait_began, mark))
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
            self._start = self._wait_began = self.timer.mark()
        self._usual.come_back_to_gap()
        self._turn(self._before_phase)
