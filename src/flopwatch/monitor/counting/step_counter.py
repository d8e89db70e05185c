"""Counts some steps of the training as they run, and records of every step which modules it has called."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import is_inference_mode_enabled, nn

from flopwatch.flops.tracing import regions
from flopwatch.flops.tracing.live import (
    LiveStep,
    StepCount,
    clear_left_behind,
    is_capturing,
    may_compile,
    obstacle,
)
from flopwatch.flops.tracing.replica import unwrap
from flopwatch.flops.tracing.scaling import Axes
from flopwatch.language import Said
from flopwatch.monitor import notices
from flopwatch.monitor.config import ModeName, MonitorConfig
from flopwatch.monitor.counting.batch_reader import BatchReader, Reading
from flopwatch.monitor.counting.call_kinds import CallKind, Evaluations
from flopwatch.monitor.counting.calls import CallListener, RootCalls, failure_of
from flopwatch.monitor.counting.estimates import EstimatedCosts
from flopwatch.monitor.counting.evidence import NOTHING, UNKNOWN, Doubt, Evidence, StepKind, StepTrace
from flopwatch.monitor.counting.open_step import CompiledSteps, OpenStep, TrainedModel, axes_of
from flopwatch.monitor.counting.schedule import Schedule
from flopwatch.monitor.notices import Notify
from flopwatch.monitor.timing.hooks import PassHooks
from flopwatch.monitor.timing.tape import Tape
from flopwatch.records.run import Provenance
from flopwatch.torch_internals.autograd import recorded_operations
from flopwatch.torch_internals.ops import dispatch_mode_stack

NOTHING_RAN = Said("no operation of the training was seen in this thread, so the FLOPs are estimated from the batch")
FIRST = Said("the first step of a training that is compiled was not seen, so its FLOPs are estimated from the batch")
NO_MODEL = Said("no model was given, so there are no FLOPs")
DISTURBED = Said(
    "{op} computes other last bits while a step is counted, so no further step is counted, and the FLOPs are "
    "estimated from the model's shapes"
)
ESTIMATED = Said("the FLOPs are estimated from the model's shapes")
_FUTILE = 2
"""After so many counted steps in which nothing ran, no further step is counted."""
_TIMED_BEFORE_COUNT = 32
"""This many steps before a count are timed, to know how long an uncounted step takes."""


@dataclass(frozen=True)
class Callbacks:
    """What the counter tells others, and asks them."""

    tape: Tape
    passes: PassHooks
    on_evaluation: Callable[[], None]
    on_doubt: Callable[[Doubt], None]
    in_count_phase: Callable[[], AbstractContextManager[None]]
    notify: Notify


class StepCounter:
    """Decides which steps are counted, counts them, and records what every step ran.

    If the loop opens its steps (`begin_step`), a step begins there; otherwise it begins when the step before has ended.
    Between steps, a module in evaluation mode that is called without gradients only now and then is being evaluated.

    Attributes:
        evidence: What is known about the FLOPs of the current model. A changed model gets new evidence.
        mode: The mode in which steps are counted; `mode_note` says why it is not the one that was asked for.
    """

    listener: CallListener | None = None
    """Is told of the outermost calls of modules, for `flopwatch run`, where steps are counted without a model too."""
    is_on = True
    """False if no FLOPs are needed, because the user has a function for them."""

    def __init__(self, config: MonitorConfig, callbacks: Callbacks, *, is_alone: bool) -> None:
        self._config, self._callbacks = config, callbacks
        self.evidence = Evidence()
        self._reader = BatchReader()
        self._calls = RootCalls(self)
        self._evaluations = Evaluations()
        first = 0 if config.initial_profiling or config.mode != "smart" else config.recalibration_frequency
        self.mode: ModeName = config.mode
        self.mode_note: str | None = None
        self._schedule = Schedule(is_alone, self._every, first, stops=not config.calibration_enabled)
        self._compiled = CompiledSteps(config.attention, callbacks.in_count_phase)
        self._estimates = EstimatedCosts(config.attention, callbacks.in_count_phase)
        self._trained: TrainedModel | None = None
        self._opens_steps: bool | None = None
        """Whether the loop opens its steps; None until the first step has begun or ended."""
        self._step: OpenStep | None = None
        self._disturbing_op: str | None = None
        """An op of the training that computes other last bits while a step is counted, so that no further one is."""

    @property
    def _every(self) -> int:
        if self._config.count == "every":
            return 1
        is_frequent = self.mode in ("profiler", "hybrid")
        return self._config.flops_profile_freq if is_frequent else self._config.recalibration_frequency

    def become(self, mode: ModeName, why: str) -> None:
        """Count as in another mode from now on, because `hybrid` has no hardware counters."""
        self.mode, self.mode_note = mode, why
        if mode == "smart":
            self.count_every(self._every)

    # --- The model ----------------------------------------------------------------------------------------------------

    @property
    def model(self) -> nn.Module | None:
        return None if self._trained is None else self._trained.model()

    def set_model(self, model: nn.Module) -> None:
        known = self.model
        if known is model:
            return
        if known is not None:
            self.evidence, self._estimates = Evidence(), self._estimates.anew()
            self._schedule.next_index = min(self._schedule.next_index, self._schedule.steps + 1)
        if self._trained is not None:
            self._trained.stop()
        self._trained = TrainedModel(model, self._callbacks.passes.gradient_arrived)
        self._reader.reads_targets |= bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
        if self._step is not None:
            self._step.began_without_model = True
        elif self._opens_steps is None:  # a loop without `step()` begins its first step with a call of a module
            self._calls.start()

    def count_every(self, steps: int) -> None:
        """Count at least every so many steps; 0 sets no such limit."""
        self._schedule.every = steps

    def check_model(self) -> None:
        """Count the next step if the model has other parameters than before; called once per logging window."""
        if self._trained is not None and self._trained.has_other_parameters():
            self._schedule.wants_next = True
            if self._estimates.is_used:
                self._estimates = self._estimates.anew()
                message = Said("the model has changed, so its FLOPs are counted again")
                self._callbacks.notify("info", "flops_counted_anew", message)

    def doubt_unproven(self) -> None:
        """At the end of the run, doubt what no later count can prove."""
        doubt = self.evidence.unproven()
        if doubt is not None:
            self._callbacks.on_doubt(doubt)

    def close(self) -> None:
        if self._step is not None:
            self._step.end_count()
        self._calls.close()
        if self._trained is not None:
            self._trained.stop()

    def provenance(self) -> Provenance | None:
        """How the FLOPs are found; None until some are known."""
        attention = self._config.attention
        found = self.evidence.provenance(self.mode, attention)
        if found is None and self._estimates.is_used:
            found = Provenance(0, self.mode, "estimate", False, attention, notes=self._estimates.notes)
        if found is None or self.mode_note is None:
            return found
        return replace(found, notes=(*found.notes, self.mode_note))

    # --- Batches ------------------------------------------------------------------------------------------------------

    def read(self, batch: Any, lengths: Sequence[int] | None) -> Reading:
        """Read the sizes of a batch that the step runs from now on."""
        reading, remark = self._reader.read_checked(batch, lengths)
        if remark:
            self._callbacks.notify("warning", "positions_not_understood", remark)
        step, layout = self._step, reading.layout
        if step is not None:
            step.layout = layout
            if step.live is not None:
                step.live.set_axes(layout.axes)
        if may_compile():  # calls of modules are not seen, so the batch shows of what kind the step is
            self._compiled.batches.append(self._calls.kinds.of_batch(batch))
        # The first steps show whether the training runs in this thread. Until then, batches are kept for estimates.
        if self.is_on and (step is None or not step.may_count or self._schedule.steps < _FUTILE):
            self._estimates.note(batch, layout)
        return reading

    def with_sizes(self, reading: Reading) -> Reading | None:
        return self._reader.with_sizes(reading)

    # --- A step begins ------------------------------------------------------------------------------------------------

    def begin_step(self, batch: Any = None) -> None:
        """Begin a step that the loop has opened, with the batch that it will run, if that is known."""
        step = self._step
        if step is not None and self._opens_steps:  # the next micro-batch of the same step
            step.batch = batch
            step.read_axes(self._reader)
            return
        self._opens_steps = True
        self._open(batch)

    def await_step(self) -> None:
        """In a loop that opens no steps, begin the next step, because the one before has ended."""
        if not self._opens_steps:
            self._opens_steps = False
            self._open()

    def await_call(self) -> None:
        """Listen for the next call of a module, without beginning a step."""
        if obstacle() is None:
            self._calls.start()

    def about_to_call(self) -> None:
        if self._opens_steps is None and self._step is None and self._trained is not None:
            self._open()
            if self._step is not None:
                self._step.is_late = True
        if self.listener is not None:
            self.listener.about_to_call()

    def _open(self, batch: Any = None) -> None:
        if not self.is_on:
            return
        if self._step is not None:
            self._step.end_count()
        clear_left_behind()
        step, calls, schedule = OpenStep(batch), self._calls, self._schedule
        self._step = step
        if self.evidence.usual is None and not self._can_count():
            calls.take()
            if self.listener is None:
                calls.stop()
            else:  # it reads the batches from the calls
                calls.start()
            return
        step.may_count = True
        self._evaluations.before = calls.take() if calls.calls else []
        if self._trained is not None:
            self._trained.backwards = 0
        compiles = may_compile()
        if compiles:
            self._compiled.begin_step()
        step.nodes_before = recorded_operations()
        step.began = self._callbacks.tape.clock()
        if compiles or not calls.is_ready():
            calls.start()
        is_due = schedule.is_due(schedule.steps)
        if is_due or schedule.wants_next or schedule.steps in schedule.expected or compiles:
            self._decide_on_count(step, is_due, compiles)

    def _decide_on_count(self, step: OpenStep, is_due: bool, compiles: bool) -> None:
        """Decide whether a step is counted, and whether its count begins now or with its first call."""
        schedule = self._schedule
        is_new = schedule.wants_next or schedule.steps in schedule.expected
        if not is_new and compiles and step.batch is not None:  # in compiled code, a call cannot begin a count
            is_new = self._compiled.is_new(self._calls.kinds.of_batch(step.batch))
        step.is_wanted = is_due or (is_new and schedule.may_add(schedule.steps))
        # In a process that compiles, calls of modules are not seen, so none of them shows that a step begins.
        begins_early = self.evidence.starts_with_call is not True or compiles or (is_due and schedule.begins_early())
        # Torch drops a dispatch mode that is entered inside of compiled code, so the next step is counted instead.
        if step.is_wanted and (self._opens_steps or begins_early) and not regions.state.is_calling:
            self._begin_count(step)

    def _can_count(self) -> bool:
        if self._config.mode == "estimate" or self._schedule.futile >= _FUTILE or self._obstacle() is not None:
            return False
        return self.listener is not None or self.model is not None

    def _obstacle(self) -> str | None:
        return obstacle() or (self._disturbing_op and DISTURBED.filled(op=self._disturbing_op))

    def _begin_count(self, step: OpenStep, *, is_late: bool = False) -> None:
        # If the training leaves a dispatch mode of its own while ours is entered, torch would leave ours instead.
        covers_step = self._opens_steps and not is_late
        if is_capturing() or (not covers_step and dispatch_mode_stack()):
            return
        # Torch drops a mode that is entered in inference mode when that ends. So the next count begins with its step.
        if not covers_step and is_inference_mode_enabled():
            self.evidence.starts_with_call = None
            return
        if not self._schedule.is_due(self._schedule.steps):
            self._schedule.extra += 1
        step.is_late = is_late
        step.begin_count(self._config.attention, self.model)
        step.read_axes(self._reader)

    def take_over(self, live: LiveStep | None, calls: RootCalls, nodes: int | None) -> None:
        """Take over a step that was begun before there was a monitor, and ends now."""
        step = self._step = OpenStep()
        step.is_late = step.began_without_model = True
        step.live, step.nodes_before = live, nodes
        regions.leave(self._calls)
        self._calls, calls.listener = calls, self

    # --- A step runs --------------------------------------------------------------------------------------------------

    def call_inexact(self, reason: str) -> None:
        """Say why the step that ends now is not exact."""
        if self._step is not None:
            self._step.reason = reason

    def optimizer_begins(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        step = self._step
        if step is None or (step.live is None and len(args) < 2 and not kwargs) or not self._calls.is_in_thread():
            return
        if len(args) > 1 or kwargs:
            step.optimizer_call = optimizer, args, kwargs
        if step.live is not None:
            step.live.enter_optimizer(optimizer, args, kwargs)

    def optimizer_ends(self) -> None:
        step = self._step
        if step is None or (step.live is None and step.optimizer_call is None) or not self._calls.is_in_thread():
            return
        step.optimizer_call = None
        if step.live is not None:
            step.live.leave_optimizer()

    def called(self, kind: CallKind, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A module is called, outside of other modules."""
        step, trained, evidence = self._step, self._trained, self.evidence
        clear_left_behind()
        if trained is not None and trained.model() is module:
            self._callbacks.tape.model_is_called(kind.has_grad)
        if step is None:
            if self._opens_steps:  # between two steps
                return
        elif step.live is None and step.may_count and len(self._calls.calls) == 1 and evidence.starts_with_call:
            is_new = kind not in evidence.settled_calls and not evidence.knows_call(kind)
            if step.is_wanted or (is_new and self._schedule.may_add(self._schedule.steps)):
                self._begin_count(step, is_late=True)
        is_counted = step is not None and step.live is not None and self._count_call(step, kind, module, args, kwargs)
        if self.listener is not None:
            self.listener.called(kind, module, args, kwargs)
        if self._calls.inside is not None and not is_counted and (kind.has_grad or not self.is_evaluation(kind)):
            self._callbacks.passes.forward_begins()

    def _count_call(
        self, step: OpenStep, kind: CallKind, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> bool:
        """Add a call to the running count. Returns False if the count has ended, because the call is an evaluation."""
        assert step.live is not None
        step.live.note_call()
        if kind.has_grad and kind.has_parameters:
            step.read_axes_of_call(self._reader, module, args, kwargs)
        if self.is_evaluation(kind):
            step.end_count()  # the count would include the evaluation, so the next step is counted instead
            self._schedule.wants_next = True
        return step.live is not None

    def region_called(self, kind: CallKind) -> Callable[[Any], None] | None:
        if kind.has_grad:
            return self._callbacks.passes.region_begins()
        model = self.model  # the call does not show whether its module is in training mode
        is_in_mode = model is not None and not unwrap(model).training
        return self._region_evaluated if is_in_mode and self.is_evaluation(kind) else None

    def _region_evaluated(self, output: Any) -> None:
        failure_of(self._callbacks.on_evaluation)

    def returned(self, kind: CallKind, output: Any) -> None:
        self._callbacks.passes.forward_ends(output)
        if not kind.has_grad and self.is_evaluation(kind):
            self._callbacks.on_evaluation()
        if self.listener is not None:
            self.listener.returned(kind, output)

    def is_evaluation(self, kind: CallKind) -> bool:
        """Whether a call between two steps is part of an evaluation."""
        return (self._step is None or not self._opens_steps) and self._evaluations.has(kind, self._calls.calls)

    @contextmanager
    def ignoring_calls(self) -> Iterator[None]:
        """A context for phases such as evaluation, whose calls of the model belong to no step."""
        was, before = self._calls.is_listening, recorded_operations()
        self._listen(False)
        try:
            yield
        finally:
            self._listen(was)
            if was and self._step is not None:  # contexts can be nested; only the outermost one adds its operations
                self._step.nodes_outside += (recorded_operations() or 0) - (before or 0)

    def _listen(self, listens: bool) -> None:
        self._calls.is_listening = listens
        if self._step is not None and self._step.live is not None:
            self._step.live.set_paused(not listens)

    # --- A step ends --------------------------------------------------------------------------------------------------

    def abandon_step(self) -> None:
        step, self._step = self._step, None
        if step is not None:
            step.end_count()
        self._calls.stop()
        self._calls.take()
        self._compiled.take_batches()
        self._estimates.examples.clear()

    def end_step(self, readings: Sequence[Reading], step: int) -> StepTrace:
        """End a step and return what it ran. `readings` are the batches that the loop has passed to the monitor."""
        if not self.is_on:
            return NOTHING
        opened, self._step = self._step, None
        usual, schedule = self.evidence.usual, self._schedule
        schedule.steps += 1
        if opened is None or usual is None or not self._is_usual(opened, usual):
            return self._trace(opened, readings, step)
        self._calls.calls.clear()
        self._calls.nodes.clear()
        self._evaluations.steps += 1
        return self._usual_trace(opened, usual)

    def _usual_trace(self, opened: OpenStep, usual: StepTrace) -> StepTrace:
        schedule = self._schedule
        schedule.wants_next = False
        if schedule.next_index - schedule.steps < _TIMED_BEFORE_COUNT:
            schedule.note_step(self._callbacks.tape.clock() - opened.began)
        return usual

    def _is_usual(self, opened: OpenStep, usual: StepTrace) -> bool:
        """Whether a step ran the same calls and operations as the one before, and nothing more."""
        kind, trained = usual.kind, self._trained
        if kind is None or not opened.may_count or opened.live is not None:
            return False
        if opened.reason or opened.began_without_model:
            return False
        nodes = (recorded_operations() or 0) - (opened.nodes_before or 0) - opened.nodes_outside
        if nodes != kind.nodes or not kind.calls or kind.calls != tuple(self._calls.calls) or may_compile():
            return False
        first = kind.calls[0]
        has_none_before = not self._evaluations.before if self._opens_steps else first.has_grad and first.is_training
        if not has_none_before or trained is None or trained.backwards != kind.backwards:
            return False
        return not trained.has_changed()

    def _trace(self, opened: OpenStep | None, readings: Sequence[Reading], step: int) -> StepTrace:
        now = recorded_operations()  # before graphs are counted, which records operations
        live, axes = None if opened is None else opened.live, axes_of(readings)
        count = None if opened is None else self._end_count(opened, axes)
        if live is not None and count is not None:
            count = self._compiled.counted(live, count, axes)
        has_evaluated = count is not None and self._compiled.has_evaluated(count) and not self._opens_steps
        if self._opens_steps and (may_compile() or (opened is not None and not opened.may_count)):
            self._calls.stop()  # so that calls of evaluations are not recorded
        can_count = self._can_count()
        if opened is None or not can_count:
            # The first step of a loop that opens no steps is futile too.
            self._schedule.futile += can_count and self._schedule.steps == 1
            return self._estimate()
        kind, had_evaluation = self._kind_of(opened, now, readings)
        has_evaluated |= had_evaluation
        usual, was_counted = self.evidence.usual, count is not None and self._config.count != "every"
        if count is None:
            if usual is not None and kind == usual.kind and not has_evaluated and not opened.reason:
                return self._usual_trace(opened, usual)
            self._schedule.note_step(self._callbacks.tape.clock() - opened.began)
        elif not has_evaluated and opened.reason is None:
            self._compiled.note(kind)
            count = self._add_count(opened, kind, step, count)
        needs_count = self.evidence.needs_count(kind)
        if needs_count and count is None:
            count = self._by_graphs(kind, step, readings)
            needs_count = count is None or self.evidence.needs_count(kind)
        if needs_count:
            self._schedule.expect(kind, self._schedule.steps - 1)
        self._schedule.wants_next = has_evaluated or needs_count
        if self._schedule.futile >= _FUTILE:
            return self._estimate()
        self._estimates.examples.clear()
        is_partial = opened.is_late and count is not None and not self.evidence.starts_with_call
        count = None if has_evaluated else count
        trace = StepTrace(kind, self.evidence, count, was_counted, is_partial, opened.reason)
        is_plain = not (self._schedule.wants_next or was_counted or count or opened.reason)
        self.evidence.usual = trace if is_plain else None
        return trace

    def _end_count(self, opened: OpenStep, axes: Axes | None) -> StepCount | None:
        count = opened.end_count(axes)
        if count is not None and count.disturbing_op is not None:
            self._disturbing_op, self.evidence.usual = count.disturbing_op, None
        return count

    def _kind_of(self, opened: OpenStep, now: int | None, readings: Sequence[Reading]) -> tuple[StepKind, bool]:
        """The kind of a step, and whether calls of an evaluation were left out of it."""
        noted, trained = self._calls.take(), self._trained
        calls, nodes_outside, has_evaluated = [call for call, _ in noted], opened.nodes_outside, False
        if self._opens_steps:
            self._evaluations.note_opened(calls)
        else:
            calls, more_outside, has_evaluated = self._evaluations.left_out(noted)
            nodes_outside += more_outside
        nodes = None if now is None or opened.nodes_before is None else now - opened.nodes_before - nodes_outside
        if self._compiled.has_compiled():
            nodes = None
        sizes = () if calls else tuple((reading.layout.batch_size, reading.layout.seq_len) for reading in readings)
        calls += self._compiled.take_batches()
        if trained is None:
            return StepKind(
                tuple(calls), nodes, UNKNOWN if opened.began_without_model else 0, (0, *sizes)
            ), has_evaluated
        trained.has_changed()
        backwards, trained.backwards = UNKNOWN if opened.began_without_model else trained.backwards, 0
        return StepKind(tuple(calls), nodes, backwards, (trained.state, *sizes)), has_evaluated

    def _add_count(self, opened: OpenStep, kind: StepKind, step: int, count: StepCount) -> StepCount | None:
        """Add a count to the evidence; None if it is not complete."""
        schedule, evidence, notify = self._schedule, self.evidence, self._callbacks.notify
        schedule.note_count(schedule.steps - 1, self._callbacks.tape.clock() - opened.began)
        if count.failure is not None:
            evidence.failure = count.failure
            notify(
                "info",
                f"count_failed:{count.failure}",
                Said("step {step} could not be counted: {why}", step=step, why=count.failure),
            )
            return None
        if not count.phases.total and not count.uncounted and not kind.calls:
            schedule.futile += 1
            return None
        if count.optimizer:
            notify(*notices.notice("optimizer_products", flops=count.optimizer))
        if not opened.is_late:
            evidence.starts_with_call = evidence.starts_with_call is not False and not count.before_calls
        elif not evidence.starts_with_call:  # the first step of `flopwatch run`, whose beginning was not seen
            return count
        self._add_to_evidence(kind, step, count, is_late=opened.is_late)
        return count

    def _by_graphs(self, kind: StepKind, step: int, readings: Sequence[Reading]) -> StepCount | None:
        if not self._compiled.runs_nothing_else(kind) or not self._schedule.may_add(self._schedule.steps):
            return None
        self._schedule.extra += 1
        count = self._compiled.by_graphs(kind, readings)
        if count is not None:
            # A later count of the step itself proves or doubts this one.
            self._add_to_evidence(kind, step, count, is_late=True)
        return count

    def _add_to_evidence(self, kind: StepKind, step: int, count: StepCount, *, is_late: bool) -> None:
        doubt = self.evidence.add(kind, step, count, is_late=is_late)
        if doubt is not None:
            self._callbacks.on_doubt(doubt)
            self._calls.kinds.reads_numbers |= any(call.numbers for call in kind.calls)

    def _estimate(self) -> StepTrace:
        """The trace of a step whose FLOPs are estimated as those of `model(batch)`."""
        model, estimates = self.model, self._estimates
        if model is None:
            estimates.examples.clear()
            return StepTrace(reason=NO_MODEL)
        estimates.is_used = True
        while estimates.examples:
            error = failure_of(estimates.estimate_next, model)
            if error is not None:
                self._callbacks.notify(*notices.notice("flops_unknown", why=error))
                if self._config.strict:
                    raise error
        why = self._obstacle() or (FIRST if may_compile() and self._schedule.steps == 1 else NOTHING_RAN)
        return StepTrace(estimates=estimates, reason=ESTIMATED if self._config.mode == "estimate" else why)
