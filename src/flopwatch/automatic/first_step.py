"""Counts the first step of a training, which begins before it is known that there is one."""

import warnings
import weakref
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, cast

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from flopwatch.automatic.trained import has_optimizer
from flopwatch.flops.tracing import regions
from flopwatch.flops.tracing.live import LiveStep, is_capturing, may_compile, obstacle
from flopwatch.monitor.pricing.batch_reader import BatchReader, Reading
from flopwatch.monitor.pricing.calls import CallKind, RootCalls, batch_of_call
from flopwatch.monitor.training_monitor import TrainingMonitor, act_on_run
from flopwatch.records.flops import AttentionConvention
from flopwatch.torch_internals.autograd import current_graph_task_id, recorded_operations
from flopwatch.torch_internals.ops import dispatch_mode_stack

_MOST_FIRST_CALLS = 1000
_WARNING_OF_HOOKS = r"Using `torch.compile\(module\)` when there are global hooks"
"""The calls of a module from `torch.compile` warn of our hook for all modules."""


class FirstStep:
    """Counts the first step.

    It begins with the first call of a module after an optimizer was made, and belongs to the monitor when that
    optimizer has stepped.
    """

    def __init__(self, unclear: "UnclearBatches", attention: AttentionConvention) -> None:
        self._unclear, self._attention = unclear, attention
        self._calls: RootCalls | None = RootCalls(self)
        self._live: LiveStep | None = None
        self._nodes: int | None = None
        self.has_begun = False
        self._main: int | None = None
        """The number of the first module that the step calls with gradients, whose batches are micro-batches."""
        self._optimizer: tuple[Any, ...] | None = None
        """The optimizer step that is under way, with its arguments."""
        before = list(warnings.filters)
        warnings.filterwarnings("ignore", _WARNING_OF_HOOKS)
        self._filter = next((each for each in warnings.filters if each not in before), None)
        self._calls.start()

    def about_to_call(self) -> None:
        if not self.has_begun and self._calls is not None and has_optimizer():
            self.has_begun = True
            self._calls.take()
            self._nodes = recorded_operations()
            is_apart = dispatch_mode_stack() or torch.is_inference_mode_enabled() or is_capturing()
            if obstacle() is None and not is_apart and not regions.state.is_calling:
                self._live = LiveStep(self._attention)
                if self._optimizer is not None:  # the call comes from its closure
                    self._live.enter_optimizer(*self._optimizer)

    def called(self, kind: CallKind, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if self._live is not None:
            self._live.note_call()
        if self._calls is not None and len(self._calls.calls) > _MOST_FIRST_CALLS:
            self.stop()  # a program that has an optimizer, but does not train
        elif self.has_begun and kind.has_grad:
            reading = self._unclear.add(kind, module, args, kwargs)
            if self._live is not None and reading is not None:
                self._main = kind.module if self._main is None else self._main
                if kind.module == self._main:
                    self._live.set_axes(reading.plan.axes)

    def returned(self, kind: CallKind, output: Any) -> None:
        pass

    def region_called(self, has_grad: bool) -> None:
        pass

    def optimizer_begins(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._optimizer = optimizer, args, kwargs
        if self._live is not None:
            self._live.enter_optimizer(optimizer, args, kwargs)

    def optimizer_ended(self) -> None:
        self._optimizer = None
        if self._live is not None:
            self._live.leave_optimizer()

    def stop(self) -> None:
        """Give up the first step. A mode can only be left outside of a backward pass, so that this is called again."""
        if self._live is not None and current_graph_task_id() == -1:
            self._live.end()
            self._live = None
        if self._calls is not None:
            self._calls.stop()
            self._warn_again()
        self._calls = None
        self._unclear.take()

    def hand_over(self, monitor: TrainingMonitor) -> None:
        """Give the first step to the monitor, which logs it."""
        live, calls, nodes = self._live, self._calls, self._nodes
        self._live = self._calls = None
        if calls is None:
            return
        self._warn_again()
        act_on_run(monitor, "first_step", lambda run: run.counter.adopt(live, calls, nodes))

    def _warn_again(self) -> None:
        if self._filter in warnings.filters and not may_compile():  # otherwise the hook stays
            cast("list[Any]", warnings.filters).remove(self._filter)


class UnclearBatches:
    """The sizes of batches whose module may be trained by an optimizer that has not stepped so far."""

    def __init__(self) -> None:
        self._reader = BatchReader()
        self._read: list[tuple[CallKind, weakref.ref[nn.Module], Reading]] = []

    def add(
        self, kind: CallKind, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Reading | None:
        if kind.has_parameters and len(self._read) < _MOST_FIRST_CALLS:
            with suppress(Exception):  # the monitor reports it when it reads the batch of the next step
                reading, _ = self._reader.read_checked(batch_of_call(module, args, kwargs))
                self._read.append((kind, weakref.ref(module), reading))
                return reading
        return None

    def take(self) -> list[tuple[CallKind, nn.Module | None, Reading]]:
        read, self._read = self._read, []
        return [(kind, module(), reading) for kind, module, reading in read]
