"""Counts the first step of a training, which begins before it is known that there is one."""

import warnings
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, cast

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from flopwatch.automatic.trained import has_optimizer
from flopwatch.clock import monotonic_seconds
from flopwatch.flops.tracing import regions
from flopwatch.flops.tracing.live import LiveStep, is_capturing, may_compile, obstacle
from flopwatch.monitor.pricing.batch_reader import BatchReader, Reading
from flopwatch.monitor.pricing.calls import CallKind, RootCalls, batch_of_call
from flopwatch.monitor.run import MonitoredRun
from flopwatch.monitor.timing.tape import FIRST
from flopwatch.monitor.training_monitor import TrainingMonitor, act_on_run
from flopwatch.records.flops import AttentionConvention
from flopwatch.torch_internals.autograd import current_graph_task_id, recorded_operations
from flopwatch.torch_internals.ops import dispatch_mode_stack

_MOST_FIRST_CALLS = 1000
_WARNING_OF_HOOKS = r"Using `torch.compile\(module\)` when there are global hooks"
"""The calls of a module from `torch.compile` warn of our hook for all modules."""
MAYBE_EVALUATED = (
    "before the first step, a module was called without gradients that the step does not train; whether that was an "
    "evaluation or belongs to the step is not known"
)


class FirstStep:
    """Counts the first step.

    It begins with the first call of a module after an optimizer was made, and belongs to the monitor when that
    optimizer has stepped. Calls before it that evaluate the model belong to no step.

    Attributes:
        has_begun: Whether the step has begun.
        has_given_up: Whether so many modules were called in it that it is none.
    """

    def __init__(self, unclear: "UnclearBatches", attention: AttentionConvention) -> None:
        self._unclear, self._attention = unclear, attention
        self._calls: RootCalls | None = RootCalls(self)
        self._live: LiveStep | None = None
        self._nodes: int | None = None
        self.has_begun = self.has_given_up = False
        self._main: int | None = None
        """The number of the first module that the step calls with gradients, whose batches are micro-batches."""
        self._micro_batches = 0
        self._is_sure = False
        """Whether a call with gradients has shown that the step has begun."""
        self._maybe_evaluated: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        """Modules that were called without gradients, in evaluation mode, before the first call with gradients."""
        self._regions_evaluated: set[int] = set()
        """The same for compiled code, whose module and mode are not seen: numbers of the models that it belongs to."""
        self._evaluation_began: float | None = None
        self._evaluation_ended = self._began = self._ended = 0.0
        self._optimizer: tuple[Any, ...] | None = None
        """The optimizer step that is under way, with its arguments."""
        before = list(warnings.filters)
        warnings.filterwarnings("ignore", _WARNING_OF_HOOKS)
        self._filter = next((each for each in warnings.filters if each not in before), None)
        self._calls.start()

    def about_to_call(self) -> None:
        pass

    def called(self, kind: CallKind, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if self._calls is None:
            return
        if not self.has_begun and not has_optimizer():
            self._calls.take()
            return
        if kind.has_grad:
            self._take_out_evaluation(module)
        elif self._is_evaluation(kind, module):
            self._drop_calls()
            self._calls.take()
            return
        if not self.has_begun:
            self._begin()
        if self._live is not None:
            self._live.note_call()
        if len(self._calls.calls) > _MOST_FIRST_CALLS:
            self.has_given_up = True  # a program that has an optimizer, but does not train
            self.stop()
        elif kind.has_grad:
            self._take_batch(kind, module, args, kwargs)

    def _is_evaluation(self, kind: CallKind, module: nn.Module) -> bool:
        """Whether a call without gradients is an evaluation: of a model that was called so before, or its loss."""
        if self._is_sure:
            return False
        if not kind.has_parameters:
            return not self.has_begun and self._evaluation_began is not None
        if kind.is_training or not any(each.requires_grad for each in nn.Module.parameters(module)):
            return False
        if module in self._maybe_evaluated:
            return True
        self._maybe_evaluated.add(module)  # the first time, it may be a teacher, with which the step begins
        return False

    def _take_out_evaluation(self, module: nn.Module) -> None:
        """At the first call with gradients: if its model was evaluated before, the step begins only now."""
        if self._is_sure:
            return
        self._is_sure = True
        own = set(map(id, nn.Module.parameters(module)))
        if any(not own.isdisjoint(map(id, nn.Module.parameters(each))) for each in self._maybe_evaluated):
            self._drop_calls()

    def _drop_calls(self) -> None:
        """The calls so far were an evaluation and no part of the step."""
        if not self.has_begun:
            return
        self._begin_later()
        if self._live is not None:
            self._live.end()
            self._live = None
        if self._calls is not None:
            del self._calls.calls[:-1], self._calls.nodes[:-1]

    def _begin_later(self) -> None:
        """What ran since the step seemed to begin was an evaluation."""
        self.has_begun = False
        if self._evaluation_began is None:
            self._evaluation_began = self._began

    def _begin(self) -> None:
        self.has_begun = True
        self._began = monotonic_seconds()
        self._nodes = recorded_operations()
        is_apart = dispatch_mode_stack() or torch.is_inference_mode_enabled() or is_capturing()
        if obstacle() is None and not is_apart and not regions.state.is_calling:
            self._live = LiveStep(self._attention)
            if self._optimizer is not None:  # the call comes from its closure
                self._live.enter_optimizer(*self._optimizer)

    def _take_batch(self, kind: CallKind, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        reading = self._unclear.add(kind, module, args, kwargs)
        if reading is None:
            return
        self._main = kind.module if self._main is None else self._main
        if kind.module == self._main:
            self._micro_batches += 1
            if self._live is not None:
                self._live.set_axes(reading.plan.axes)

    def returned(self, kind: CallKind, output: Any) -> None:
        if not self._is_sure:
            self._evaluation_ended = monotonic_seconds()

    def region_called(self, kind: CallKind) -> Callable[[Any], None] | None:
        if self._calls is None:
            return None
        if not self.has_begun and not has_optimizer():
            self._calls.take()
            return None
        if kind.has_grad and not self._is_sure:
            self._is_sure = True
            if self.has_begun and self._live is None and kind.module in self._regions_evaluated:
                self._begin_later()  # the calls are kept for a teacher among them; `Evaluations` leaves out the others
        if not self.has_begun:
            self._begin()
        if self._is_sure or not kind.has_parameters:
            return None
        self._regions_evaluated.add(kind.module)
        return self._region_returned

    def _region_returned(self, output: Any) -> None:
        self._evaluation_ended = monotonic_seconds()

    def optimizer_begins(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._optimizer = optimizer, args, kwargs
        if self._live is not None:
            self._live.enter_optimizer(optimizer, args, kwargs)

    def optimizer_ended(self) -> None:
        self._optimizer, self._ended = None, monotonic_seconds()
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
        has_evaluated = self._evaluation_began is not None
        if has_evaluated and any(self._unclear.has_no_part_of(module) for module in self._maybe_evaluated):
            act_on_run(monitor, "first_step", lambda run: run.counter.doubt_step(MAYBE_EVALUATED))

    def note_times(self, run: MonitoredRun) -> None:
        """Tell the run when its first step began, and how long an evaluation before it took."""
        if self._evaluation_began is not None:
            run.spent_before_first_step("eval", self._evaluation_ended - self._evaluation_began)
        run.tape.add(FIRST, (self._ended - self._began, self._micro_batches))

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

    def has_no_part_of(self, module: nn.Module) -> bool:
        """Whether a module shares no parameters with those whose batches were read."""
        own = set(map(id, nn.Module.parameters(module)))
        known = [each for _, read, _ in self._read if (each := read()) is not None]
        return all(own.isdisjoint(map(id, nn.Module.parameters(each))) for each in known)

    def take(self) -> list[tuple[CallKind, nn.Module | None, Reading]]:
        read, self._read = self._read, []
        return [(kind, module(), reading) for kind, module, reading in read]
