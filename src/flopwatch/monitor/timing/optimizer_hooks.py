"""Records when optimizers begin and end their step, by the hooks that torch offers for all optimizers."""

import weakref
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from flopwatch.guard import Guard
from flopwatch.monitor.counting.step_counter import StepCounter
from flopwatch.monitor.timing.tape import Tape


class HasTape(Protocol):
    tape: Tape
    counter: StepCounter


class _Owned:
    """Tells the optimizers of a model from those of other models in the same process.

    Some libraries optimize copies of the parameters. An optimizer without any parameter of the model therefore counts
    as the model's until one with such parameters has been seen.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Any], bool]] = {}
        self._has_seen_own = False

    def has(self, model: torch.nn.Module | None, optimizer: Any) -> bool:
        if model is None:
            return True
        known = self._known.get(id(optimizer))
        if known is None or known[0]() is not optimizer:
            known = weakref.ref(optimizer), _shares_parameters(model, optimizer)
            self._known[id(optimizer)] = known
            self._has_seen_own |= known[1]
        return known[1] or not self._has_seen_own


def _shares_parameters(model: torch.nn.Module, optimizer: Any) -> bool:
    with Guard("optimizers"):  # an optimizer of the user may have groups of another form
        own = set(map(id, model.parameters()))
        return any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"])
    return True


class OptimizerHooks:
    """The hooks of one run. They do not keep the run alive, and they are constants for `torch.compile`."""

    def __init__(self, run: HasTape) -> None:
        self._run = weakref.ref(run)
        self._owned = _Owned()
        self._handles = [
            register_optimizer_step_pre_hook(self._begins),
            register_optimizer_step_post_hook(self._ends),
        ]
        weakref.finalize(run, self.remove).atexit = False  # a run can be forgotten without being closed

    def remove(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _begins(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # A closure runs forward and backward pass inside of the optimizer's step. Lightning's callback tells when they
        # are over; for other loops with a closure the optimizer's time is unknown.
        if torch.compiler.is_compiling():
            return
        run = self._run()
        if run is None:
            return
        run.counter.optimizer_begins(optimizer, args, kwargs)
        if (len(args) > 1 or kwargs) and any(callable(value) for value in (*args[1:], *kwargs.values())):
            run.tape.optimizer_is_untimed(id(optimizer))
        elif run.tape.times_parts:
            run.tape.optimizer_begins(id(optimizer), is_own=self._owned.has(run.counter.model, optimizer))

    def _ends(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return
        run = self._run()
        if run is None:
            return
        run.counter.optimizer_ends()
        if run.tape.times_parts or not run.tape.is_working:
            run.tape.optimizer_ends(id(optimizer), is_own=self._owned.has(run.counter.model, optimizer))
