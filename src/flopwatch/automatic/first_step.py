"""Counts the first step of a training, which begins before it is known that there is one."""

import warnings
import weakref
from typing import Any, cast

import torch
from torch import nn

from flopwatch.automatic.trained import TrainedCalls, share_parameters
from flopwatch.clock import monotonic_seconds
from flopwatch.flops.tracing import regions
from flopwatch.flops.tracing.live import LiveStep, is_capturing, may_compile, obstacle
from flopwatch.monitor.counting.batch_reader import Reading
from flopwatch.monitor.counting.call_kinds import CallKind
from flopwatch.monitor.counting.calls import CallListener, RootCalls
from flopwatch.monitor.run import MonitoredRun
from flopwatch.monitor.timing.tape import FIRST
from flopwatch.records.flops import AttentionConvention
from flopwatch.torch_internals.autograd import current_graph_task_id, recorded_operations
from flopwatch.torch_internals.ops import dispatch_mode_stack

_MOST_CALLS = 1000
_WARNING_OF_HOOKS = r"Using `torch.compile\(module\)` when there are global hooks"
"""Torch warns so if a compiled module is called while our hook for all modules exists."""
MAYBE_EVALUATED = (
    "before the first step, a module was called without gradients that the step does not train; whether that was an "
    "evaluation or belongs to the step is not known"
)


class FirstStep:
    """Records the calls of the first step, counts what it runs, and hands both over to the monitor.

    Attributes:
        evaluated: What may have been evaluated before the step.
    """

    def __init__(self, listener: CallListener, attention: AttentionConvention) -> None:
        self._attention = attention
        self._calls: RootCalls | None = RootCalls(listener)
        self._live: LiveStep | None = None
        self._nodes: int | None = None
        self._batches: list[int] = []
        """The numbers of the modules that the step has called with batches. The first one's are its micro-batches."""
        self.evaluated = _Evaluated()
        self._began: float | None = None
        self._ended = 0.0
        self._optimizer: tuple[Any, ...] | None = None
        """The optimizer step that is under way, with its arguments."""
        known = len(warnings.filters)
        warnings.filterwarnings("ignore", _WARNING_OF_HOOKS)
        self._filter = warnings.filters[0] if len(warnings.filters) > known else None
        self._calls.start()

    def note_call(self, module: nn.Module | None) -> bool:
        """Begin the step if it has not begun, and note a call. False if it has too many calls for one step."""
        if self._began is None:
            self._began, self._nodes = monotonic_seconds(), recorded_operations()
            self._begin_count()
        if module is None or self._calls is None:
            return True
        if self._live is not None:
            self._live.note_call()
        return len(self._calls.calls) <= _MOST_CALLS

    def _begin_count(self) -> None:
        is_unsuitable = dispatch_mode_stack() or torch.is_inference_mode_enabled() or is_capturing()
        if obstacle() is None and not is_unsuitable and not regions.state.is_calling:
            self._live = LiveStep(self._attention)
            if self._optimizer is not None:  # the call comes from the optimizer's closure
                self._live.enter_optimizer(*self._optimizer)

    def note_batch(self, kind: CallKind, batch: Reading | None) -> None:
        if batch is not None:
            self._batches.append(kind.module)
            if self._live is not None and kind.module == self._batches[0]:
                self._live.set_axes(batch.layout.axes)

    def leave_out(self, kept: int | None = 0) -> None:
        """Leave out what ran so far, except for this number of the newest calls; None keeps all calls."""
        if self.evaluated.began is None:
            self.evaluated.began = self._began
        self._began = None
        if self._live is not None:
            self._live.end()
            self._live = None
        if self._calls is not None and kept is not None:
            left_out = len(self._calls.calls) - kept
            del self._calls.calls[:left_out], self._calls.nodes[:left_out]

    def was_evaluated(self, kind: CallKind, module: nn.Module | None) -> bool:
        """Whether a model that is called was evaluated before, so that the step may begin only with this call."""
        if module is None:  # where the step is counted as it runs, the counter leaves out evaluations itself
            return self._live is None and kind.module in self.evaluated.regions
        return any(share_parameters(module, each) for each in self.evaluated.modules)

    def optimizer_begins(self, *call: Any) -> None:
        self._optimizer = call
        if self._live is not None:
            self._live.enter_optimizer(*call)

    def optimizer_ended(self) -> None:
        self._optimizer, self._ended = None, monotonic_seconds()
        if self._live is not None:
            self._live.leave_optimizer()

    def stop(self) -> None:
        """Give up the first step. Its count cannot be ended in a backward pass; then this must be called again."""
        if self._live is not None and current_graph_task_id() == -1:
            self._live.end()
            self._live = None
        if self._calls is not None:
            self._calls.stop()
            self._warn_again()
        self._calls = None

    def hand_over(self, run: MonitoredRun) -> None:
        live, calls, self._live, self._calls = self._live, self._calls, None, None
        if calls is not None:
            self._warn_again()
            run.counter.take_over(live, calls, self._nodes)

    def why_inexact(self, calls: TrainedCalls) -> str | None:
        is_unclear = self.evaluated.began is not None and any(map(calls.share_nothing_with, self.evaluated.modules))
        return MAYBE_EVALUATED if is_unclear else None

    def note_times(self, run: MonitoredRun) -> None:
        """Tell the run when its first step began, and how long an evaluation before it took."""
        if self.evaluated.began is not None:
            run.spent_before_first_step("eval", self.evaluated.ended - self.evaluated.began)
        if self._began is not None:
            micro_batches = self._batches.count(self._batches[0]) if self._batches else 0
            run.tape.add(FIRST, (self._ended - self._began, micro_batches))

    def _warn_again(self) -> None:
        if (
            self._filter in warnings.filters and not may_compile()
        ):  # in a process that compiles the hook stays, and so must the filter
            cast("list[Any]", warnings.filters).remove(self._filter)


class _Evaluated:
    """What may have been evaluated before the first step, and from when until when.

    Attributes:
        modules: Modules that were called without gradients, in evaluation mode.
        regions: Numbers of the models whose compiled code was called without gradients; their mode is not seen.
    """

    def __init__(self) -> None:
        self.modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.regions: set[int] = set()
        self.began: float | None = None
        self.ended = 0.0

    def add(self, kind: CallKind, module: nn.Module | None) -> None:
        if module is None:
            self.regions.add(kind.module)
        else:
            self.modules.add(module)
