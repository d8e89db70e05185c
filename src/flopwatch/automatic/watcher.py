"""Monitors a training that contains no line of flopwatch, from hooks of torch that are documented for everybody.

The hooks of `Watcher` turn what happens in the process into events. `TABLE`, at the end of this file, says what each
event does in each state, and which state follows; docs/design.md shows it.
"""

import gc
import os
import threading
from collections.abc import Callable, Mapping
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from flopwatch.automatic.trained import (
    FirstStep,
    FoundModel,
    Optimizers,
    TrainedCalls,
    find_trained_modules,
    has_optimizer,
)
from flopwatch.monitor.counting.call_kinds import CallKind
from flopwatch.monitor.counting.calls import batch_of_call
from flopwatch.monitor.run import MonitoredRun
from flopwatch.monitor.training_monitor import TrainingMonitor, act_on_run, open_monitors
from flopwatch.records.flops import AttentionConvention
from flopwatch.torch_internals.autograd import current_graph_task_id

FIRST_STEP = "the first step is not in the totals, because {why}; steps count from 0, so the log begins with step 1"
SEVERAL_OPTIMIZERS = (
    "there are several optimizers in this process, perhaps of an earlier training, and which of them ends a step is "
    "known when they step again"
)
NO_CALL = "it called no module, so that nothing showed where it began"
MANY_CALLS = "so many modules were called before the optimizer stepped that they do not look like one step"
NO_MODULE = (
    "the parameters of {optimizer} belong to no nn.Module (or gc.freeze() hides it), so there are no tokens and samples"
)
SEVERAL_MODELS = (
    "the step calls several modules with trained parameters ({models}). Its FLOPs are those of all, but which inputs "
    "are new samples is not known, so there are no tokens and samples"
)
SKIPPED = "the GradScaler skipped steps of the optimizer after an overflow, so several steps are logged as one"
Batch = Callable[[], Any]
OWN_MONITOR = "the script has created a flopwatch.TrainingMonitor of its own, which measures the training from here on"


class Seen(Enum):
    """How much of a training was seen."""

    NOTHING = "nothing was seen"
    EVALUATED = "an evaluation was seen"
    MAYBE = "perhaps in the first step"
    FIRST = "in the first step"
    TOO_MANY = "too many calls"
    BETWEEN = "between two steps"
    OPEN = "in a step"
    ENDS = "the step ends at the next call"
    BEGINS = "a step begins at the next call"
    OFF = "off"


class Event(Enum):
    """What the hooks see. A call is that of a module, outside of other modules, or of compiled code."""

    CALL_COMES = "a call is about to begin"
    EARLY_CALL = "a call before an optimizer was made"
    GRAD_CALL = "a call with gradients"
    EVALUATED_CALL = "a call with gradients of a model that was evaluated before"
    PLAIN_CALL = "a call without gradients of a module in training mode or without trainable parameters"
    LOSS_CALL = "a call without gradients of a module without parameters"
    MAYBE_EVALUATION = "the first call without gradients of a model in evaluation mode"
    EVALUATION = "a call of an evaluation, as earlier calls or steps show"
    RETURNED = "a call has returned"
    STEPPED = "the optimizer that ends steps has stepped"
    STEPPED_IN_BACKWARD = "the optimizer that ends steps has stepped inside of a backward pass"
    UNCLEAR = "one of several optimizers has stepped for the first time"
    UNCLEAR_IN_BACKWARD = "one of several has stepped for the first time inside of a backward pass"
    OTHER_STEPPED = "another optimizer has stepped"
    TOO_MANY_CALLS = "there were more than 1,000 calls"
    OTHER_MONITOR = "the script or a framework's callback has a `TrainingMonitor`"
    STOPPED = "`stop()` is called"
    FAILED = "flopwatch has raised an exception"


class Watcher:
    """Finds the optimizers and models of this process, and passes their steps to one monitor.

    Args:
        make_monitor: Creates the monitor when the first step has ended; None if none is wanted.
        on_failure: Is called with an exception of the watcher, which then stops; the training goes on.
        attention: The convention of the monitor's counts, for the first step.
    """

    def __init__(
        self,
        make_monitor: Callable[[], TrainingMonitor | None],
        on_failure: Callable[[Exception], None],
        attention: AttentionConvention = "full",
    ) -> None:
        self._make_monitor, self._on_failure = make_monitor, on_failure
        self._home = os.getpid(), threading.get_ident()
        self.state = Seen.NOTHING
        self.monitor: TrainingMonitor | None = None
        self.steps = 0
        """Steps of the training that have ended, whether measured or not."""
        self._optimizers = Optimizers()
        self._calls = TrainedCalls(self._optimizers)
        self._model = FoundModel(partial(self.run_hook, self._model_called))
        self._first = FirstStep(self, attention)
        self._handles = [register_optimizer_step_pre_hook(lambda *call: self.run_hook(self._optimizer_begins, *call))]

    def stop(self) -> None:
        """Remove all hooks and close the monitor."""
        self.run_hook(self.handle, Event.STOPPED)
        self._close()
        for handle in self._handles:
            handle.remove()

    def _close(self) -> None:
        self._first.stop()
        if self.monitor is not None:
            self.monitor.close()
        self._model.remove_hook()

    def handle(self, event: Event, *what: Any) -> None:
        """Handle an event as the table says. If the action causes a further event, that one decides the next state."""
        before = self.state
        row = TABLE.get((before, event))
        if row is not None:
            row.action(self, *what)
            self.state = row.becomes or before if self.state is before else self.state

    # --- Hooks: what happens becomes an event -------------------------------------------------------------------------

    def run_hook(self, hook: Callable[..., None], *args: Any) -> None:
        """Call a hook, except while code is compiled and in forked processes. If it fails, stop watching."""
        # This test comes first, because the compiler would compile again after a change of anything that it has read.
        if torch.compiler.is_compiling() or self.state is Seen.OFF or os.getpid() != self._home[0]:
            return
        try:
            hook(*args)
        except Exception as error:  # noqa: BLE001 - the border to the training: the watcher stops and reports it
            self.handle(Event.FAILED, error)

    def about_to_call(self) -> None:
        self._optimizers.forget_running()
        self.run_hook(self.handle, Event.CALL_COMES)

    def called(self, kind: CallKind, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.run_hook(self._called, kind, module, partial(batch_of_call, module, args, kwargs))

    def region_called(self, kind: CallKind) -> Callable[[Any], None] | None:
        self.run_hook(self._called, kind, None, None)
        return None if kind.has_grad else lambda output: self.returned(kind, output)

    def returned(self, kind: CallKind, output: Any) -> None:
        self.run_hook(self.handle, Event.RETURNED)

    def _called(self, kind: CallKind, module: nn.Module | None, batch: Batch | None) -> None:
        self.handle(self._event_of(kind, module), kind, module, batch)

    def _event_of(self, kind: CallKind, module: nn.Module | None) -> Event:
        if self.monitor is not None:
            found: list[bool] = []
            self._act("evaluation", lambda run: found.append(run.counter.is_evaluation(kind)))
            return Event.EVALUATION if found == [True] else Event.GRAD_CALL if kind.has_grad else Event.PLAIN_CALL
        if self.state is Seen.NOTHING and not has_optimizer():
            return Event.EARLY_CALL
        if kind.has_grad:
            return Event.EVALUATED_CALL if self._first.was_evaluated(kind, module) else Event.GRAD_CALL
        if not kind.has_parameters:
            return Event.PLAIN_CALL if module is None else Event.LOSS_CALL
        if module is None:  # the mode of compiled code is not seen
            return Event.MAYBE_EVALUATION
        if kind.is_training or not any(each.requires_grad for each in nn.Module.parameters(module)):
            return Event.PLAIN_CALL
        return Event.EVALUATION if module in self._first.evaluated.modules else Event.MAYBE_EVALUATION

    def _model_called(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A model that is or contains compiled code is called; calls of other modules are not seen then."""
        if threading.get_ident() == self._home[1] and torch.is_grad_enabled():
            self.handle(Event.CALL_COMES)
            self.handle(Event.GRAD_CALL, None, model, partial(batch_of_call, model, args, kwargs))

    def _optimizer_begins(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if threading.get_ident() != self._home[1]:
            return
        self._first.optimizer_begins(optimizer, args, kwargs)
        if self._optimizers.begins(optimizer):
            # This hook, and not one for all optimizers, ends steps: making a monitor adds hooks for all optimizers,
            # while torch would iterate over them.
            ended = optimizer.register_step_post_hook(lambda stepped, *_: self.run_hook(self._optimizer_ended, stepped))
            self._handles.append(ended)

    def _optimizer_ended(self, optimizer: Optimizer) -> None:
        if threading.get_ident() != self._home[1]:
            return
        self._first.optimizer_ended()
        if not self._optimizers.ends(optimizer):
            return
        if self._has_other_monitor():
            self.handle(Event.OTHER_MONITOR)
            return
        ends_step, is_in_backward = self._optimizers.stepped(optimizer), current_graph_task_id() != -1
        if ends_step is None:
            self.handle(Event.UNCLEAR_IN_BACKWARD if is_in_backward else Event.UNCLEAR)
        elif ends_step:
            self.handle(Event.STEPPED_IN_BACKWARD if is_in_backward else Event.STEPPED)
        else:
            self.handle(Event.OTHER_STEPPED)

    def _has_other_monitor(self) -> bool:
        """Whether the script has a monitor of its own; one that was forgotten may only wait for the collector."""
        ours = {self.monitor}
        return bool(set(open_monitors()) - ours) and gc.collect() >= 0 and bool(set(open_monitors()) - ours)

    # --- Actions ------------------------------------------------------------------------------------------------------

    def ignore(self, *_: Any) -> None:
        """Nothing."""

    def leave_out(self, *_: Any) -> None:
        """The calls so far belong to no step."""
        self._first.leave_out()

    def note_call(self, kind: CallKind, module: nn.Module | None, batch: Batch | None) -> None:
        """The call, and what runs from it on, belong to the first step."""
        if not self._first.note_call(module):
            self.handle(Event.TOO_MANY_CALLS)
        elif kind.has_grad and module is not None and batch is not None:
            self._first.note_batch(kind, self._calls.keep(kind, module, batch))

    def note_maybe_evaluation(self, kind: CallKind, module: nn.Module | None, batch: Batch | None) -> None:
        """The call is an evaluation, or that of a teacher in the first step. Its model is remembered."""
        self.note_call(kind, module, batch)
        self._first.evaluated.add(kind, module)

    def begin_first_anew(self, kind: CallKind, module: nn.Module | None, batch: Batch | None) -> None:
        """What ran before was an evaluation: the first step begins with this call."""
        self._first.leave_out(kept=None if module is None else 1)
        self.note_call(kind, module, batch)

    def note_return(self) -> None:
        """Notes when the evaluation, if it is one, ends."""
        self._first.evaluated.end()

    def give_up_first(self) -> None:
        """Stops counting the first step."""
        self._first.stop()
        self._calls.forget()

    def end_step(self) -> None:
        """Finds model and batches, and logs the step."""
        optimizer, is_first = self._optimizers.last, self.monitor is None
        if optimizer is None or not self._has_monitor():
            return
        assert self.monitor is not None
        reason = self._first.why_inexact(self._calls) if is_first else None
        if is_first:
            self._act("first_step", self._first.hand_over)
        self._find_model(optimizer)
        self._act("batches", partial(self._complete, is_first=is_first, reason=reason))
        number, self.steps = self.steps, self.steps + 1
        self.monitor.log_step(number, learning_rate=optimizer.param_groups[0].get("lr"))

    def _complete(self, run: MonitoredRun, *, is_first: bool, reason: str | None) -> None:
        """Add to the step what is known only now."""
        for reading in self._calls.take_kept():
            run.recorder.add_reading(reading)
        for batch in self._model.take_compiled_batches():
            run.take_micro_batch(batch, None)
        if is_first:
            self._first.note_times(run)
        if len(self._calls.names) > 1:
            names = ", ".join(dict.fromkeys(self._calls.names.values()))
            run.outlets.notify("warning", "several_models", SEVERAL_MODELS.format(models=names))
            run.recorder.drop_batches()
        reason = SKIPPED if self._calls.end_step() else reason
        if reason is not None:
            run.counter.call_inexact(reason)

    def drop_step(self, why: str = SEVERAL_OPTIMIZERS, *, finds_model: bool = False) -> None:
        """The step is not measured, as a notice says."""
        optimizer = self._optimizers.last
        if not self._has_monitor():
            return
        if finds_model and optimizer is not None:
            self._find_model(optimizer)
        self.give_up_first()
        self.steps = max(self.steps, 1)

        def drop(run: MonitoredRun) -> None:
            run.outlets.notify("info", "first_step", FIRST_STEP.format(why=why))
            run.recorder.abandon_step()
            # A dispatch mode that is entered in a backward pass is lost when that ends.
            (run.counter.await_step if current_graph_task_id() == -1 else run.counter.await_call)()

        self._act("step", drop)

    def begin_step(self) -> None:
        """What runs from now on belongs to the next step."""
        self._first.stop()
        self._act("step", lambda run: run.counter.await_step())

    def open_step(self, kind: CallKind | None, module: nn.Module, batch: Batch) -> None:
        """The clock of the step starts. With gradients, the call has a batch."""
        self._act("start_step", lambda run: run.tape.start_step())
        self.add_batch(kind, module, batch)

    def add_batch(self, kind: CallKind | None, module: nn.Module, batch: Batch) -> None:
        """The call has a batch, if it is of the first module with trained parameters that the step calls."""
        if self.monitor is not None and (kind is None or (kind.has_grad and self._calls.is_batch(kind, module))):
            self.monitor.micro_batch(batch())
        elif kind is not None and kind.has_grad:
            self._calls.keep(kind, module, batch)

    def leave_to_other(self) -> None:
        """That monitor measures the training from here on, as a message says."""
        if self.monitor is None:
            self._make_monitor()  # prints that flopwatch adds nothing
        else:
            self._act("notify", lambda run: run.outlets.notify("info", "own_monitor", OWN_MONITOR))
            self.handle(Event.STOPPED)
        self._close()

    def report_failure(self, error: Exception) -> None:
        """Says so; the training goes on."""
        self.state = Seen.OFF
        self._first.stop()
        self._on_failure(error)

    # --- The monitor --------------------------------------------------------------------------------------------------

    def _has_monitor(self) -> bool:
        if self.monitor is None:
            self.monitor = self._make_monitor()
            if self.monitor is None:
                self.handle(Event.OTHER_MONITOR)
                return False
            self.monitor.says_what_was_not_given(False)
            self._act("counter", lambda run: setattr(run.counter, "listener", self))
        return True

    def _find_model(self, optimizer: Optimizer) -> None:
        """Tell the monitor which model is trained, if it has changed."""
        if not (self._optimizers.has_changed or self._model.is_out_of_date()):
            return
        self._optimizers.has_changed = False
        self._calls.owners.clear()
        found = find_trained_modules(self._optimizers.parameters())
        if not found:
            text = NO_MODULE.format(optimizer=type(optimizer).__name__)
            self._act("notify", lambda run: run.outlets.notify("warning", "no_module", text))
            return
        assert self.monitor is not None
        self.monitor.set_model(found[0])
        self._model.set(found[0])

    def _act(self, part: str, action: Callable[[MonitoredRun], None]) -> None:
        if self.monitor is not None:
            act_on_run(self.monitor, part, action)


class Rule(NamedTuple):
    """What events do in these states. The action's docstring says it in words.

    Attributes:
        becomes: The next state; None if it stays.
        shown_by: A script of `testbeds/unchanged`, or a function in its `short.py`, in which this happens.
    """

    states: tuple[Seen, ...]
    events: tuple[Event, ...]
    action: Callable[..., None]
    becomes: Seen | None
    shown_by: str


NOTHING, EVALUATED, MAYBE, FIRST, TOO_MANY, BETWEEN, OPEN, ENDS, BEGINS, OFF = Seen
ANY = tuple(state for state in Seen if state is not OFF)
_CALLS = (Event.PLAIN_CALL, Event.LOSS_CALL, Event.MAYBE_EVALUATION, Event.EVALUATION)
_GRAD_CALLS = (Event.GRAD_CALL, Event.EVALUATED_CALL)
_no_call = partial(Watcher.drop_step, why=NO_CALL, finds_model=True)
_many_calls = partial(Watcher.drop_step, why=MANY_CALLS, finds_model=True)

ROWS = (
    # Before the first step is known to have begun
    Rule((NOTHING,), (Event.EARLY_CALL,), Watcher.leave_out, None, "calls_before_an_optimizer"),
    Rule((NOTHING,), (Event.PLAIN_CALL, Event.LOSS_CALL), Watcher.note_call, MAYBE, "frozen_teacher"),
    Rule((EVALUATED,), (Event.PLAIN_CALL,), Watcher.note_call, MAYBE, "evaluation_then_teacher"),
    Rule((MAYBE,), (Event.PLAIN_CALL, Event.LOSS_CALL), Watcher.note_call, None, "evaluation_then_teacher"),
    Rule(
        (NOTHING, EVALUATED, MAYBE), (Event.MAYBE_EVALUATION,), Watcher.note_maybe_evaluation, MAYBE, "teacher_student"
    ),
    Rule((MAYBE,), (Event.EVALUATION,), Watcher.leave_out, EVALUATED, "several_evaluations"),
    Rule((EVALUATED,), (Event.EVALUATION, Event.LOSS_CALL), Watcher.leave_out, None, "evaluation_then_teacher"),
    Rule((EVALUATED, MAYBE), (Event.RETURNED,), Watcher.note_return, None, "one_evaluation"),
    # The first step
    Rule((NOTHING, EVALUATED, MAYBE), (Event.GRAD_CALL,), Watcher.note_call, FIRST, "plain"),
    Rule((EVALUATED,), (Event.EVALUATED_CALL,), Watcher.note_call, FIRST, "several_evaluations"),
    Rule((MAYBE,), (Event.EVALUATED_CALL,), Watcher.begin_first_anew, FIRST, "one_evaluation"),
    Rule((FIRST,), (*_CALLS, *_GRAD_CALLS), Watcher.note_call, None, "accumulation"),
    Rule((MAYBE, FIRST), (Event.TOO_MANY_CALLS,), Watcher.give_up_first, TOO_MANY, "more_calls_than_a_step_has"),
    # The optimizer steps
    Rule((MAYBE, FIRST, BETWEEN, OPEN, ENDS), (Event.STEPPED,), Watcher.end_step, BETWEEN, "plain"),
    Rule((MAYBE, FIRST, BETWEEN, OPEN, ENDS), (Event.STEPPED_IN_BACKWARD,), Watcher.ignore, ENDS, "one_in_backward"),
    Rule((ENDS,), (Event.CALL_COMES,), Watcher.end_step, BETWEEN, "one_in_backward"),
    Rule((BEGINS,), (Event.CALL_COMES, Event.STEPPED), Watcher.begin_step, BETWEEN, "one_for_each_weight"),
    Rule((BEGINS,), (Event.STEPPED_IN_BACKWARD,), Watcher.ignore, None, "two_backward_passes"),
    Rule((NOTHING, EVALUATED), (Event.STEPPED,), _no_call, BETWEEN, "other_method"),
    Rule((NOTHING, EVALUATED), (Event.STEPPED_IN_BACKWARD,), _no_call, BEGINS, "in_backward_without_a_call"),
    Rule((TOO_MANY,), (Event.STEPPED,), _many_calls, BETWEEN, "more_calls_than_a_step_has"),
    Rule((TOO_MANY,), (Event.STEPPED_IN_BACKWARD,), _many_calls, BEGINS, "many_calls_and_in_backward"),
    Rule(ANY, (Event.UNCLEAR,), Watcher.drop_step, BETWEEN, "two_optimizers"),
    Rule(ANY, (Event.UNCLEAR_IN_BACKWARD,), Watcher.drop_step, BEGINS, "one_for_each_weight"),
    # Steps after the first
    Rule((BETWEEN,), (Event.GRAD_CALL, Event.PLAIN_CALL), Watcher.open_step, OPEN, "teacher_student"),
    Rule((OPEN,), (Event.GRAD_CALL,), Watcher.add_batch, None, "accumulation"),
    # The end
    Rule(ANY, (Event.OTHER_MONITOR,), Watcher.leave_to_other, OFF, "own_monitor"),
    Rule((ENDS,), (Event.STOPPED,), Watcher.end_step, OFF, "one_in_backward"),
    Rule(tuple(state for state in ANY if state is not ENDS), (Event.STOPPED,), Watcher.ignore, OFF, "plain"),
    Rule(ANY, (Event.FAILED,), Watcher.report_failure, OFF, "model_that_cannot_be_searched"),
    # Without an effect
    Rule((OPEN,), (Event.PLAIN_CALL,), Watcher.ignore, None, "evaluation_then_teacher"),
    Rule((BETWEEN, OPEN), (Event.EVALUATION,), Watcher.ignore, None, "evaluation"),
    Rule(ANY, (Event.OTHER_STEPPED,), Watcher.ignore, None, "gan"),
)
TABLE = {(state, event): row for row in ROWS for state in row.states for event in row.events}
