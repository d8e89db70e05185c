"""Counts all ops of a training step as it runs, inside and outside the model.

A dispatch mode counts each op and runs it unchanged. The user's code runs once, as always. A few ops compute other last
bits while a dispatch mode is active; when one is met, the mode is left before its backward pass, and no further step of
the training is counted.
"""

import os
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from threading import get_ident
from typing import Any

import torch

from flopwatch.flops.formulas.registry import tensors_in
from flopwatch.flops.tracing import regions
from flopwatch.flops.tracing.counter import Phase
from flopwatch.flops.tracing.kernels import watch_launches
from flopwatch.flops.tracing.live_mode import LATE_BACKWARD, PassingMode, by_scale, is_compiled_node
from flopwatch.flops.tracing.live_mode import StepCount as StepCount
from flopwatch.flops.tracing.regions import Region
from flopwatch.flops.tracing.scaling import Axes
from flopwatch.records.flops import AttentionConvention
from flopwatch.torch_internals import why_not_countable
from flopwatch.torch_internals.autograd import recorded_operations, requested_compilations, sequence_nr
from flopwatch.torch_internals.ops import TorchDispatchMode, dispatch_mode_stack

OUTSIDE = (
    "with torch before 2.10, only compiled code is counted in a process that compiles, and not what runs around it: "
    "a lower bound"
)


def may_compile() -> bool:
    """Whether torch has compiled a function in this process, or will do so because `torch.compile` was called.

    This runs several times in every step of a training.
    """
    if not _has_compiled:
        if not _requested and (found := requested_compilations()) is not None:
            _requested.append(found)
        # `torch.compiler.disable` stores None in the table.
        _has_compiled.extend(True for table in _requested if any(each is not None for each in table.values()))
    return bool(_has_compiled)


_requested: list[Mapping[Any, Any]] = []
"""Torch's table of requested compilations, once the compiler is loaded."""
_has_compiled: list[bool] = []
"""Not empty after a compilation was requested, because `torch.compiler.reset` clears torch's own table."""


def obstacle() -> str | None:
    return "steps cannot be counted as they run with this release of torch" if why_not_countable() else None


def is_capturing() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


_compiles_beside = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 10)
"""Whether a mode can ask the compiler to work as if the mode were not there (`ignore_compile_internals`).

Torch 2.9 can be asked too, but compiles again with a mode. To find this out by a compilation would take seconds.
"""


class LiveStep:
    """Counts one step, from the constructor to `end`. The parameters are the weights of the model."""

    def __init__(self, attention: AttentionConvention, parameters: Iterable[torch.Tensor] = ()) -> None:
        self._mode = PassingMode(attention, parameters, compiles=may_compile())
        self.enter_optimizer, self.leave_optimizer = self._mode.optimizer.enter, self._mode.optimizer.leave
        self.note_call = self._mode.note_call
        self.region_calls: list[SeenRegion] = []
        self._thread = get_ident()
        self._listener = regions.listen(self._region_is_called)
        clear_left_behind()
        self._sees_regions_only = may_compile() and not _compiles_beside
        # Torch never compiles a function that first runs under a mode, so that it must not try.
        is_eager = not _compiles_beside and not self._sees_regions_only
        self._stance = torch.compiler.set_stance("force_eager") if is_eager else None
        if self._stance is not None:
            self._stance.__enter__()
        self._below = dispatch_mode_stack()
        self._is_in_inference = torch.is_inference_mode_enabled()
        if not self._sees_regions_only:
            self._mode.__enter__()  # type: ignore[no-untyped-call]
        self._stop_watching = watch_launches(self._mode.add_kernel)
        _under_way.add(self)

    def set_paused(self, is_paused: bool) -> None:
        self._mode.is_paused = is_paused

    def set_axes(self, axes: Axes | None) -> None:
        self._mode.scales.axes = axes

    def _region_is_called(self, region: Region, args: tuple[Any, ...]) -> regions.Leave | None:
        """Count a call of compiled code, and nothing of what runs in it."""
        if self._listener is not None:
            self._listener(region, args)
        mode = self._mode
        if mode.is_over or mode.is_paused or mode.compiled.under_way or get_ident() != self._thread:
            return None
        seen = SeenRegion(
            region,
            region.sizes(args),
            torch.is_grad_enabled(),
            mode.phase(),
            mode.scales.axes,
            mode.optimizer.is_running,
        )
        # Another mode may take products from what was saved (selective checkpointing).
        seen.may_skip = seen.phase == "recompute" and any(each is not mode for each in dispatch_mode_stack())
        self.region_calls.append(seen)
        mode.has_grad_begun |= seen.has_grad
        mode.compiled.under_way += 1
        first_own = recorded_operations() or 0

        def leave(out: Any) -> None:
            mode.compiled.under_way -= 1
            node = _compiled_node(out, first_own)
            if node is not None:
                mode.compiled.nodes.add(sequence_nr(node))
                node.register_prehook(seen.note_backward)

        return leave

    def end(self, axes: Axes | None = None) -> StepCount:
        """End the count, even if the training has entered or exited dispatch modes in the meantime.

        `axes` is the shape of the step's micro-batches, if it was not known when they ran.
        """
        mode = self._mode
        left_because = self._stop()
        for seen in self.region_calls:
            seen.is_over = True
        if may_compile() and not _compiles_beside and not self._sees_regions_only:
            left_because = left_because or "torch.compile was called in the step"
        missed = OUTSIDE if self._sees_regions_only else regions.state.missed if may_compile() else None
        count = mode.counted()
        return replace(
            count,
            by_scale=by_scale(mode.scales.flops, axes),
            failure=count.failure or left_because,
            doubt=count.doubt or missed,
        )

    def _stop(self) -> str | None:
        _under_way.discard(self)
        saw_all = self._stop_watching() or may_compile()  # the compiler imports Triton for itself
        regions.listen(self._listener)
        self._mode.is_over = True
        if self._stance is not None:
            self._stance.__exit__(None, None, None)
        if self._mode.has_left or self._sees_regions_only:
            return None
        if torch.is_inference_mode_enabled() and not self._is_in_inference:
            _left_behind.append(self._mode)
            return "the count ended in inference mode"
        return _leave(self._mode, self._below) or (None if saw_all else "Triton was imported in the step")


_under_way: "weakref.WeakSet[LiveStep]" = weakref.WeakSet()

# A forked process, such as a worker of a data loader, ends the counts whose mode it has inherited.
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=lambda: [step._stop() for step in list(_under_way)])

_left_behind: list[Any] = []
"""Our finished dispatch modes that lie below the training's modes on torch's stack; removed once they are on top.

A mode is not exited in an inference mode that began later: when that ends, torch restores its dispatch keys from
before, and looks for a mode that is not there.
"""


def clear_left_behind() -> None:
    while _left_behind and not torch.is_inference_mode_enabled() and dispatch_mode_stack()[-1:] == _left_behind[-1:]:
        _left_behind.pop().__exit__(None, None, None)


def _leave(mode: Any, below: Sequence[Any]) -> str | None:
    """Exit the dispatch mode; return why the count is not complete, or None.

    Exiting any mode pops the top of torch's stack, so a training that exits an older mode in the step pops ours.
    """
    now = dispatch_mode_stack()
    if now and now[-1] is mode:
        mode.__exit__(None, None, None)
        clear_left_behind()
        return None
    if mode in now:
        _left_behind.append(mode)
        return "another dispatch mode began in the step and has not ended"
    if now and now == below[: len(now)]:
        # The training has left `now[-1]`, but torch has popped ours instead. Each exit pops the top of the stack and
        # sets torch's flags as they were when that mode began, so a new mode keeps the flags as they are now.
        keeper = TorchDispatchMode()
        keeper.__enter__()
        mode.__exit__(None, None, None)
        keeper.__exit__(None, None, None)
    return "another dispatch mode ended in the step"


@dataclass(eq=False)
class SeenRegion:
    """A call of compiled code in a counted step.

    Attributes:
        phase: When it ran: in the forward pass, or again in the backward pass.
        backwards: How often its backward pass ran.
        may_skip: Whether not all of its products may have run.
    """

    region: Region
    sizes: tuple[int, ...]
    has_grad: bool
    phase: Phase
    axes: Axes | None
    is_in_optimizer: bool
    backwards: int = 0
    is_over: bool = False
    may_skip: bool = False

    def note_backward(self, *_: Any) -> None:
        self.backwards += 1
        if self.is_over:
            regions.state.missed = LATE_BACKWARD


_DEEPEST_NODE = 3


def _compiled_node(out: Any, first_own: int) -> Any:
    """The node of autograd that runs the backward pass of a compiled function, by its results; None if it has none.

    Nodes with smaller numbers than `first_own`, the first that the call has made, belong to other calls.
    """
    nodes: list[Any] = [leaf.grad_fn for leaf in tensors_in(out)]
    for _ in range(_DEEPEST_NODE):  # results that are views of others have a node more
        nodes = [node for node in nodes if node is not None and sequence_nr(node) >= first_own]
        found = next((node for node in nodes if is_compiled_node(node)), None)
        if found is not None or not nodes:
            return found
        nodes = [each for node in nodes for each, _ in node.next_functions]
    return None
