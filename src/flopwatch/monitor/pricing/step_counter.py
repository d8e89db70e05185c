"""Counts the training's own steps: begins and ends live counts, and records what every step shows of itself."""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from torch import is_inference_mode_enabled, nn
from torch.nn.parameter import is_lazy

from flopwatch.clock import Clock
from flopwatch.errors import InputError
from flopwatch.flops.tracing import regions
from flopwatch.flops.tracing.counter import counted_convention
from flopwatch.flops.tracing.live import (
    RISKY,
    LiveStep,
    SeenRegion,
    StepCount,
    clear_left_behind,
    is_capturing,
    may_compile,
    obstacle,
)
from flopwatch.flops.tracing.observed import ObservedStep
from flopwatch.flops.tracing.region_counts import with_regions
from flopwatch.flops.tracing.replica import unwrap
from flopwatch.flops.tracing.scaling import Axes
from flopwatch.monitor import notices
from flopwatch.monitor.config import MonitorConfig
from flopwatch.monitor.notices import Notify
from flopwatch.monitor.pricing.batch_reader import BatchLayout, BatchReader, Reading
from flopwatch.monitor.pricing.calls import (
    COMPILED,
    CallKind,
    CallListener,
    PassListener,
    RootCalls,
    TrainedParameters,
    batch_of_call,
)
from flopwatch.monitor.pricing.estimates import EstimatedCosts
from flopwatch.monitor.pricing.evaluations import Evaluations
from flopwatch.monitor.pricing.evidence import ENOUGH, UNKNOWN, Doubt, Evidence, StepKind
from flopwatch.monitor.pricing.schedule import Schedule
from flopwatch.records.flops import AttentionConvention, PhaseFlops
from flopwatch.torch_internals.autograd import compiled_graphs, recorded_operations
from flopwatch.torch_internals.ops import dispatch_mode_stack

NOTHING_RAN = "no operation of the training was seen in this thread, so the FLOPs are estimated from the batch"
FIRST = "the first step of a training that is compiled was not seen, so its FLOPs are estimated from the batch"
NO_MODEL = "no model was given, so there are no FLOPs"
ESTIMATED = "the FLOPs are estimated from the model's shapes"
_MOST_BATCHES = 4096
_FUTILE = 2
"""After so many counted steps in which nothing ran, no further step is counted."""


@dataclass(frozen=True, slots=True)
class StepTrace:
    """What a step ran.

    Attributes:
        kind: What every step shows of itself; None if steps are not counted as they run.
        evidence: What was known of the model when the step ran.
        count: The step's FLOPs, if it was counted as it ran.
        was_counted: Whether counting has slowed the step down.
        is_partial: Whether it was not known if something ran before the count began.
        doubt: Why the FLOPs are not exact or not known; None if no such reason is known.
        estimates: Estimates of `model(batch)`, if steps are not counted as they run.
    """

    kind: StepKind | None = None
    evidence: Evidence = field(default_factory=Evidence)
    count: StepCount | None = None
    was_counted: bool = False
    is_partial: bool = False
    doubt: str | None = None
    estimates: EstimatedCosts | None = None


NOTHING = StepTrace()


@dataclass(frozen=True, slots=True)
class FlopFacts:
    """How FLOPs are found, for the log's record about it.

    Attributes:
        method: `step` for live counts, `trace` or `estimate` for those of `model(batch)`.
        exact: Whether the FLOPs of counted kinds of steps are exact.
        attention: The convention that the counts have, which is not always the one that was wanted.
        coverage: 1 if every op had a formula, otherwise the share of ops with one; None for estimates.
        notes: Remarks.
    """

    method: str
    exact: bool
    attention: AttentionConvention
    coverage: float | None = None
    notes: tuple[str, ...] = ()


class StepCounter:
    """Decides which steps are counted, counts them, and keeps what the counts show (`Evidence`).

    A loop either opens its steps (`begin_step`), or a step lasts from the end of one to the end of the next. Between
    steps, calls without gradients of modules in evaluation mode that come only now and then are evaluations.

    Attributes:
        evidence: What is known about the FLOPs of the current model. A changed model gets new evidence.
        listener: Is told of the outermost calls of modules, for `flopwatch run`.
        is_on: False if no FLOPs are needed, because the user has a function for them.
    """

    def __init__(
        self,
        config: MonitorConfig,
        clock: Clock,
        *,
        is_alone: bool,
        on_call: Callable[[bool], None],
        passes: PassListener,
        on_evaluation: Callable[[], None],
        on_doubt: Callable[[Doubt], None],
        off_the_clock: Callable[[], AbstractContextManager[None]],
        notify: Notify,
    ) -> None:
        self._config, self._clock, self._is_alone = config, clock, is_alone
        self._passes, self._on_call, self._on_doubt, self._off_the_clock, self._notify = (
            passes,
            on_call,
            on_doubt,
            off_the_clock,
            notify,
        )
        self._on_evaluation = on_evaluation
        self.evidence = Evidence()
        self.listener: CallListener | None = None
        self.counts_without_model = False
        self.is_on = True
        self._reader = BatchReader()
        self._calls = RootCalls(self)
        self._evaluations = Evaluations()
        first = 0 if config.initial_profiling or config.mode != "smart" else config.recalibration_frequency
        self._schedule = Schedule(is_alone, _counted_every(config), first, stops=not config.calibration_enabled)
        self._model: weakref.ref[nn.Module] | None = None
        self._trained: TrainedParameters | None = None
        self._live: LiveStep | ObservedStep | None = None
        self._is_late = False
        self._step_doubt: str | None = None
        self._last_seen: tuple[Any, ...] = ()
        self._last_trace = NOTHING
        """What the last step showed of itself, and its trace, if equal steps need not be looked at again."""
        self._optimizer_call: tuple[Any, ...] | None = None
        """The optimizer step that is under way, with its arguments."""
        self._awaits_first = False
        self._is_adopted = False
        """Whether the model was not known when the step began."""
        self.starts_free: bool | None = None
        """Whether counted steps ran nothing before their first call of a module, so that a count may begin there."""
        self._observes = False
        self._why_not_live: str | None = None
        self._estimates: EstimatedCosts | None = None
        self._examples: list[tuple[Any, BatchLayout]] = []
        self._opens_steps = self._is_open = False
        self._before: list[tuple[CallKind, int]] = []
        """Calls before the step that is open, in a loop that opens its steps."""
        self._nodes_before: int | None = None
        self._graphs_before = 0
        self._batches: list[CallKind] = []
        self._batches_met: Counter[CallKind] = Counter()
        self._is_all_compiled = False
        self._all_compiled: dict[Any, bool] = {}
        """For families of compiled code, whether counted steps ran no product outside of it."""
        self._nodes_apart = 0
        self._before_grad: list[int] = []
        """Products without gradients with which the last two counted steps began."""
        self._steps = self._futile = 0
        self._began = 0.0
        self._wants_next = self._is_wanted = self._is_extra = False
        self._plan: BatchLayout | None = None
        """The layout of the micro-batch that the step runs, as far as it is known."""
        self._may_count = False
        """Whether the step that is open may be counted as it runs."""
        self._coming: Any = None
        """The batch of the step that is open, if the loop has passed it when it opened the step."""
        self._structure: int | None = None

    # --- The model ----------------------------------------------------------------------------------------------------

    @property
    def model(self) -> nn.Module | None:
        return None if self._model is None else self._model()

    def set_model(self, model: nn.Module) -> None:
        if self.model is model:
            return
        if self.model is not None:
            self._renew()
        self._is_adopted = self._is_open
        self._model = weakref.ref(model)
        if self._trained is not None:
            self._trained.stop()
        self._trained = TrainedParameters(model, self._passes.gradient_arrived)
        self._trained.state()
        self._reader.reads_targets |= bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
        self._structure = None
        if not self._opens_steps and not self._steps and not self._is_open:
            self._awaits_first = True  # a loop without `step()` begins its first step with a call of a module
            self._calls.start()

    def count_every(self, steps: int) -> None:
        """Count at least every so many steps; 0 sets no such limit."""
        self._schedule.every = steps

    def look_at_model(self) -> None:
        """Once per logging window: a model with other parameters gets new evidence, and the next step is counted."""
        model = self.model
        if model is None:
            return
        parameters = (p for p in nn.Module.parameters(model) if not is_lazy(p))
        structure = hash(tuple((p.shape, p.dtype, p.requires_grad) for p in parameters))
        if self._structure is not None and structure != self._structure:
            self._wants_next = True
            if self._estimates is not None:
                self._estimates = None
                self._notify("info", "flops_counted_anew", "the model has changed, so its FLOPs are counted again")
        self._structure = structure

    def _renew(self) -> None:
        self.evidence = Evidence()
        self._estimates = None
        self._schedule.next_index = min(self._schedule.next_index, self._steps + 1)
        self.starts_free = None

    def doubt_unproven(self) -> None:
        """At the end of the run, doubt what no later count can prove."""
        doubt = self.evidence.unproven()
        if doubt is not None:
            self._on_doubt(doubt)

    def close(self) -> None:
        self._end_count()
        self._calls.stop()
        if self._trained is not None:
            self._trained.stop()

    def facts(self) -> FlopFacts | None:
        """How the FLOPs are found; None while they are not."""
        if self._estimates is not None and not self.evidence.counts:
            return FlopFacts("estimate", False, self._config.attention, None, self._estimates.notes)
        if not self.evidence.counts:
            return None
        uncounted = self.evidence.uncounted
        attention, note = counted_convention(self._config.attention, self.evidence.ops)
        more = (f"ops without a formula: {', '.join(uncounted)}",) if uncounted else ()
        return FlopFacts("step", not uncounted, attention, self.evidence.coverage, (*more, *((note,) if note else ())))

    # --- Batches ------------------------------------------------------------------------------------------------------

    def read(self, batch: Any, lengths: Sequence[int] | None) -> Reading:
        """Read the sizes of a batch that the step runs from now on."""
        reading, remark = self._reader.read_checked(batch, lengths)
        if remark:
            self._notify("warning", "positions_not_understood", remark)
        self._plan = reading.plan
        if may_compile():  # calls of modules are not seen, and what they cost follows the sizes of the batch
            self._batches.append(self._calls.batch_kind(batch))
        if self._live is not None:
            self._live.set_axes(self._plan.axes)
        # At the end of the first steps it is known whether anything runs here, and whether ranks share the model.
        if (self._steps < _FUTILE or not self._may_count) and self._needs_example(reading.plan):
            self._examples.append((batch, reading.plan))
        return reading

    def _needs_example(self, plan: BatchLayout) -> bool:
        if self._estimates is not None:
            return not self._estimates.knows(plan)
        return self.is_on

    def look_at_held(self, reading: Reading) -> Reading | None:
        return self._reader.look_at_held(reading)

    # --- Steps --------------------------------------------------------------------------------------------------------

    def begin_step(self, batch: Any = None) -> None:
        """Begin a step that the loop has opened, with the batch that it will run, if that is known."""
        self._coming = batch
        if self._is_open and self._opens_steps:  # the next micro-batch of the same step
            if self._live is not None:
                self._set_axes()
            return
        if not self._opens_steps:
            self._opens_steps, self._awaits_first = True, False
            self._end_count()
        self._open()

    def await_step(self) -> None:
        """After a step of a loop that opens no steps: what runs from now on belongs to the next step."""
        if not self._opens_steps:
            self._open()

    def await_call(self) -> None:
        """Listen for the next call of a module, without beginning a step."""
        if obstacle() is None:
            self._calls.start()

    def _open(self) -> None:
        if not self.is_on:
            return
        self._is_open = True
        clear_left_behind()
        self._why_not_live = obstacle()
        self._may_count = self._why_not_live is None and self._can_count()
        if not self._may_count:
            self._calls.take()
            if self.listener is None:
                self._calls.stop()
            else:  # which needs the batches
                self._calls.start()
            return
        self._before = self._calls.take() if self._calls.calls else []
        if self._trained is not None:
            self._trained.backwards = 0
        self._plan = self._optimizer_call = None
        self._nodes_before, self._nodes_apart = recorded_operations(), 0
        self._graphs_before = compiled_graphs() if may_compile() and not regions.state.is_calling else 0
        self._began = self._clock()
        self._calls.start()
        is_due = self._schedule.is_due(self._steps)
        is_new = self._wants_next or self._schedule.is_expected(self._steps) or self._has_new_batch()
        self._is_wanted = is_due or (is_new and self._schedule.may_add(self._steps))
        self._is_extra = not is_due
        # In compiled code, no call of a module shows that a step begins.
        looks_before = self.starts_free is not True or may_compile() or (is_due and self._schedule.looks_before())
        # Torch forgets a mode that begins in a call of compiled code, so that the next step is counted instead.
        if self._is_wanted and (self._opens_steps or looks_before) and not regions.state.is_calling:
            self._begin_count(is_extra=self._is_extra)

    def _has_new_batch(self) -> bool:
        """Whether such a batch came only a few times so far. In compiled code, a call cannot begin a count."""
        if self._coming is None or not may_compile():
            return False
        kind = self._calls.batch_kind(self._coming)
        if len(self._batches_met) >= _MOST_BATCHES:
            self._batches_met.clear()
        self._batches_met[kind] += 1
        return self._batches_met[kind] <= ENOUGH + 1  # the first may be compiled, which makes it unlike the others

    def _can_count(self) -> bool:
        if self._config.mode == "estimate" or self._futile >= _FUTILE:
            return False
        return self.model is not None or self.counts_without_model

    def _begin_count(self, *, is_extra: bool, is_late: bool = False) -> None:
        # A training that leaves its own mode within a step of unknown begin or end would leave ours instead.
        if is_capturing() or ((is_late or not self._opens_steps) and dispatch_mode_stack()):
            return
        # Torch forgets a mode that is entered in an inference mode when that ends: the next count begins with the step.
        if (is_late or not self._opens_steps) and is_inference_mode_enabled():
            self.starts_free = None
            return
        if is_extra:
            self._schedule.note_extra()
        model = self.model
        self._is_late = is_late
        parameters = () if model is None else nn.Module.parameters(model)
        attention = self._config.attention
        self._live = ObservedStep(attention) if self._observes else LiveStep(attention, parameters)
        self._set_axes()
        if self._optimizer_call is not None and is_late:  # the step's first call comes from a closure
            self._live.enter_optimizer(*self._optimizer_call)

    def _set_axes(self) -> None:
        """Tell the count which shape the micro-batch has that the loop has passed."""
        assert self._live is not None
        if self._coming is not None:
            with suppress(Exception):  # a batch that cannot be read is reported when the step ends
                self._plan = self._reader.read(self._coming).plan
        self._live.set_axes(None if self._plan is None else self._plan.axes)

    def _set_axes_of_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A loop that passes its batch after the step: the count takes the shape from the call."""
        assert self._live is not None
        with suppress(Exception):  # what the module takes may be no batch
            self._live.set_axes(self._reader.read(batch_of_call(module, args, kwargs)).plan.axes)

    def doubt_step(self, reason: str) -> None:
        """Say why the step that ends now is not exact."""
        self._step_doubt = reason

    def adopt(self, live: LiveStep | None, calls: RootCalls, nodes: int | None) -> None:
        """Take over a step that was begun before there was a monitor, and ends now."""
        self._is_open = self._is_late = self._is_adopted = True
        self._live, self._nodes_before, self._nodes_apart = live, nodes, 0
        self._calls, calls.listener = calls, self
        self._why_not_live = obstacle()

    def optimizer_begins(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._calls.is_in_thread():
            return
        if len(args) > 1 or kwargs:
            self._optimizer_call = optimizer, args, kwargs
        if self._live is not None:
            self._live.enter_optimizer(optimizer, args, kwargs)

    def optimizer_ends(self) -> None:
        if not self._calls.is_in_thread():
            return
        self._optimizer_call = None
        if self._live is not None:
            self._live.leave_optimizer()

    def about_to_call(self) -> None:
        if self._awaits_first:
            self._awaits_first = False
            self._open()
            self._is_late = True
        if self.listener is not None:
            self.listener.about_to_call()

    def called(self, kind: CallKind, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A module is called, outside of other modules."""
        clear_left_behind()
        if module is self.model:
            self._on_call(kind.has_grad)
        if self._opens_steps and not self._is_open:  # between two steps
            return
        is_first = self._may_count and self._live is None and self._is_open and len(self._calls.calls) == 1
        if is_first and self.starts_free:
            is_new = not self.evidence.knows_call(kind) and self._schedule.may_add(self._steps)
            if self._is_wanted or is_new:
                self._begin_count(is_extra=self._is_extra or not self._is_wanted, is_late=True)
        if self._live is not None:
            self._live.note_call()
            if self._plan is None and kind.has_grad and kind.has_parameters:
                self._set_axes_of_call(module, args, kwargs)
            if self.is_evaluation(kind):
                self._end_count()  # the step that follows is counted another time
                self._wants_next = True
        if self.listener is not None:
            self.listener.called(kind, module, args, kwargs)
        if self._calls.is_inside and self._live is None and (kind.has_grad or not self.is_evaluation(kind)):
            self._passes.forward_begins()

    def region_called(self, kind: CallKind) -> Callable[[Any], None] | None:
        if kind.has_grad:
            return self._passes.region_begins()
        model = self.model  # the call does not show in which mode its module is
        is_in_mode = model is not None and not unwrap(model).training
        return self._region_evaluated if is_in_mode and self.is_evaluation(kind) else None

    def _region_evaluated(self, output: Any) -> None:
        with suppress(Exception):  # must not reach the user's call
            self._on_evaluation()

    def returned(self, kind: CallKind, output: Any) -> None:
        self._passes.forward_ends(output)
        if self.is_evaluation(kind):
            self._on_evaluation()
        if self.listener is not None:
            self.listener.returned(kind, output)

    def is_evaluation(self, kind: CallKind) -> bool:
        """Whether a call between two steps is part of an evaluation."""
        return (not self._opens_steps or not self._is_open) and self._evaluations.has(kind, self._calls.calls)

    def abandon_step(self) -> None:
        """Drop the current step, because its body has raised."""
        self._is_open = False
        self._coming = None
        self._end_count()
        self._calls.stop()
        self._calls.take()
        self._batches = []
        self._examples.clear()

    @contextmanager
    def not_listening(self) -> Iterator[None]:
        """A context for phases such as evaluation, whose calls of the model belong to no step."""
        was, before = self._calls.is_listening, recorded_operations()
        self._listen(False)
        try:
            yield
        finally:
            self._listen(was)
            if was:  # otherwise this context is inside another one, which adds these operations
                self._nodes_apart += (recorded_operations() or 0) - (before or 0)

    def _listen(self, listens: bool) -> None:
        self._calls.is_listening = listens
        if self._live is not None:
            self._live.set_paused(not listens)

    def end_step(self, readings: Sequence[Reading], step: int) -> StepTrace:
        """End a step and return what it ran. `readings` are the batches that the loop has passed to the monitor."""
        if not self.is_on:
            return NOTHING
        now, apart = recorded_operations(), self._nodes_apart  # before graphs are counted, which records operations
        count = self._end_count(readings)
        was_counted = count is not None and self._config.count != "every"  # else no step would be left for the rates
        is_first_of_run, self._is_adopted = self._is_adopted, False
        doubt, self._step_doubt = self._step_doubt, None
        self._coming = None
        self._steps += 1
        was_open, self._is_open = self._is_open, False
        evaluated_outside = count is not None and self._ran_evaluation(count)
        if self._opens_steps and (may_compile() or not self._may_count):  # otherwise evaluations are heard
            self._calls.stop()
        if self._why_not_live is not None or not self._can_count():
            return self._untold(readings)
        if not was_open:  # the first step of a loop that opens none
            self._futile += self._steps == 1
            return self._untold(readings)
        noted = self._calls.take()
        calls, nodes_apart, has_evaluated = [call for call, _ in noted], 0, False
        if not self._opens_steps:
            calls, nodes_apart, has_evaluated = self._evaluations.left_out(noted)
            has_evaluated = has_evaluated or evaluated_outside
        elif self._before or self._steps == 1:
            self._evaluations.note_opened(self._before, calls)
        else:
            self._evaluations.steps += 1
        backwards = UNKNOWN if is_first_of_run else 0 if self._trained is None else self._trained.take()
        nodes = None if now is None or self._nodes_before is None else now - self._nodes_before - apart - nodes_apart
        if may_compile() and compiled_graphs() != self._graphs_before:  # the compiler has recorded operations too
            nodes = None
        trained = 0 if self._trained is None else self._trained.state()
        sizes = () if calls else tuple((reading.plan.batch_size, reading.plan.seq_len) for reading in readings)
        calls += self._batches
        self._batches = []
        batches = trained, *sizes
        seen = self.evidence, self.evidence.counts, nodes, backwards, batches, *calls
        if count is None and seen == self._last_seen and not has_evaluated and doubt is None:
            self._wants_next = False
            self._schedule.note_step(self._clock() - self._began)
            return self._last_trace
        kind = StepKind(tuple(calls), nodes, backwards, batches)
        if count is not None and not has_evaluated and doubt is None:
            families = _compiled_families(kind)
            self._all_compiled[families] = self._is_all_compiled and self._all_compiled.get(families, True)
            count = self._take_in(kind, step, count)
        elif count is None:
            self._schedule.note_step(self._clock() - self._began)
        needs_count = self.evidence.needs_count(kind)
        if needs_count and count is None and kind.calls and kind.calls[0].name == COMPILED:
            count = self._by_graphs(kind, step, readings)
            needs_count = self.evidence.needs_count(kind)
        if needs_count:
            self._schedule.expect(kind, self._steps - 1)
        self._wants_next = has_evaluated or needs_count
        if self._futile >= _FUTILE:
            return self._untold(readings)
        self._examples.clear()
        is_partial = self._is_late and count is not None and not self.starts_free
        trace = StepTrace(kind, self.evidence, None if has_evaluated else count, was_counted, is_partial, doubt)
        self._last_seen = () if needs_count or trace.was_counted or has_evaluated or doubt else seen
        self._last_trace = trace
        return trace

    def _ran_evaluation(self, count: StepCount) -> bool:
        """Whether a step that was counted began with an evaluation outside of compiled code, whose calls are not seen.

        Products without gradients that came first in three counts, and were equal, are taken for a part of the step.
        """
        before, self._before_grad = self._before_grad, [*self._before_grad[-1:], count.before_grad]
        return may_compile() and bool(count.before_grad) and before != [count.before_grad] * 2

    def _take_in(self, kind: StepKind, step: int, count: StepCount) -> StepCount | None:
        """Add a count to the evidence; None if it is not complete."""
        self._schedule.note_count(self._steps - 1, self._clock() - self._began)
        if count.failure is not None:
            if count.failure == RISKY:
                self._observes = True
                self._schedule.next_index = self._steps
                return None
            self.evidence.failure = count.failure
            self._notify("info", f"count_failed:{count.failure}", f"step {step} could not be counted: {count.failure}")
            return None
        if not count.phases.total and not count.uncounted and not kind.calls:
            self._futile += 1
            return None
        if count.optimizer:
            self._notify(*notices.notice("optimizer_products", flops=count.optimizer))
        if not self._is_late:
            self.starts_free = self.starts_free is not False and not count.before_calls
        elif not self.starts_free:  # the first step of `flopwatch run`, whose beginning was not seen
            return count
        doubt = self.evidence.add(kind, step, count, is_late=self._is_late)
        if doubt is not None:
            self._on_doubt(doubt)
            self._calls.reads_numbers = self._calls.reads_numbers or any(call.numbers for call in kind.calls)
        return count

    def _end_count(self, readings: Sequence[Reading] = ()) -> StepCount | None:
        live, self._live = self._live, None
        if live is None:
            return None
        axes = _axes_of(readings)
        count = live.end(axes)
        self._is_all_compiled = False
        if isinstance(live, LiveStep) and live.region_calls:
            once = all(seen.backwards == seen.has_grad and seen.phase == "forward" for seen in live.region_calls)
            self._is_all_compiled = once and not count.phases.total and not count.uncounted and not count.doubt
            with self._off_the_clock():
                count = with_regions(count, live.region_calls, self._config.attention, axes)
        return count

    def _by_graphs(self, kind: StepKind, step: int, readings: Sequence[Reading]) -> StepCount | None:
        """The FLOPs of a step with new sizes, if all that such steps run is compiled: those of its graphs."""
        if self._all_compiled.get(_compiled_families(kind)) is not True or not self._schedule.may_add(self._steps):
            return None
        compiled = [call for call in kind.calls if call.name == COMPILED]
        found = [(regions.by_number.get(call.family[1]), call) for call in compiled]  # type: ignore[index]
        # Each micro-batch makes equally many of the calls.
        axes = [reading.plan.axes for reading in readings] if readings and not len(found) % len(readings) else [None]
        seen = [
            SeenRegion(
                region,
                call.sizes,
                call.has_grad,
                "forward",
                axes[index * len(axes) // len(found)],
                False,
                int(call.has_grad),
            )
            for index, (region, call) in enumerate(found)
            if region is not None
        ]
        if len(seen) < len(found):
            return None
        self._schedule.note_extra()
        with self._off_the_clock():
            count = with_regions(StepCount(PhaseFlops()), seen, self._config.attention, _axes_of(readings))
        if count.failure is not None:
            return None
        self.evidence.add(kind, step, count, is_late=True)  # a later count of the step itself proves or doubts it
        return count

    # --- Steps that are not counted as they run -----------------------------------------------------------------------

    def _untold(self, readings: Sequence[Reading]) -> StepTrace:
        """A step whose FLOPs are those of `model(batch)`: an estimate."""
        model = self.model
        if model is None:
            self._examples.clear()
            return StepTrace(doubt=NO_MODEL)
        if self._estimates is None:
            self._estimates = EstimatedCosts(self._config.attention)
        examples, self._examples = self._examples, []
        for batch, plan in examples:
            if self._estimates.knows(plan):
                continue
            try:
                with self._off_the_clock():
                    self._estimates.learn(model, batch, plan)
            except Exception as error:  # the model may raise anything
                self._notify(*notices.notice("flops_unknown", why=error))
                if self._config.strict:
                    raise
        return StepTrace(estimates=self._estimates, doubt=self._why_untold())

    def _why_untold(self) -> str:
        if self._config.mode == "estimate":
            return ESTIMATED
        return self._why_not_live or (FIRST if may_compile() and self._steps == 1 else NOTHING_RAN)


def _axes_of(readings: Sequence[Reading]) -> Axes | None:
    """The shape of the step's micro-batches; None if they differ."""
    shapes = {reading.plan.axes for reading in readings}
    return shapes.pop() if len(shapes) == 1 else None


def _compiled_families(kind: StepKind) -> Any:
    return tuple(call.family for call in kind.calls), kind.backwards


def _counted_every(config: MonitorConfig) -> int:
    if config.count == "every":
        return 1
    return config.flops_profile_freq if config.mode == "profiler" else config.recalibration_frequency


def checked_flops(flops_fn: Callable[[Any], int], batch: Any) -> int:
    """Call the user's function with a batch; raise if its result is not a positive finite number."""
    flops = flops_fn(batch)
    if isinstance(flops, bool) or not isinstance(flops, int | float) or not 0 < flops < float("inf"):
        raise InputError(f"flops_fn must return a positive finite number of FLOPs, got {flops!r}")
    return int(flops)
