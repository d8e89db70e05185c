"""Counts all ops of a training step as it runs, inside and outside the model.

A dispatch mode counts each op and runs it unchanged. It is active for a few steps of a run, but never around compiled
code (a function that first runs under a mode is not compiled afterwards, pytorch issue 140909) or while a CUDA graph
is captured.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from flopwatch.flops.formulas import OpCall, OpFlops, bind, find_formula
from flopwatch.flops.formulas.free_ops import costs_nothing, may_differ_under_a_mode
from flopwatch.flops.tracing.counter import METADATA_OPS, CountingMode
from flopwatch.flops.tracing.replica import ModuleStack
from flopwatch.flops.tracing.tally import Phase
from flopwatch.flops.tree import tensors_in
from flopwatch.records.flops import AttentionConvention, PhaseFlops
from flopwatch.records.reading import first_line
from flopwatch.torch_internals import (
    OpOverload,
    can_decompose,
    current_graph_task_id,
    dispatch_mode_stack,
    has_kernel,
    input_metadata,
    op_name,
    requested_compilations,
    runs_forward_again,
    sees_dispatch_modes,
    sees_graph_tasks,
    sequence_nr,
    short_op_name,
)

_FIRST = frozenset((1, 3, 5, 8, 10, 12, 15, 18, 22, 28, 31, 34, 36, 39, 45, 47))
_LAST_FIRST = max(_FIRST)
_RANKS_BEGIN = (32, 256)
_WHOLE = frozenset(
    (
        *("bilinear", "corrcoef", "cov", "einsum", "gru", "gru_cell", "inner", "istft", "linalg_multi_dot", "lstm"),
        *("lstm_cell", "rnn_relu", "rnn_relu_cell", "rnn_tanh", "rnn_tanh_cell", "stft", "tensordot"),
        "upsample_bicubic2d",
    )
)
"""Ops whose result changes in the last bits if they are decomposed under a dispatch mode."""
_KNUTH = 2_654_435_761
_LOOK_AHEAD = 64


@dataclass(frozen=True, slots=True)
class StepCount:
    """FLOPs of one step, counted op by op as it ran.

    Attributes:
        phases: FLOPs by phase.
        by_dtype: FLOPs by compute type.
        uncounted: Names of ops without a formula.
        failure: Why the count is not complete; None if it is.
        optimizer: FLOPs of matrix products in the optimizer; not part of the other fields.
        risks: Names of ops whose result may change in the last bits while steps are counted.
        doubt: Why it is not certain which ops are recomputation, so that model FLOPs may be wrong; otherwise None.
    """

    phases: PhaseFlops
    by_dtype: Mapping[str, PhaseFlops] = field(default_factory=dict)
    uncounted: tuple[str, ...] = ()
    failure: str | None = None
    optimizer: int = 0
    risks: tuple[str, ...] = ()
    doubt: str | None = None


def is_watched(index: int) -> bool:
    """Whether the step with this index in its session is counted as it runs.

    The first counted steps are chosen to find work early that is done only every n-th step: for every n up to 12, their
    indices have all remainders modulo n, except that 2 is missing for n = 7, 11 and 12. Later steps are chosen by
    Knuth's multiplicative hash: one in 128, and after 1,000 steps one in 2,048.

    >>> [index for index in range(60) if is_watched(index)][:6]
    [1, 3, 5, 8, 10, 12]
    """
    drawn = index * _KNUTH % 2**32
    return index in _FIRST or (index > _LAST_FIRST and drawn < (2**25 if index < 1_000 else 2**21))


def is_watched_by_ranks(index: int) -> bool:
    """Whether the step with this index is counted in a training of several ranks.

    All ranks count the same steps, because counting slows a step down and all ranks wait for the slowest. Counting
    begins at step 33, and again at step 257 for ranks that receive the FLOP formulas late.

    >>> [index for index in range(60) if is_watched_by_ranks(index)][:6]
    [33, 35, 37, 40, 42, 44]
    """
    late = max(_RANKS_BEGIN)
    return any(index - begin in _FIRST for begin in _RANKS_BEGIN) or (index > late + _LAST_FIRST and is_watched(index))


def next_watched(index: int, is_turn: Callable[[int], bool] = is_watched) -> int:
    """Return the index of the next counted step from `index` on, or `index + 64` if the next 64 steps have none.

    >>> next_watched(13)
    15
    """
    return next((later for later in range(index, index + _LOOK_AHEAD) if is_turn(later)), index + _LOOK_AHEAD)


def may_compile() -> bool:
    """Whether torch has compiled a function in this process, or will do so because `torch.compile` was called."""
    if not _has_compiled:
        # `torch.compiler.disable` stores None in the table.
        if all(backend is None for backend in (requested_compilations() or {}).values()):
            return False
        _has_compiled.append(True)
    return True


_has_compiled: list[bool] = []
"""Not empty after a compilation was requested, because `torch.compiler.reset` clears torch's own table."""


def obstacle() -> str | None:
    """Why the current step cannot be counted as it runs; None if it can."""
    if may_compile():
        return "this process uses torch.compile, which would stop compiling if a step were counted as it runs"
    if not sees_dispatch_modes() or not sees_graph_tasks():
        return "steps cannot be counted as they run with this release of torch"
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return "steps cannot be counted as they run while a CUDA graph is captured"
    return None


class WatchedStep:
    """Counts one step, from the constructor to `end`."""

    def __init__(self, attention: AttentionConvention) -> None:
        self._mode = _PassingMode(attention)
        clear_left_behind()
        self._stance = torch.compiler.set_stance("force_eager")
        self._stance.__enter__()
        self._hooks = (
            register_optimizer_step_pre_hook(self._mode.enter_optimizer),
            register_optimizer_step_post_hook(self._mode.leave_optimizer),
        )
        self._below = _modes_now()
        self._mode.__enter__()  # type: ignore[no-untyped-call]

    def set_paused(self, is_paused: bool) -> None:
        """Pause or resume the count. Evaluations and flopwatch's own runs of the model are not part of the step."""
        self._mode.is_paused = is_paused

    def end(self) -> StepCount:
        """End the count, even if the training has entered or exited dispatch modes in the meantime."""
        self._mode.is_over = True
        self._stance.__exit__(None, None, None)
        for hook in self._hooks:
            hook.remove()
        left_because = self._leave()
        failure = self._mode.failure or left_because
        count = self._mode.tally.as_count("step", "full")
        phases = PhaseFlops(count.forward_flops, count.backward_flops, count.recompute_flops)
        uncounted = tuple(sorted({op.op for op in count.uncounted}))
        mode = self._mode
        return StepCount(
            phases, count.by_dtype, uncounted, failure, mode.optimizer_flops, tuple(mode.risky_ops), mode.doubt
        )

    def _leave(self) -> str | None:
        """Exit the dispatch mode; return why the count is not complete, or None.

        Exiting any mode pops the top of torch's stack, so a training that exits an older mode in the step pops ours.
        """
        now = _modes_now()
        if now and now[-1] is self._mode:
            self._mode.__exit__(None, None, None)
            clear_left_behind()
            return None
        if self._mode in now:
            _left_behind.append(self._mode)
            return "another dispatch mode began in the step and has not ended"
        if now and now == self._below[: len(now)]:
            now[-1].__exit__(None, None, None)  # the training left this mode, but torch popped ours instead
        return "another dispatch mode ended in the step"


_left_behind: list[Any] = []
"""Our finished dispatch modes that lie below the training's modes on torch's stack; removed once they are on top."""


def clear_left_behind() -> None:
    while _left_behind and _modes_now()[-1:] == _left_behind[-1:]:
        _left_behind.pop().__exit__(None, None, None)


def _modes_now() -> list[Any]:
    return list(dispatch_mode_stack())


class _PassingMode(CountingMode):
    """Counts ops and runs them unchanged. If counting an op fails, the op still runs, and `failure` says why."""

    def __init__(self, attention: AttentionConvention) -> None:
        super().__init__(ModuleStack(), attention)
        self.is_over = self.is_paused = False
        self.failure: str | None = None
        self.optimizer_flops = 0
        self._closures: list[bool] = []
        """For each optimizer step under way, whether it was given a closure."""

    @property
    def doubt(self) -> str | None:
        return self._functions.doubt

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload):  # a higher-order operator, such as flex_attention
            out = func(*args, **kwargs)
            self._guarded(lambda: self._add_uncounted(func.name(), args))
            return out
        if short_op_name(func) in METADATA_OPS:
            return NotImplemented
        if torch.is_inference_mode_enabled() and can_decompose(func) and not _has_kernel(func, _device_types(args)):
            # Composite ops arrive undecomposed in inference mode. Decomposing the ops in `_WHOLE` would change results.
            if short_op_name(func) not in _WHOLE and find_formula(func) is None:
                with self:
                    return func.decompose(*args, **kwargs)
            self._guarded(self._meet_whole, func)
            return func(*args, **kwargs)
        out = func(*args, **kwargs)
        self._guarded(self._count_op, func, args, kwargs, out)
        return out

    def _guarded(self, count: Callable[..., None], *call: Any) -> None:
        if self.is_over or self.is_paused:
            return
        try:
            count(*call)
        except Exception as error:
            self.failure = f"{type(error).__name__}: {first_line(error)}"

    def _count_op(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        if may_differ_under_a_mode(func, args):
            self.risky_ops.add(op_name(func))
        formula = find_formula(func)
        self._look_for_repetition(func, args, kwargs, out, formula)
        if formula is not None or not costs_nothing(func):
            call = OpCall(func, bind(func, args, kwargs), out, self._attention, self._needs_grad())
            self._count(call, formula)
        self._runs_again = False

    def _meet_whole(self, func: OpOverload) -> None:
        """Record a composite op that was not decomposed; without a formula its FLOPs are unknown."""
        if find_formula(func) is None and not costs_nothing(func):
            self.failure = f"{op_name(func)} runs in inference mode, where the ops inside it cannot be counted"

    def enter_optimizer(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin an optimizer step, and note whether it has a closure; a closure runs forward and backward passes."""
        self._closures.append(any(callable(value) for value in (*args[1:], *kwargs.values())))

    def leave_optimizer(self, *_: Any) -> None:
        if self._closures:
            self._closures.pop()

    def add(self, name: str, flops: OpFlops, dtype: str | None) -> None:
        """Add the FLOPs of an op; those of the optimizer itself (Muon, Shampoo) are added to `optimizer_flops`."""
        is_outside_autograd = not torch.is_grad_enabled() and current_graph_task_id() == -1
        if self._closures and not any(self._closures) and is_outside_autograd:
            self.optimizer_flops += flops.needed + flops.extra
        else:
            super().add(name, flops, dtype)

    def _phase(self) -> Phase:
        if current_graph_task_id() == -1:
            return "forward"
        return "recompute" if runs_forward_again() else "backward"

    def _module(self, phase: Phase) -> str:
        return ""


def _device_types(args: tuple[Any, ...]) -> frozenset[str]:
    return frozenset(value.device.type for value in tensors_in(args))


@cache
def _has_kernel(func: OpOverload, device_types: frozenset[str]) -> bool:
    """Whether an op has its own kernel on these devices; decomposing such an op could change the result's last bits."""
    return has_kernel(func, device_types)


_PRODUCTS = (
    "MmBackward",
    "AddmmBackward",
    "BmmBackward",
    "BaddbmmBackward",
    "ConvolutionBackward",
    "ScaledDotProduct",
    "LinearBackward",
    "MvBackward",
    "DotBackward",
)
_MOST_NODES = 50_000
_MOST_OUTSIDE = 256
"""The maximum number of autograd nodes that `products_outside` visits per step."""


def _last_node(loss: Any) -> Any:
    """The autograd node that computed the loss; None if there is no graph."""
    try:
        return loss.grad_fn if isinstance(loss, torch.Tensor) else None
    except Exception:
        return None


def products_in_graph(loss: Any) -> int | None:
    """A hash of the matrix products in the loss's graph with their shapes and types; None if there is no graph.

    Nodes and shapes remain available after the backward pass. Takes about a microsecond per node, so it runs only once
    per logging window.
    """
    first = _last_node(loss)
    if first is None:
        return None
    found: list[tuple[Any, ...]] = []
    seen, waiting = {first}, [first]
    while waiting:
        node = waiting.pop()
        name = node.name()
        if name.startswith(_PRODUCTS):
            parts = input_metadata(node)
            if parts is None:
                return None
            found.append((name, *((tuple(part.shape), part.dtype) for part in parts)))
        for parent, _ in node.next_functions:
            if parent is not None and parent not in seen:
                seen.add(parent)
                waiting.append(parent)
        if len(seen) > _MOST_NODES:
            return None
    return hash(tuple(sorted(map(str, found))))


def products_outside(loss: Any, own: Sequence[tuple[int, int]]) -> int:
    """A hash of the names and shapes of the matrix products between the model's output and the loss; 0 without any.

    Args:
        loss: The loss, with or without its graph.
        own: Ranges of autograd's sequence numbers that belong to the model; the search ends at these nodes.
    """
    first = _last_node(loss)
    if first is None or not own:
        return 0
    found: list[str] = []
    seen, waiting = {first}, [first]
    while waiting and len(seen) <= _MOST_OUTSIDE:
        node = waiting.pop()
        number = sequence_nr(node)
        if any(start <= number < end for start, end in own):
            continue
        name = node.name()
        parents = [(parent, index) for parent, index in node.next_functions if parent is not None]
        # A name without a final digit belongs to an autograd function in Python, which may contain matrix products.
        if name.startswith(_PRODUCTS) or (parents and not name[-1].isdigit()):
            if input_metadata(node) is None:
                return 0
            made = [tuple(part.shape) for part in input_metadata(node)]
            found.append(f"{name} {made} {[tuple(input_metadata(parent)[index].shape) for parent, index in parents]}")
        for parent, _ in parents:
            if parent not in seen:
                seen.add(parent)
                waiting.append(parent)
    return hash(tuple(sorted(found))) if found else 0
