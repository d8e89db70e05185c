"""Monitors a training that contains no line of flopwatch, from hooks of torch that are documented for everybody.

A step of the training ends when its optimizer has stepped; the next one begins there. What runs in between belongs to
the step, except evaluations: calls without gradients, of modules in evaluation mode, that come only now and then.

| what happens                                       | what is done                                      |
| -------------------------------------------------- | ------------------------------------------------- |
| a module is called, and an optimizer exists        | the first step begins, and is counted             |
| the only optimizer of the process steps            | the step ends                                     |
| one of several optimizers steps for the first time | it ends steps from now on, until a newer one does |
| an optimizer steps inside of a backward pass       | the step ends before the next call of a module    |
| a new optimizer steps, the earlier one is gone     | the step ends; its model may be another one       |
| the optimizer that ends steps pauses for 100 steps | the optimizer that steps ends steps from now on   |
"""

import gc
import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from flopwatch.automatic.first_step import FirstStep, UnclearBatches
from flopwatch.automatic.trained import Optimizers, exists, find_trained_modules, note_call, take_calls
from flopwatch.flops.tracing.live import may_compile
from flopwatch.monitor.pricing.batch_reader import Reading
from flopwatch.monitor.pricing.calls import CallKind, batch_of_call
from flopwatch.monitor.run import MonitoredRun
from flopwatch.monitor.training_monitor import TrainingMonitor, act_on_run, open_monitors
from flopwatch.records.flops import AttentionConvention
from flopwatch.torch_internals.autograd import current_graph_task_id
from flopwatch.torch_internals.modules import compiled_call

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
OWN_MONITOR = "the script has created a flopwatch.TrainingMonitor of its own, which measures the training from here on"


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
        self._process, self._thread = os.getpid(), threading.get_ident()
        self._unclear = UnclearBatches()
        self._first = FirstStep(self._unclear, attention)
        self._optimizers = Optimizers()
        self._depths: dict[int, int] = {}
        """How often an optimizer's `step` is under way, by the optimizer's id."""
        self._ends_at_next_call = self._begins_at_next_call = False
        self._is_timed = False
        """Whether the clock of the step that is open runs."""
        self._owners: dict[int, bool] = {}
        """By the number of a module, whether it has trained parameters."""
        self._called: dict[int, str] = {}
        """Modules with trained parameters that this step has called with gradients, by number."""
        self.calls_with_grad = 0
        self._usual_calls: Counter[int] = Counter()
        """How many steps have called trained modules how often."""
        self._model: weakref.ref[nn.Module] | None = None
        self._handles = [register_optimizer_step_pre_hook(lambda *call: self.guarded(self._optimizer_begins, *call))]
        self._model_hook: RemovableHandle | None = None
        self._is_off = False
        self.monitor: TrainingMonitor | None = None
        self.steps = 0
        """Steps of the training that have ended, whether measured or not."""

    def stop(self) -> None:
        """Remove all hooks and close the monitor."""
        self._close()
        for handle in self._handles:
            handle.remove()

    def _close(self) -> None:
        if self.monitor is not None and self._ends_at_next_call:
            self.guarded(self._end_pending)
        self._is_off = True
        self._first.stop()
        if self.monitor is not None:
            self.monitor.close()
        if self._model_hook is not None:
            self._model_hook.remove()

    def guarded(self, hook: Callable[..., None], *args: Any) -> None:
        """Call a hook, except while code is compiled and in forked processes. If it fails, stop watching."""
        if self._is_off or torch.compiler.is_compiling() or os.getpid() != self._process:
            return
        try:
            hook(*args)
        except Exception as error:
            self._is_off = True
            self._first.stop()
            self._on_failure(error)

    # --- Optimizers ---------------------------------------------------------------------------------------------------

    def _optimizer_begins(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if threading.get_ident() != self._thread:
            return
        self._first.optimizer_begins(optimizer, args, kwargs)
        self._depths[id(optimizer)] = self._depths.get(id(optimizer), 0) + 1
        if self._optimizers.is_new(optimizer):
            # This hook, and not one for all optimizers, ends steps: making a monitor adds hooks for all optimizers,
            # while torch would iterate over them.
            ended = optimizer.register_step_post_hook(lambda stepped, *_: self.guarded(self._optimizer_ended, stepped))
            self._handles.append(ended)

    def _optimizer_ended(self, optimizer: Optimizer) -> None:
        if threading.get_ident() != self._thread:
            return
        self._first.optimizer_ended()
        depth = self._depths.pop(id(optimizer), 1) - 1
        if depth > 0:  # `step` of its class has called that of the class above
            self._depths[id(optimizer)] = depth
            return
        if self._is_left_to_another():
            return
        ends_step = self._optimizers.stepped(optimizer)
        if ends_step is None:  # a step that is not measured, because other optimizers may belong to it
            self._begin_again(SEVERAL_OPTIMIZERS)
        elif ends_step and current_graph_task_id() != -1:
            self._ends_at_next_call = True
        elif ends_step:
            self._end_step(optimizer)

    def _is_left_to_another(self) -> bool:
        others = [monitor for monitor in open_monitors() if monitor is not self.monitor]
        if others:  # one that was forgotten may only wait for the garbage collector
            gc.collect()
            others = [monitor for monitor in open_monitors() if monitor is not self.monitor]
        if not others:
            return False
        self._notify("info", "own_monitor", OWN_MONITOR)
        if self.monitor is None:
            self._make_monitor()  # says that nothing is added
        self._close()
        return True

    def _begin_again(self, why: str) -> None:
        self._first.stop()
        if not self._has_monitor():
            return
        self.steps = max(self.steps, 1)
        self._notify("info", "first_step", FIRST_STEP.format(why=why))
        self._act("step", lambda run: run.recorder.abandon_step())
        self._is_timed = False
        self._called.clear()
        if current_graph_task_id() == -1:
            self._act("step", lambda run: run.counter.await_step())
        else:  # a dispatch mode that is entered in a backward pass is lost when that ends
            self._begins_at_next_call = True
            self._act("step", lambda run: run.counter.await_call())

    def _end_pending(self) -> None:
        optimizer = self._optimizers.last
        self._ends_at_next_call = False
        if optimizer is not None:
            self._end_step(optimizer)

    def _end_step(self, optimizer: Optimizer) -> None:
        is_first = self.monitor is None
        if not self._has_monitor():
            return
        assert self.monitor is not None
        if is_first and not self._first.has_begun:
            self._find_model(optimizer)
            self._begin_again(NO_CALL)
            return
        if is_first and self._first.has_given_up:
            self._find_model(optimizer)
            self._begin_again(MANY_CALLS)
            return
        if is_first:
            self._first.hand_over(self.monitor)
        self._find_model(optimizer)
        self._take_unclear()
        self._take_compiled_calls()
        if is_first:
            self._act("start_step", self._first.note_times)
        if len(self._called) > 1:
            names = ", ".join(dict.fromkeys(self._called.values()))
            self._notify("warning", "several_models", SEVERAL_MODELS.format(models=names))
            self._act("batches", lambda run: run.recorder.drop_batches())
        if self._has_skipped():
            self._act("step", lambda run: run.counter.doubt_step(SKIPPED))
        number, self.steps = self.steps, self.steps + 1
        self._is_timed = False
        self._called.clear()
        self.monitor.log_step(number, learning_rate=optimizer.param_groups[0].get("lr"))

    def _has_skipped(self) -> bool:
        """Whether the step is several: a GradScaler does not call the optimizer after an overflow."""
        calls, self.calls_with_grad = self.calls_with_grad, 0
        usual = self._usual_calls.most_common(1)[0][0] if self._usual_calls else 0
        self._usual_calls[calls] += bool(calls)
        return bool(usual and calls > usual and calls % usual == 0 and exists(torch.amp.GradScaler))

    def _has_monitor(self) -> bool:
        if self.monitor is None:
            self.monitor = self._make_monitor()
            if self.monitor is None:
                self._is_off = True
                self._first.stop()
                return False
            self.monitor.says_what_was_not_given(False)
            self._act("counter", self._listen)
        return True

    def _listen(self, run: MonitoredRun) -> None:
        run.counter.listener, run.counter.counts_without_model = self, True

    # --- Models and batches -------------------------------------------------------------------------------------------

    def _find_model(self, optimizer: Optimizer) -> None:
        """Tell the monitor which model is trained, if it has changed."""
        is_gone = self._model is not None and self._model() is None
        compiles_now = self._model is not None and self._model_hook is None and may_compile()
        if not (self._optimizers.has_changed or is_gone or compiles_now):
            return
        self._optimizers.has_changed = False
        self._owners.clear()
        found = find_trained_modules(self._optimizers.parameters())
        if not found:
            self._notify("warning", "no_module", NO_MODULE.format(optimizer=type(optimizer).__name__))
            return
        assert self.monitor is not None
        self._model = weakref.ref(found[0])
        self.monitor.set_model(found[0])
        if may_compile():
            if self._model_hook is not None:
                self._model_hook.remove()
            hook = _CallHook(self) if compiled_call(found[0]) is None else note_call
            self._model_hook = found[0].register_forward_pre_hook(hook, with_kwargs=True)

    def about_to_call(self) -> None:
        """A module is called, outside of other modules. A step that ended in a backward pass ends here."""
        self._depths.clear()  # an optimizer that has raised did not end
        if self._begins_at_next_call:
            self._begins_at_next_call = False
            self._first.stop()
            self._act("step", lambda run: run.counter.await_step())
        if self._ends_at_next_call:
            self.guarded(self._end_pending)

    def called(self, kind: CallKind, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.guarded(self._called_now, kind, module, args, kwargs)

    def _called_now(self, kind: CallKind, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        found: list[bool] = []
        self._act("evaluation", lambda run: found.append(run.counter.is_evaluation(kind)))
        if self.monitor is None or found == [True]:
            return
        if not self._is_timed:
            self._is_timed = True
            self._act("start_step", lambda run: run.tape.start_step())
        if kind.has_grad and self._is_of_first_trained(kind, module):
            self.monitor.micro_batch(batch_of_call(module, args, kwargs))
        elif kind.has_grad and not self._called:
            self._unclear.add(kind, module, args, kwargs)

    def _is_of_first_trained(self, kind: CallKind, module: nn.Module) -> bool:
        """Note a call with gradients; whether it is of the first module with trained parameters in the step."""
        if kind.module not in self._owners:
            trained = set(map(id, self._optimizers.parameters()))
            self._owners[kind.module] = any(id(p) in trained for p in module.parameters())
        if not self._owners[kind.module]:
            return False
        self.calls_with_grad += 1
        self._called[kind.module] = kind.name
        return len(self._called) == 1

    def _take_unclear(self) -> None:
        """Add the batches of modules whose optimizer has stepped for the first time."""
        for kind, module, reading in self._unclear.take():
            if module is not None and self._is_of_first_trained(kind, module):
                self._act("batches", partial(_add_reading, reading))

    def returned(self, kind: CallKind, output: Any) -> None:
        pass

    def region_called(self, kind: CallKind) -> None:
        pass

    def compiled_model_called(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A model that is or contains compiled code is called; calls of other modules are not seen then."""
        if self.monitor is None or threading.get_ident() != self._thread or not torch.is_grad_enabled():
            return
        if not self._is_timed:
            self._is_timed = True
            self._act("start_step", lambda run: run.tape.start_step())
        self.monitor.micro_batch(batch_of_call(model, args, kwargs))

    def _take_compiled_calls(self) -> None:
        """Add the batches of a model that was compiled in place; when it was called is not known."""
        model = self._model() if self._model is not None else None
        if model is not None and self.monitor is not None and compiled_call(model) is not None:
            for _, args, kwargs in take_calls(model):
                self.monitor.micro_batch(batch_of_call(model, args, kwargs))

    def _act(self, part: str, action: Callable[[MonitoredRun], None]) -> None:
        if self.monitor is not None:
            act_on_run(self.monitor, part, action)

    def _notify(self, level: str, code: str, message: str) -> None:
        self._act("notify", lambda run: run.outlets.notify(level, code, message))  # type: ignore[arg-type]


class _CallHook:
    """The hook on a model with compiled code. In a copy of the model the copied hook does nothing."""

    def __init__(self, watcher: Watcher | None) -> None:
        self._watcher = watcher

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._watcher is not None:
            self._watcher.guarded(self._watcher.compiled_model_called, module, args, kwargs)

    def __deepcopy__(self, memo: Any) -> "_CallHook":
        return _CallHook(None)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        # A method that does nothing, so that a saved model can be loaded where flopwatch is not installed.
        return getattr, (nullcontext(), "__exit__")


def _add_reading(reading: Reading, run: MonitoredRun) -> None:
    run.recorder.add_reading(reading)
