"""Monitors a training that contains no line of flopwatch, from hooks of torch that are documented for everybody.

A hook for all optimizers finds the first optimizer step and, with it, the model. From then on, a hook on the model
reads the batches with which the model is called, and a hook on the optimizer ends each step. The first step is not
measured, because the model is not known before it has ended.
"""

import inspect
import os
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import Optimizer
from torch.utils.hooks import RemovableHandle

from flopwatch.automatic.compiled_calls import note_call, take_calls
from flopwatch.automatic.trained_modules import find_trained_modules
from flopwatch.flops.tracing.replica import unwrap
from flopwatch.monitor.pricing.watched_step import may_compile
from flopwatch.monitor.training_monitor import TrainingMonitor, act_on_run, open_monitors
from flopwatch.torch_internals import compiled_call, recorded_operations

_MOST_STEPS_WITHOUT_END = 100
"""If the optimizer that ends steps pauses for so many steps of another one, the other one ends steps from then on."""

FIRST_STEP = (
    "the first optimizer step is not in the totals, because flopwatch finds the model when that step ends; steps count "
    "from 0, so the log begins with step 1"
)
NO_MODULE = (
    "the parameters of {optimizer} belong to no nn.Module (or gc.freeze() hides it), so there are no FLOPs and no "
    "tokens; use flopwatch.TrainingMonitor(flops_fn=...) in the script to pass the FLOPs of a step"
)
NOT_CALLED = (
    "{model} is trained, but its forward is not called in a way that hooks can see (another method, or a compiled "
    "function around it), so there are no FLOPs and no tokens; use flopwatch.TrainingMonitor in the script"
)
SEVERAL_MODELS = (
    "this training has several models ({models}). A step ends with {optimizer} and its FLOPs are those of all models, "
    "but which inputs are new samples is not known, so there are no tokens and samples"
)
EVALUATED = (
    "{model} is called in evaluation mode before or in every step; these calls are taken as evaluations and are in no "
    "step, but their result may be a part of the loss"
)
CALLED_WITHOUT_GRADIENTS = (
    "{model} is called in training mode without gradients before a step; these calls count as part of the step, but "
    "they may be an evaluation, before which model.eval() was not called"
)
WORK_BEFORE = (
    "tensors with gradients were computed after one step and before the first call of a module in the next one; this "
    "work is in no step"
)
OWN_MONITOR = "the script has created a flopwatch.TrainingMonitor of its own, which measures the training from here on"
REPLACED = (
    "a new {optimizer} trains {model}, which has replaced the earlier model; it is measured from step {step} on, "
    "because flopwatch finds it by its first steps"
)


class Watcher:
    """Finds the optimizers and models of this process, and passes their steps to one monitor.

    Args:
        make_monitor: Creates the monitor when the first optimizer step has ended; None if none is wanted.
        on_failure: Is called with an exception of the watcher, which then stops; the training goes on.
    """

    def __init__(
        self, make_monitor: Callable[[], TrainingMonitor | None], on_failure: Callable[[Exception], None]
    ) -> None:
        self._make_monitor = make_monitor
        self._on_failure = on_failure
        self._process, self._thread = os.getpid(), 0
        self._known: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._last: weakref.ref[Optimizer] | None = None
        """The optimizer whose step ends a step of the training."""
        self._steps_of_others = 0
        self._candidates: list[nn.Module] = []
        """Modules that are tried next if the current one is not called."""
        self._models: weakref.WeakKeyDictionary[nn.Module, RemovableHandle] = weakref.WeakKeyDictionary()
        """Models with a hook that begins a step."""
        self._model: weakref.ref[nn.Module] | None = None
        self._has_begun = self._has_trained_mode = self._is_open = self._drops_step = False
        self._has_evaluated = self._is_evaluation_timed = self._has_called_model = False
        self._evaluations_in_a_row = 0
        self._operations: int | None = None
        """How many operations autograd had recorded when the last step ended."""
        self._first_call: RemovableHandle | None = None
        """A hook for all modules that waits for the first call after a step; None while a step is open."""
        self._new_model: weakref.ref[nn.Module] | None = None
        self._calls_since_new = 0
        self._handles: list[RemovableHandle] = []
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
        self._is_off = True
        if self.monitor is not None:
            self.monitor.close()  # while the hooks exist: without them the model would seem to be changed
        self._stop_listening()

    def _stop_listening(self) -> None:
        # Hooks of optimizers stay, because torch raises if one is removed while it calls them.
        for handle in self._models.values():
            handle.remove()
        self._models.clear()
        self._stop_waiting()
        self._is_off = True

    def guarded(self, hook: Callable[..., None], *args: Any) -> None:
        """Call a hook, except while code is compiled and in forked processes. If it fails, stop watching."""
        if self._is_off or torch.compiler.is_compiling() or os.getpid() != self._process:
            return
        try:
            hook(*args)
        except Exception as error:
            self._stop_listening()
            self._on_failure(error)

    def optimizer_stepped(self, optimizer: Optimizer) -> None:
        """Take in an optimizer at its first step. Must be called from a hook for all optimizers."""
        if optimizer in self._known:
            return
        self._known.add(optimizer)
        is_first, self._has_begun = not self._has_begun, True
        if is_first:
            self._thread = threading.get_ident()
            self.monitor = self._make_monitor()
        if self.monitor is None or threading.get_ident() != self._thread:
            return
        self._last, self._steps_of_others = weakref.ref(optimizer), 0
        # This hook, and not the one for all optimizers, ends steps: the monitor removes hooks for all optimizers then,
        # while torch would iterate over them.
        ended = optimizer.register_step_post_hook(lambda stepped, *_: self.guarded(self._step_ended, stepped))
        self._handles.append(ended)
        found = find_trained_modules(parameter for group in optimizer.param_groups for parameter in group["params"])
        if is_first:
            self.monitor.says_what_was_not_given(False)
            self._notify("info", "first_step", FIRST_STEP)
            self.steps = 1
            self._take_candidates(found, optimizer)
        else:
            # An open step would end in the middle of the training's cycle. It is dropped at the next call of a model.
            self._drops_step = self._is_open
            self._meet_another(found, optimizer)
        self._operations = recorded_operations()
        self._wait_for_first_call()

    def _take_candidates(self, found: list[nn.Module], optimizer: Optimizer) -> None:
        if not found:
            self._notify("warning", "no_module", NO_MODULE.format(optimizer=type(optimizer).__name__))
            return
        parts = [set(map(id, module.modules())) for module in found]
        if all(id(inner) in parts[0] for inner in found):
            self._candidates = found[1:]
        else:
            for model in found:
                self._listen_to(model)
            self._say_several(found, optimizer)
        self._set_model(found[0])

    def _set_model(self, model: nn.Module) -> None:
        assert self.monitor is not None
        self._listen_to(model)  # before the monitor's own hook, which records calls of an open step
        self._model = weakref.ref(model)
        self._has_trained_mode = False
        self.monitor.set_model(model)

    def _listen_to(self, model: nn.Module) -> None:
        if model not in self._models:
            hook = _CallHook(self) if compiled_call(model) is None else note_call
            self._models[model] = model.register_forward_pre_hook(hook, with_kwargs=True)

    def _say_several(self, models: list[nn.Module], optimizer: Optimizer) -> None:
        names = ", ".join(dict.fromkeys(type(model).__name__ for model in models))
        message = SEVERAL_MODELS.format(models=names, optimizer=type(optimizer).__name__)
        self._notify("warning", "several_models", message)

    def _meet_another(self, found: list[nn.Module], optimizer: Optimizer) -> None:
        """Take in an optimizer that steps for the first time, after others: of the same model, or of another one."""
        current = self._model() if self._model is not None else None
        if current is None and self._model is not None and found:
            self._replace_model(found, optimizer, first_step=self.steps + 1)
        elif current is None or not found:
            self._take_candidates(found, optimizer)
        elif not any(module is current for module in found) and not _shares_parameters(found[0], current):
            self._new_model, self._calls_since_new = weakref.ref(found[0]), 0
            self._listen_to(current)
            self._listen_to(found[0])

    def _step_ended(self, optimizer: Optimizer) -> None:
        monitor = self.monitor
        if monitor is None or threading.get_ident() != self._thread:
            return
        if any(other is not monitor for other in open_monitors()):
            self._notify("info", "own_monitor", OWN_MONITOR)
            self._close()
            return
        last = self._last() if self._last is not None else None
        if optimizer is not last:
            self._steps_of_others += 1
            if last is not None and self._steps_of_others < _MOST_STEPS_WITHOUT_END:
                return
            self._last = weakref.ref(optimizer)
        self._steps_of_others = 0
        self._look_for_replacement(optimizer)
        self._take_compiled_calls()
        was_open, self._is_open = self._is_open, False
        self._has_called_model = False
        number, self.steps = self.steps, self.steps + 1
        if self._drops_step:
            self._drops_step = False
            act_on_run(monitor, "step", lambda run: run.abandon_step())
        elif was_open or not self._models:
            monitor.log_step(number, learning_rate=optimizer.param_groups[0].get("lr"))
        else:
            self._try_next_candidate()
        self._operations = recorded_operations()
        self._wait_for_first_call()

    def _take_compiled_calls(self) -> None:
        """Add the batches of a model that was compiled in place; when it was called is not known."""
        model = self._model() if self._model is not None else None
        if model is not None and self.monitor is not None and compiled_call(model) is not None:
            for _, args, kwargs in take_calls(model):
                self._is_open = True
                if len(self._models) == 1:
                    self.monitor.micro_batch(_batch_of(model, args, kwargs))

    def _wait_for_first_call(self) -> None:
        """Begin the next step with the first call of any module, such as a teacher that is called before the model.

        With `torch.compile` the step begins with the call of the model, because a hook for all modules would be
        compiled too.
        """
        if self._first_call is None and not self._is_open and self._models and not may_compile():
            self._first_call = register_module_forward_pre_hook(
                lambda module, args: self.guarded(self._any_module_called, module, args)
            )

    def _stop_waiting(self) -> None:
        if self._first_call is not None:
            self._first_call.remove()
            self._first_call = None

    def _any_module_called(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if threading.get_ident() == self._thread and not self._is_evaluation(module):
            self._stop_waiting()
            self._open_step(module, args)
        elif module in self._models:
            self._wait_after_call(module)

    def _wait_after_call(self, model: nn.Module) -> None:
        """Ignore the modules inside this call of a model, which is an evaluation."""

        def returned(*_: Any) -> None:
            handle.remove()
            self.guarded(self._evaluation_ended)

        if not may_compile():
            self._stop_waiting()
            handle = model.register_forward_hook(returned, always_call=True)

    def _evaluation_ended(self) -> None:
        """Add the time up to here to the evaluation. What follows, such as saving a checkpoint, is not a part of it."""
        assert self.monitor is not None
        self.monitor.spent_on("eval")
        self._is_evaluation_timed = True
        self._wait_for_first_call()

    def _is_evaluation(self, module: nn.Module) -> bool:
        """Whether this call of a model is an evaluation. It is not if the model is in training mode."""
        if module not in self._models:
            return False
        if module.training:
            self._has_trained_mode = True
            return False
        is_evaluation = self._has_trained_mode or not torch.is_grad_enabled()
        self._has_evaluated = self._has_evaluated or is_evaluation
        if is_evaluation and self._is_open and self._has_called_model:
            self._doubt(EVALUATED.format(model=self._model_name()))
        return is_evaluation

    def _open_step(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        assert self.monitor is not None
        if self._has_evaluated:
            self._has_evaluated = False
            self._evaluations_in_a_row += 1
            if not self._is_evaluation_timed:  # where code may be compiled, no hook shows when an evaluation ends
                self.monitor.spent_on("eval")
            self._is_evaluation_timed = False
            if self._evaluations_in_a_row > 1:
                self._doubt(EVALUATED.format(model=self._model_name()))
        else:
            self._evaluations_in_a_row = 0
            if self._operations != recorded_operations():
                self._doubt(WORK_BEFORE)
        self._is_open = True
        self.monitor.start_step()
        act_on_run(self.monitor, "start_step", lambda run: run.noter.enter(module, args))

    def _try_next_candidate(self) -> None:
        """The model was not called in this step: perhaps a part of it is called, or another module around it."""
        current = self._model() if self._model is not None else None
        for model in list(self._models):
            self._models.pop(model).remove()
        if self._candidates:
            self._set_model(self._candidates.pop(0))
        elif current is not None:
            self._notify("warning", "not_called", NOT_CALLED.format(model=type(current).__name__))

    def _look_for_replacement(self, optimizer: Optimizer) -> None:
        """If the first model is not called any more since an optimizer of another one steps, watch the other one."""
        new = self._new_model() if self._new_model is not None else None
        current = self._model() if self._model is not None else None
        self._new_model = None
        if new is None:
            return
        if self._calls_since_new and current is not None:
            self._say_several([current, new], optimizer)
            return
        if current is not None and current in self._models:
            self._models.pop(current).remove()
        self._models.pop(new).remove()  # so that its hook comes before the monitor's
        self._drops_step = True  # its calls were not those of the model that the monitor knew
        self._replace_model([new], optimizer, first_step=self.steps + 2)

    def _replace_model(self, found: list[nn.Module], optimizer: Optimizer, first_step: int) -> None:
        """Watch the models that this optimizer trains. Its first step was a step of the training, but not measured."""
        self.steps += 1
        name, model = type(optimizer).__name__, type(found[0]).__name__
        self._notify("info", "replaced", REPLACED.format(step=first_step, optimizer=name, model=model))
        self._take_candidates(found, optimizer)

    def model_called(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Begin a step, if none is open, and add the batch to it."""
        monitor = self.monitor
        if monitor is None or threading.get_ident() != self._thread:
            return
        if self._is_evaluation(model):
            if self._is_open and not self._has_called_model:
                # The step was opened by another module, which belongs to this evaluation.
                self._is_open = False
                act_on_run(monitor, "step", lambda run: run.abandon_step())
                self._wait_after_call(model)
            return
        self._calls_since_new += self._model is not None and model is self._model()
        if self._drops_step:
            self._drops_step = self._is_open = False
            act_on_run(monitor, "step", lambda run: run.abandon_step())
        if not self._is_open:
            self._stop_waiting()
            self._open_step(model, args)
        if not self._has_called_model and not torch.is_grad_enabled() and len(self._models) == 1:
            self._doubt(CALLED_WITHOUT_GRADIENTS.format(model=self._model_name()))
        self._has_called_model = True
        if len(self._models) == 1 and torch.is_grad_enabled():
            monitor.micro_batch(_batch_of(model, args, kwargs))

    def _model_name(self) -> str:
        model = self._model() if self._model is not None else None
        return "the model" if model is None else type(model).__name__

    def _doubt(self, reason: str) -> None:
        """Mark the rows from here on as not exact."""
        if self.monitor is not None:
            act_on_run(self.monitor, "doubt", lambda run: run.noter.doubt_calls(reason))

    def _notify(self, level: str, code: str, message: str) -> None:
        if self.monitor is not None:
            act_on_run(self.monitor, "notify", lambda run: run.outlets.notify(level, code, message))  # type: ignore[arg-type]


def _shares_parameters(a: nn.Module, b: nn.Module) -> bool:
    return not {id(p) for p in a.parameters()}.isdisjoint({id(p) for p in b.parameters()})


def _batch_of(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The arguments of a call as a batch. If some were passed by name, the batch has names for all."""
    if not args:
        return dict(kwargs)
    if not kwargs:
        return args[0] if len(args) == 1 else args
    return dict(inspect.signature(unwrap(model).forward).bind(*args, **kwargs).arguments)


class _CallHook:
    """The hook on a model. In a copy of the model the copied hook does nothing."""

    def __init__(self, watcher: Watcher | None) -> None:
        self._watcher = watcher

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._watcher is not None:
            self._watcher.guarded(self._watcher.model_called, module, args, kwargs)

    def __deepcopy__(self, memo: Any) -> "_CallHook":
        return _CallHook(None)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        # A method that does nothing, so that a saved model can be loaded where flopwatch is not installed.
        return getattr, (nullcontext(), "__exit__")
