"""Divides recorded events into the times of steps, waits, optimizers and passes, and the time outside (pure).

A step lasts from the end of the step before to its own end, without phases such as evaluation. The time between two
steps, or between two micro-batches, is called a gap. If fetching is timed (`monitor.batches`, the callbacks of Trainer
and Lightning), the input wait is the time of the fetches. Otherwise it is the whole gap before a batch is given, unless
the gap is far longer than usual: such a gap is time outside steps.

On an accelerator, marks are events in the device's stream. A fetch during which the device still works on earlier
steps therefore takes no time, and so does what the host does between the passes.
"""

import multiprocessing
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any, NamedTuple

from flopwatch.monitor.timing import tape
from flopwatch.monitor.timing.tape import Event

WORK, GAP, WAIT, OPTIMIZER, FORWARD, BACKWARD, OWN = "work", "gap", "wait", "optimizer", "forward", "backward", "own"
"""What a segment of a step was used for. `GAP` is not decided yet; `OWN` is work of the monitor in a gap."""
_BEFORE, _PHASE, _MONITOR = "before", "phase", "monitor"
"""Further states of the loop: before the first step, in a phase, and in the monitor after the end of a step."""

Segment = tuple[str, Any, Any]
"""What the time was used for, and the marks of its start and end."""


class StepParts(NamedTuple):
    """The parts of a step whose marks may not have been reached by the device yet.

    Attributes:
        segments: The step's time, in order; None if it is unknown when the step began.
        knows_wait: Whether segments used as `WAIT` are all of the input wait.
        knows_optimizer: Whether segments used as `OPTIMIZER` are all of the optimizers' time.
        rest_from: Index of the first segment after the last optimizer; None if unknown.
        knows_passes: Whether segments used as `FORWARD` or `BACKWARD` are all forward and backward passes.
    """

    segments: tuple[Segment, ...] | None
    knows_wait: bool = False
    knows_optimizer: bool = False
    rest_from: int | None = None
    knows_passes: bool = False


def times_of(parts: StepParts, seconds_between: Callable[[Any, Any], float]) -> dict[str, Any]:
    """Compute a step's times, as `MeasuredStep` has them; `seconds_between` takes two marks."""
    if parts.segments is None:
        return {}
    lasting = [(use, seconds_between(start, end)) for use, start, end in parts.segments]
    of_use: dict[str, float] = dict.fromkeys((WAIT, OPTIMIZER, FORWARD, BACKWARD), 0.0)
    for use, seconds in lasting:
        of_use[use] = of_use.get(use, 0.0) + seconds
    rest = None if parts.rest_from is None else sum(s for use, s in lasting[parts.rest_from :] if use != WAIT)
    return {
        "seconds": sum(seconds for _, seconds in lasting),
        "input_wait_seconds": of_use[WAIT] if parts.knows_wait else None,
        "optimizer_seconds": of_use[OPTIMIZER] if parts.knows_optimizer else None,
        "host_seconds": rest if parts.knows_optimizer else None,
        "passes_seconds": of_use[FORWARD] + of_use[BACKWARD] if parts.knows_passes else None,
        "backward_seconds": of_use[BACKWARD] if parts.knows_passes else None,
    }


@dataclass(slots=True)
class Divided:
    """What events have shown.

    Attributes:
        spent: Seconds that belong to no step, by phase: `outside`, and those of `SPENT` events.
        seconds_between: Length of a gap that counts in its step although the model was called in it; None without one.
        is_wait_unknown: Whether a step has fetched micro-batches in a way that cannot be timed.
    """

    steps: list[StepParts] = field(default_factory=list)
    spent: list[tuple[str, float]] = field(default_factory=list)
    seconds_between: float | None = None
    is_wait_unknown: bool = False


@dataclass(slots=True)
class _Passes:
    """The forward and backward passes of a step; `regions` are forward passes of compiled code."""

    running: int | None = None
    forwards: int = 0
    regions: int = 0
    backwards: int = 0
    is_unclear: bool = False

    def are_whole(self) -> bool:
        """Whether every pass was seen. Code between the regions of one forward pass is part of it, and is not seen."""
        is_seen = not self.is_unclear and self.running is None and self.forwards and self.backwards
        return bool(is_seen and self.regions in (0, self.backwards))


@dataclass(slots=True)
class _OpenStep:
    """What is known of the step that has not ended.

    Attributes:
        running: The optimizer that steps now, in a tuple; None if none does.
        untimed: An optimizer whose time in this step is unknown, in a tuple.
    """

    segments: list[Segment] = field(default_factory=list)
    arrivals: int = 0
    micro_batches: int = 0
    is_wait_unclear: bool = False
    running: tuple[object] | None = None
    untimed: tuple[object] | None = None
    rest_from: int | None = None
    passes: _Passes = field(default_factory=_Passes)


@dataclass(slots=True)
class _OpenGap:
    """The gap since the last step or micro-batch, and the work before it, in seconds of the host.

    Attributes:
        begins_at: Index of its first segment.
        has_other_work: Whether the model was called in it without gradients.
        trained_another: Whether an optimizer of another training has stepped in it.
        cpu_from: The thread's processor time up to which `cpu_seconds` includes it; None if that is unknown.
    """

    seconds: float = 0.0
    work_seconds: float = 0.0
    begins_at: int = 0
    has_other_work: bool = False
    trained_another: bool = False
    cpu_seconds: float = 0.0
    cpu_from: float | None = None


class TapeDivision:
    """Divides the events of a run, some at a time.

    Attributes:
        first_step_began: Host time when the first step was opened; None before that, or if the loop opens no steps.
        seconds_before_first_step: Time spent in phases before the first step.
    """

    def __init__(self, seconds_before_first_step: float = 0.0) -> None:
        self.first_step_began: float | None = None
        self.seconds_before_first_step = seconds_before_first_step
        self._usual = UsualGaps()
        self._states = [_BEFORE]
        """State of the loop, and what interrupts it: a fetch, a phase, or work of the monitor."""
        self._since: tuple[Any, float] | None = None
        """Mark and host time of the start of the running segment; None before the first step."""
        self._fetches_are_timed = self._has_batch = self._has_seen_optimizer = False
        self._step, self._gap, self._out = _OpenStep(), _OpenGap(), Divided()

    def divide(self, events: Iterable[Event]) -> Divided:
        self._out = Divided()
        for code, now, mark, fact, cpu in events:
            _HANDLERS[code](self, now, mark, fact, cpu)
        return self._out

    # --- Steps --------------------------------------------------------------------------------------------------------

    def _start_step(self, now: float, mark: Any, has_batch: bool, cpu: float | None) -> None:
        state = self._states[0]
        if self._since is None:
            self._since, self.first_step_began = (mark, now), now
        else:
            self._cut(now, mark)
        self._step.running = None  # an optimizer step that has raised an exception has no end event
        if state == GAP:
            if self._is_gap_kept(cpu) and not self._fetches_are_timed:
                segments, at = self._step.segments, self._gap.begins_at
                segments[at:] = [(WAIT if use == GAP else use, start, end) for use, start, end in segments[at:]]
            self._has_batch, self._step.rest_from = False, None
        elif state != _BEFORE:
            has_batch = False  # without `end_micro_batch` it is unknown when the batch arrived
        self._step.arrivals += has_batch
        self._states = [WORK, *(each for each in self._states[1:] if each == _PHASE)]

    def _end_step(self, now: float, mark: Any, has_timed_parts: bool, _: Any) -> None:
        is_timed = self._since is not None
        self._cut(now, mark)
        self._since = mark, now
        step, self._step = self._step, _OpenStep()
        if step.running is not None:  # a hook has ended the step while the optimizer was still running
            step.rest_from = len(step.segments)
        is_wait_seen = step.arrivals and step.micro_batches <= step.arrivals and not step.is_wait_unclear
        parts = StepParts(
            tuple(step.segments),
            bool(self._fetches_are_timed or is_wait_seen),
            has_timed_parts and self._has_seen_optimizer and step.untimed is None,
            step.rest_from,
            step.passes.are_whole(),
        )
        self._out.steps.append(parts if is_timed else StepParts(None))
        if is_timed and not self._fetches_are_timed and step.micro_batches > step.arrivals:
            self._out.is_wait_unknown = True
        self._end_work()
        self._states[0] = _MONITOR

    def _end_work(self) -> None:
        # In a loop that opens no steps, the work began when the batch was fetched.
        if self._has_batch:
            self._gap.work_seconds += self._gap.seconds
        self._gap.seconds, self._has_batch = 0.0, False

    def _end_micro_batch(self, now: float, mark: Any, fact: Any, cpu: float | None) -> None:
        self._cut(now, mark)
        self._end_work()
        self._begin_gap(now, mark, fact, cpu)

    def _begin_gap(self, now: float, mark: Any, _: Any, cpu: float | None) -> None:
        self._cut(now, mark)
        self._states[0] = GAP
        gap = self._gap
        gap.seconds, gap.begins_at, gap.trained_another = 0.0, len(self._step.segments), False
        gap.cpu_seconds, gap.cpu_from = 0.0, cpu

    def _take_micro_batch(self, *_: Any) -> None:
        self._step.micro_batches += 1

    def _call_model(self, _: float, __: Any, has_grad: bool, ___: Any) -> None:
        """A forward pass. If it has gradients, the optimizer before it was not the last work of the step.

        Without gradients and between two steps, it shows that this time is not only input wait.
        """
        if self._states[-1] == _PHASE:
            return
        if has_grad:
            self._step.rest_from = None
        elif self._states[0] == GAP:
            self._gap.has_other_work = True

    def _open_first(self, now: float, mark: Any, fact: tuple[float, int], _: Any) -> None:
        """The first step began before there was a tape. `fact`: seconds since its first batch, number of micro-batches.

        On an accelerator, its time stays unknown: no event was recorded when it began.
        """
        seconds, micro_batches = fact
        if self._since is None and mark == now:
            self.first_step_began = now - seconds
            self._since = now - seconds, now - seconds
            self._states[0] = WORK
            self._step.arrivals, self._step.micro_batches = 1, micro_batches

    # --- Gaps ---------------------------------------------------------------------------------------------------------

    def _is_gap_kept(self, cpu: float | None) -> bool:
        """Whether the gap that has just ended is part of the step. If not, take it out of the step."""
        gap = self._gap
        known = cpu is not None and gap.cpu_from is not None
        cpu_seconds = gap.cpu_seconds + cpu - gap.cpu_from if known else None  # type: ignore[operator]
        is_outside = self._usual.is_outside(gap.seconds, gap.work_seconds, gap.has_other_work, cpu_seconds)
        if is_outside or gap.trained_another:
            self._step.is_wait_unclear = True
            self._take_gap_out("outside")
        elif gap.has_other_work:
            self._step.is_wait_unclear = True
            self._out.seconds_between = self._out.seconds_between or gap.seconds
        is_kept = not (is_outside or gap.trained_another)
        gap.has_other_work, gap.trained_another = False, False
        gap.seconds, gap.work_seconds = 0.0, 0.0
        return is_kept

    def _take_gap_out(self, phase: str) -> None:
        segments, at = self._step.segments, self._gap.begins_at
        segments[at:] = [segment for segment in segments[at:] if segment[0] == OWN]
        self._out.spent.append((phase, self._gap.seconds))
        self._gap.seconds = 0.0

    def _spend_gap(self, now: float, mark: Any, spent: tuple[str, float], cpu: float | None) -> None:
        """The gap so far was spent on a phase, and belongs to no step. `spent`: the phase, seconds of compilation."""
        if self._states[-1] != GAP or self._since is None:
            return
        self._cut(now, mark)
        if self._gap.has_other_work:
            self._step.is_wait_unclear, self._gap.has_other_work = True, False
        self._gap.cpu_seconds, self._gap.cpu_from = 0.0, cpu
        phase, compiled = spent
        compiled = min(compiled, self._gap.seconds)
        if compiled:
            self._gap.seconds -= compiled
            self._out.spent.append(("compile_outside", compiled))
        self._take_gap_out(phase)

    # --- What interrupts the loop -------------------------------------------------------------------------------------

    def _begin_wait(self, now: float, mark: Any, _: Any, cpu: float | None) -> None:
        if self._states[-1] in (_PHASE, WAIT):
            return
        self._fetches_are_timed = True
        self._cut(now, mark)
        if self._states[-1] == GAP:
            self._is_gap_kept(cpu)
            self._gap.begins_at = len(self._step.segments)
        self._states.append(WAIT)

    def _end_wait(self, now: float, mark: Any, has_batch: bool, _: Any) -> None:
        if self._states[-1] != WAIT:
            return
        self._cut(now, mark)
        self._states.pop()
        self._has_batch = has_batch
        if self._states[0] == _BEFORE and has_batch:  # the first batch is fetched before the first step
            self._states[0] = GAP
            if self._since is None:
                self._since, self.first_step_began = (mark, now), now
        self._gap.begins_at = len(self._step.segments)

    def _begin_phase(self, now: float, mark: Any, _: Any, cpu: float | None) -> None:
        self._cut(now, mark)
        gap = self._gap
        if gap.cpu_from is not None and cpu is not None:
            gap.cpu_seconds += cpu - gap.cpu_from
        self._states.append(_PHASE)

    def _end_phase(self, now: float, mark: Any, began: float, cpu: float | None) -> None:
        if self._states[-1] != _PHASE:
            return
        self._states.pop()
        if self._since is None:
            self.seconds_before_first_step += now - began
        else:
            self._since = mark, now
        self._gap.cpu_from = cpu

    def _begin_own_work(self, now: float, mark: Any, *_: Any) -> None:
        if self._states[-1] == GAP:
            self._cut(now, mark)
            self._states.append(OWN)

    def _end_own_work(self, now: float, mark: Any, *_: Any) -> None:
        """Own work counts in the step, but not as a gap between steps or as input wait."""
        if self._states[-1] == OWN:
            self._cut(now, mark)
            self._states.pop()

    # --- Optimizers and passes ----------------------------------------------------------------------------------------

    def _begin_optimizer(self, now: float, mark: Any, fact: tuple[object, bool], _: Any) -> None:
        optimizer, is_own = fact
        step = self._step
        if self._since is None or self._states[-1] == _PHASE:
            return
        if step.running is not None or (self._states[0] == GAP and not is_own):
            return
        self._cut(now, mark)
        step.running, self._has_seen_optimizer = (optimizer,), True
        if step.untimed == step.running:
            step.untimed = None

    def _end_optimizer(self, now: float, mark: Any, fact: tuple[object, bool], _: Any) -> None:
        optimizer, is_own = fact
        step, gap, is_in_gap = self._step, self._gap, self._states[0] == GAP
        if self._since is None or self._states[-1] == _PHASE:
            return
        if is_in_gap and not is_own and not self._has_batch:
            gap.trained_another = True
        if step.running is None and not (is_in_gap and is_own):
            return
        if step.running not in (None, (optimizer,)):
            return
        self._cut(now, mark)
        if step.running is not None:
            step.running, step.rest_from = None, len(step.segments)
        if is_in_gap:  # the loop steps the optimizer outside of `step()`; none of that was input wait
            gap.begins_at = len(step.segments)
            gap.work_seconds += gap.seconds
            gap.seconds = 0.0

    def _has_untimed_optimizer(self, _: float, __: Any, optimizer: object, ___: Any) -> None:
        if self._states[-1] != _PHASE:
            self._step.untimed = (optimizer,)

    def _begin_pass(self, now: float, mark: Any, *_: Any, kind: int = tape.FORWARD, is_region: bool = False) -> None:
        passes = self._step.passes
        passes.regions += is_region
        if passes.running is None:
            self._cut(now, mark)
            passes.running = kind

    def _end_pass(self, now: float, mark: Any, *_: Any, kind: int = tape.FORWARD) -> None:
        passes = self._step.passes
        if passes.running == kind:
            self._cut(now, mark)
            passes.running = None
            passes.forwards += kind == tape.FORWARD
            passes.backwards += kind == tape.BACKWARD

    def _miss_pass(self, *_: Any, unless: int | None = None) -> None:
        """A pass was not seen, or a parameter got its gradient outside of a backward pass that was seen."""
        passes = self._step.passes
        passes.is_unclear = passes.is_unclear or unless is None or passes.running != unless

    # --- Segments -----------------------------------------------------------------------------------------------------

    def _cut(self, now: float, mark: Any) -> None:
        """End the running segment of the step and begin the next one."""
        if self._since is None or self._states[-1] == _PHASE:
            return
        step, state = self._step, self._states[-1]
        start, began = self._since
        self._since = mark, now
        if state == GAP:
            self._gap.seconds += now - began
        elif state == WORK:
            self._gap.work_seconds += now - began
        if state in (WAIT, OWN):
            use = state
        elif step.running is not None:
            use = OPTIMIZER
        elif step.passes.running is not None:
            use = FORWARD if step.passes.running == tape.FORWARD else BACKWARD
        else:
            use = WORK if state == _MONITOR else state
        step.segments.append((use, start, mark))


_HANDLERS: dict[int, Callable[..., None]] = {
    tape.START: TapeDivision._start_step,
    tape.END: TapeDivision._end_step,
    tape.GAP: TapeDivision._begin_gap,
    tape.MICRO: TapeDivision._take_micro_batch,
    tape.END_MICRO: TapeDivision._end_micro_batch,
    tape.OPTIMIZER: TapeDivision._begin_optimizer,
    tape.OPTIMIZER_END: TapeDivision._end_optimizer,
    tape.UNTIMED: TapeDivision._has_untimed_optimizer,
    tape.WAIT: TapeDivision._begin_wait,
    tape.WAIT_END: TapeDivision._end_wait,
    tape.PHASE: TapeDivision._begin_phase,
    tape.PHASE_END: TapeDivision._end_phase,
    tape.SPENT: TapeDivision._spend_gap,
    tape.OWN: TapeDivision._begin_own_work,
    tape.OWN_END: TapeDivision._end_own_work,
    tape.CALL: TapeDivision._call_model,
    tape.FIRST: TapeDivision._open_first,
    tape.FORWARD: TapeDivision._begin_pass,
    tape.FORWARD_END: TapeDivision._end_pass,
    tape.REGION: partial(TapeDivision._begin_pass, is_region=True),
    tape.BACKWARD: partial(TapeDivision._begin_pass, kind=tape.BACKWARD),
    tape.BACKWARD_END: partial(TapeDivision._end_pass, kind=tape.BACKWARD),
    tape.UNSEEN: TapeDivision._miss_pass,
    tape.GRADIENT: partial(TapeDivision._miss_pass, unless=tape.BACKWARD),
}


_REMEMBERED = 32
_FEWEST = 4
"""A gap (time between two steps) can count as unusually long only after this many gaps were measured."""
_FACTOR = 5.0
_SHORT_GAP_SECONDS = 0.05
"""A shorter gap between steps is never unusual, because a busy machine causes gaps of some tens of milliseconds."""
_IDLE_SHARE = 0.2
"""A thread that uses less than this share of a core counts as idle."""


class UsualGaps:
    """Decides whether the gap between two steps was spent waiting for a batch, or on other work, such as an evaluation.

    A gap counts as other work if it is more than 5 times as long as the median of the last 32 gaps and longer than a
    typical step. It still counts as waiting if the loader has worker processes and the training's thread was idle,
    because a loader with several workers delivers several batches at once and then none for a while.
    """

    def __init__(self, worker_processes: Callable[[], object] = multiprocessing.active_children) -> None:
        self._worker_processes = worker_processes
        self._gaps: deque[float] = deque(maxlen=_REMEMBERED)
        self._works: deque[float] = deque(maxlen=_REMEMBERED)

    def is_outside(
        self, gap_seconds: float, work_seconds: float, has_seen_other_work: bool, cpu_seconds: float | None
    ) -> bool:
        """Whether the last gap between steps or micro-batches was other work (such as an evaluation), not input wait.

        `work_seconds` is the time between it and the gap before; `cpu_seconds` is None if it was not measured.
        """
        is_outside = gap_seconds > _SHORT_GAP_SECONDS and len(self._gaps) >= _FEWEST and bool(self._works)
        if is_outside:
            usual = median(self._gaps)
            is_outside = gap_seconds > _FACTOR * usual and gap_seconds > usual + median(self._works)
        if is_outside and not has_seen_other_work and cpu_seconds is not None:
            is_outside = cpu_seconds >= _IDLE_SHARE * gap_seconds or not self._worker_processes()
        self._gaps.append(gap_seconds)
        if work_seconds:
            self._works.append(work_seconds)
        return is_outside
