"""Tells a run's clock when optimizers begin and end their step, by the hooks that torch offers for all optimizers."""

import weakref
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from flopwatch.monitor.step_clock import StepClock


class HasClock(Protocol):
    """A run; its clock may be replaced by another one."""

    step_clock: StepClock


class OptimizerHooks:
    """The hooks of one run. They do not keep the run alive, and they are constants for `torch.compile`."""

    def __init__(self, run: HasClock) -> None:
        self._run = weakref.ref(run)
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
        if (len(args) > 1 or kwargs) and any(callable(value) for value in (*args[1:], *kwargs.values())):
            return
        run = self._run()
        if run is not None:
            run.step_clock.optimizer_begins()

    def _ends(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return
        run = self._run()
        if run is not None:
            run.step_clock.optimizer_ends()
