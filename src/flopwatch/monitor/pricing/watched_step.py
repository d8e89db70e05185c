"""Counts one real step of the training as it runs: everything, not only the model.

A dispatch mode sees each op on its way and lets it pass unchanged. It is entered for a few steps of a run, and never
where that would do harm: around compiled code (a function that first runs under a mode is never compiled again, pytorch
issue 140909) and while a CUDA graph is captured.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from flopwatch.flops.formulas import OpCall, OpFlops, bind, find_formula
from flopwatch.flops.formulas.free_ops import RISKY, costs_nothing
from flopwatch.flops.tracing.counter import METADATA_OPS, CountingMode
from flopwatch.flops.tracing.replica import ModuleStack
from flopwatch.flops.tracing.tally import Phase
from flopwatch.records.flops import AttentionConvention, PhaseFlops
from flopwatch.torch_internals import (
    ENGINE_CODE,
    OpOverload,
    can_decompose,
    compile_stance,
    compile_tables,
    current_dispatch_mode,
    current_graph_task_id,
    dispatch_mode_stack,
    has_kernel,
    input_metadata,
    op_name,
    runs_forward_code,
    sequence_nr,
    short_op_name,
    tree_leaves,
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
"""Ops whose result changes in the last bits when they are decomposed under a mode."""
_KNUTH = 2_654_435_761
_LOOK_AHEAD = 64


@dataclass(frozen=True, slots=True)
class StepCount:
    """What one step ran, op by op.

    Attributes:
        phases: Its FLOPs by phase.
        by_dtype: The same by compute type.
        uncounted: Ops without a formula.
        failure: Why the count is not complete.
        optimizer: FLOPs of products that the optimizer itself computes; not part of the other fields.
        risks: Ops met that may differ in the last bits while a mode is on.
        doubt: Why model FLOPs may differ: recomputation could not be separated.
    """

    phases: PhaseFlops
    by_dtype: Mapping[str, PhaseFlops] = field(default_factory=dict)
    uncounted: tuple[str, ...] = ()
    failure: str | None = None
    optimizer: int = 0
    risks: tuple[str, ...] = ()
    doubt: str | None = None


def is_watched(index: int) -> bool:
    """Whether the step of this number in its session is counted: the second, then ever more rarely.

    The first ones fall on all residues of all periods up to 12, so that work which is done every third or tenth step
    is met early; later ones are strewn about by Knuth's multiplicative hash: one in 128, after 1,000 steps in 2,048.

    >>> [index for index in range(60) if is_watched(index)][:6]
    [1, 3, 5, 8, 10, 12]
    """
    drawn = index * _KNUTH % 2**32
    return index in _FIRST or (index > _LAST_FIRST and drawn < (2**25 if index < 1_000 else 2**21))


def is_watched_by_ranks(index: int) -> bool:
    """The same for a training of several ranks: the same steps on all of them, as they wait for each other.

    They begin when all ranks have the laws of the first one. A rank that gets them late joins later.

    >>> [index for index in range(60) if is_watched_by_ranks(index)][:6]
    [33, 35, 37, 40, 42, 44]
    """
    late = max(_RANKS_BEGIN)
    return any(index - begin in _FIRST for begin in _RANKS_BEGIN) or (index > late + _LAST_FIRST and is_watched(index))


def next_watched(index: int, is_turn: Callable[[int], bool] = is_watched) -> int:
    """No step from this one up to the result is counted: a look ahead, so that ordinary steps need not ask.

    >>> next_watched(13)
    15
    """
    return next((later for later in range(index, index + _LOOK_AHEAD) if is_turn(later)), index + _LOOK_AHEAD)


def may_compile() -> bool:
    """Whether torch has compiled anything in this process, or was asked to: then it does so at the first call."""
    if not _dynamo:
        tables = compile_tables()
        if tables is None:
            return False
        _dynamo.extend(tables)
    asked_for, counters = _dynamo
    for backend in asked_for.values():
        if backend is not None:  # `torch.compiler.disable` leaves a None
            return True
    return "frames" in counters and counters["frames"].get("ok", 0) > 0


_dynamo: list[Any] = []
"""Torch's tables of requested and finished compilations, kept because they are read on every step."""


def obstacle() -> str | None:
    """Why the current step cannot be counted as it runs; None when it can."""
    if may_compile():
        return "compiled code runs in this process or will, and counting a step as it runs would end its compilation"
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return "a CUDA graph is being captured"
    return None


class WatchedStep:
    """One step under the mode, from the constructor to `end`."""

    def __init__(self, attention: AttentionConvention) -> None:
        self._mode = _PassingMode(attention)
        clear_left_behind()
        self._stance = torch.compiler.set_stance("force_eager")
        self._stance.__enter__()
        self._own_stance = compile_stance()
        self._hooks = (
            register_optimizer_step_pre_hook(self._mode.enter_optimizer),
            register_optimizer_step_post_hook(self._mode.leave_optimizer),
        )
        self._below = _modes_now()
        self._mode.__enter__()  # type: ignore[no-untyped-call]

    @property
    def is_paused(self) -> bool:
        """True during evaluation and our own counting, which are not part of the step."""
        return self._mode.is_paused

    @is_paused.setter
    def is_paused(self, on: bool) -> None:
        self._mode.is_paused = on

    def end(self) -> StepCount:
        """Leave the mode, wherever the training's own modes have put it."""
        self._mode.is_over = True
        if compile_stance() is self._own_stance:  # one that the training has set since stays
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
        """Leaving a mode pops the top one, so a mode of the training that ended in the step has popped ours."""
        now = _modes_now()
        if now and now[-1] is self._mode:
            self._mode.__exit__(None, None, None)
            clear_left_behind()
            return None
        if self._mode in now:
            _left_behind.append(self._mode)
            return "another dispatch mode began in the step and has not ended"  # ours does nothing from here on
        if now and now == self._below[: len(now)]:
            now[-1].__exit__(None, None, None)  # the one that was to end when ours was taken off
        return "another dispatch mode ended in the step"


_left_behind: list[Any] = []
"""Our modes that lie below modes of the training: they do nothing, and are left as soon as they are on top."""


def clear_left_behind() -> None:
    while _left_behind and current_dispatch_mode() is _left_behind[-1]:
        _left_behind.pop().__exit__(None, None, None)


def _modes_now() -> list[Any]:
    return list(dispatch_mode_stack())


class _PassingMode(CountingMode):
    """Counts, and never changes what runs: an error of ours ends the count, not the op."""

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
        if not isinstance(func, OpOverload):  # an operator that takes functions, such as flex_attention
            out = func(*args, **kwargs)
            self._guarded(self._count_higher_order, func, args)
            return out
        if short_op_name(func) in METADATA_OPS:
            return NotImplemented
        if torch.is_inference_mode_enabled() and can_decompose(func) and not _has_kernel(func, _device_types(args)):
            # Composite ops arrive undecomposed. Decomposing them here is harmless, except for those in `_WHOLE`.
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
            self.failure = f"{type(error).__name__}: {error}"

    def _count_op(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        if op_name(func) in RISKY:
            self.risky_ops.add(op_name(func))
        formula = find_formula(func)
        self._look_for_repetition(func, args, kwargs, out, formula)
        if formula is not None or not costs_nothing(func):
            call = OpCall(func, bind(func, args, kwargs), out, self._attention, self._needs_grad())
            self._count(call, formula)
        self._runs_again = False

    def _meet_whole(self, func: OpOverload) -> None:
        """Under inference mode composite ops arrive undecomposed, so what they run is unknown."""
        if find_formula(func) is None and not costs_nothing(func):
            self.failure = f"{op_name(func)} runs under inference mode, where its parts are not seen"

    def _count_higher_order(self, func: Any, args: tuple[Any, ...]) -> None:
        self._add_uncounted(func.name(), args)

    def enter_optimizer(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note an optimizer step. With a closure (L-BFGS, Lightning) the whole training step runs inside it."""
        self._closures.append(any(callable(value) for value in (*args[1:], *kwargs.values())))

    def leave_optimizer(self, *_: Any) -> None:
        if self._closures:
            self._closures.pop()

    def add(self, name: str, flops: OpFlops, dtype: str | None) -> None:
        """What an optimizer computes itself (Muon, Shampoo) is not the model's; a closure that it calls is."""
        is_outside_autograd = not torch.is_grad_enabled() and current_graph_task_id() == -1
        if self._closures and not any(self._closures) and is_outside_autograd:
            self.optimizer_flops += flops.needed + flops.extra
        else:
            super().add(name, flops, dtype)

    def _phase(self) -> Phase:
        if current_graph_task_id() == -1:
            return "forward"
        return "recompute" if _runs_modules_again() else "backward"

    def _module(self, phase: Phase) -> str:
        return ""


def _device_types(args: tuple[Any, ...]) -> frozenset[str]:
    return frozenset(value.device.type for value in tree_leaves(args) if isinstance(value, torch.Tensor))


@cache
def _has_kernel(func: OpOverload, device_types: frozenset[str]) -> bool:
    """Whether an op has a kernel on these devices: decomposed, `silu_backward` differs in the last bits."""
    return has_kernel(func, device_types)


def _runs_modules_again() -> bool:
    """Whether autograd's engine has called Python code that runs a part of the forward pass once more."""
    frame = sys._getframe(3)
    while frame is not None:
        code = frame.f_code
        if code is ENGINE_CODE:
            return False
        if runs_forward_code(code):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


# The matrix products in a loss's autograd graph: what a step has really computed, without running anything.


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
"""Most nodes visited per step, in loops with products outside the model."""


def _last_node(loss: Any) -> Any:
    """The node that made the loss; None without a graph, and for a tensor class that does not expose it."""
    try:
        return loss.grad_fn if isinstance(loss, torch.Tensor) else None
    except Exception:
        return None


def products_in_graph(loss: Any) -> int | None:
    """A number that changes with the products of the graph, their shapes and types; None where there is no graph.

    A node outlives the backward pass, and so does the shape of what it has made. Takes about a microsecond per node, so
    it runs once per logging window.
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
            made = [(tuple(part.shape), part.dtype) for part in input_metadata(node)]
            found.append((name, *made))
        for parent, _ in node.next_functions:
            if parent is not None and parent not in seen:
                seen.add(parent)
                waiting.append(parent)
        if len(seen) > _MOST_NODES:
            return None
    return hash(tuple(sorted(map(str, found))))


def products_outside(loss: Any, own: Sequence[tuple[int, int]]) -> int:
    """A number that changes with the sizes of the products between the model and its loss; 0 where there are none.

    Args:
        loss: With its graph, or without.
        own: Autograd's sequence numbers that the model's calls took. The walk ends at their nodes.
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
        if name.startswith(_PRODUCTS) or (
            parents and not name[-1].isdigit()
        ):  # names without a final digit are of functions written in Python
            made = [tuple(part.shape) for part in input_metadata(node)]
            found.append(f"{name} {made} {[tuple(input_metadata(parent)[index].shape) for parent, index in parents]}")
        for parent, _ in parents:
            if parent not in seen:
                seen.add(parent)
                waiting.append(parent)
    return hash(tuple(sorted(found))) if found else 0
