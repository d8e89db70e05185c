"""Counts all ops of a training step as it runs, inside and outside the model.

A dispatch mode counts each op and runs it unchanged. The user's code runs once, as always. A few ops compute other last
bits while a dispatch mode is active; when one is met, the mode is left before anything else runs, and such trainings
are counted by torch's own observers (`observed.py`).
"""

import inspect
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from threading import get_ident
from types import CodeType, FrameType
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from flopwatch.flops.formulas.free_ops import RISKY as RISKY_OPS
from flopwatch.flops.formulas.free_ops import costs_nothing, may_differ_under_a_mode
from flopwatch.flops.formulas.registry import OpCall, OpFlops, bind, find_formula
from flopwatch.flops.tracing import regions
from flopwatch.flops.tracing.counter import (
    METADATA_OPS,
    UNSEEN_KERNEL,
    CountingMode,
    Phase,
    Tally,
    needs_grad,
    phases_of,
)
from flopwatch.flops.tracing.custom_functions import ByStorage, storage_of
from flopwatch.flops.tracing.kernels import watch_launches
from flopwatch.flops.tracing.passes import is_inside_mode
from flopwatch.flops.tracing.regions import Region
from flopwatch.flops.tracing.replica import ModuleStack
from flopwatch.flops.tracing.scaling import UNCLEAR, Axes, Product, Scale, factors_of, product_of, scale_of
from flopwatch.flops.tree import tensors_in
from flopwatch.records.flops import AttentionConvention, PhaseFlops
from flopwatch.text import first_line
from flopwatch.torch_internals import why_not_countable
from flopwatch.torch_internals.autograd import (
    current_autograd_node,
    current_graph_task_id,
    frames_from,
    recorded_operations,
    requested_compilations,
    runs_compiled_backward,
    runs_forward_again,
    sequence_nr,
)
from flopwatch.torch_internals.ops import (
    TO_COPY,
    FakeTensor,
    OpOverload,
    TorchDispatchMode,
    can_decompose,
    dispatch_mode_stack,
    has_kernel,
    op_name,
    short_op_name,
)

_has_kernel = cache(has_kernel)
_WHOLE = {
    *("bilinear", "corrcoef", "cov", "einsum", "gru", "gru_cell", "inner", "istft", "linalg_multi_dot", "lstm"),
    *("lstm_cell", "rnn_relu", "rnn_relu_cell", "rnn_tanh", "rnn_tanh_cell", "stft", "tensordot", "upsample_bicubic2d"),
}
"""Ops whose result changes in the last bits if they are decomposed under a dispatch mode."""
OUTSIDE = (
    "with torch before 2.10, only compiled code is counted in a process that compiles, and not what runs around it: "
    "a lower bound"
)
LATE_BACKWARD = "a backward pass runs through compiled code whose call was not seen in the same step"
RISKY = "an op computes other last bits while steps are counted"


@dataclass(frozen=True, slots=True)
class StepCount:
    """FLOPs of one step, counted op by op as it ran.

    Attributes:
        by_scale: Needed FLOPs (without recomputation) by how they depend on the lengths of rows.
        uncounted: Names of ops without a formula.
        failure: Why the count is not complete; None if it is.
        optimizer: FLOPs of matrix products in the optimizer; not part of the other fields.
        doubt: Why it is not certain which ops are recomputation, so that model FLOPs may be wrong; otherwise None.
        before_calls: FLOPs that ran before the first call of a module.
        before_grad: FLOPs without gradients with which the step began.
        coverage: Share of the calls of matmul-like ops that had a formula.
        knows_executed: Whether all that ran is known. In compiled code with checkpointing, the compiler decides what
            runs again, and only the FLOPs of the model are known.
    """

    phases: PhaseFlops
    by_dtype: Mapping[str, PhaseFlops] = field(default_factory=dict)
    by_op: Mapping[str, PhaseFlops] = field(default_factory=dict)
    by_scale: Mapping[Scale, int] = field(default_factory=dict)
    uncounted: tuple[str, ...] = ()
    failure: str | None = None
    optimizer: int = 0
    doubt: str | None = None
    before_calls: int = 0
    before_grad: int = field(default=0, compare=False)
    coverage: float = 1.0
    knows_executed: bool = True

    @classmethod
    def of(cls, tally: Tally, **others: Any) -> "StepCount":
        count = tally.as_count("step", "full")
        uncounted = tuple(sorted({op.op for op in count.uncounted}))
        coverage = 1.0 if count.coverage is None else count.coverage
        return cls(phases_of(count), count.by_dtype, count.by_op, uncounted=uncounted, coverage=coverage, **others)

    @property
    def is_whole(self) -> bool:
        return self.failure is None and not self.uncounted

    def agrees(self, other: "StepCount") -> bool:
        return self.by_dtype == other.by_dtype and self.uncounted == other.uncounted


def may_compile() -> bool:
    """Whether torch has compiled a function in this process, or will do so because `torch.compile` was called.

    This runs several times in every step of a training.
    """
    if _has_compiled:
        return True
    if not _requested:
        found = requested_compilations()
        if found is None:
            return False
        _requested.append(found)
    for backend in _requested[0].values():
        if backend is not None:  # `torch.compiler.disable` stores None in the table
            _has_compiled.append(True)
            return True
    return False


_requested: list[Mapping[Any, Any]] = []
"""Torch's table of requested compilations, once the compiler is loaded."""
_has_compiled: list[bool] = []
"""Not empty after a compilation was requested, because `torch.compiler.reset` clears torch's own table."""


def obstacle() -> str | None:
    return "steps cannot be counted as they run with this release of torch" if why_not_countable() else None


def is_capturing() -> bool:
    """Whether a CUDA graph is captured now, of which a count must not be a part."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


_compiles_beside = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 10)
"""Whether a mode can ask the compiler to work as if the mode were not there (`ignore_compile_internals`).

Torch 2.9 can be asked too, but compiles again with a mode. To find this out by a compilation would take seconds.
"""


class LiveStep:
    """Counts one step, from the constructor to `end`. The parameters are the weights of the model."""

    def __init__(self, attention: AttentionConvention, parameters: Iterable[torch.Tensor] = ()) -> None:
        self._mode = PassingMode(attention, parameters)
        self.enter_optimizer, self.leave_optimizer = self._mode.enter_optimizer, self._mode.leave_optimizer
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
        self._mode.axes = axes

    def _region_is_called(self, region: Region, args: tuple[Any, ...]) -> regions.Leave | None:
        """Count a call of compiled code, and nothing of what runs in it."""
        if self._listener is not None:
            self._listener(region, args)
        mode = self._mode
        if mode.is_over or mode.is_paused or mode.regions_under_way or get_ident() != self._thread:
            return None
        seen = SeenRegion(
            region, region.sizes(args), torch.is_grad_enabled(), mode.phase(), mode.axes, mode.is_in_optimizer
        )
        # Another mode may take products from what was saved (selective checkpointing).
        seen.may_skip = seen.phase == "recompute" and any(each is not mode for each in dispatch_mode_stack())
        self.region_calls.append(seen)
        mode.has_grad_begun |= seen.has_grad
        mode.regions_under_way += 1
        first_own = recorded_operations() or 0

        def leave(out: Any) -> None:
            mode.regions_under_way -= 1
            node = _compiled_node(out, first_own)
            if node is not None:
                mode.region_nodes.add(sequence_nr(node))
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
            by_scale=by_scale(mode.by_scale, axes),
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


def by_scale(flops: Mapping[Scale | Product, int], axes: Axes | None) -> dict[Scale, int]:
    sums: dict[Scale, int] = {}
    for key, needed in flops.items():
        scale = scale_of(key, axes) if isinstance(key, Product) else key
        sums[scale] = sums.get(scale, 0) + needed
    return sums


_under_way: "weakref.WeakSet[LiveStep]" = weakref.WeakSet()


def _forget_in_child() -> None:
    """In a forked process, such as a worker of a data loader: end the counts, whose mode it has inherited."""
    for step in list(_under_way):
        step._stop()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)

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


def _is_compiled_node(node: Any) -> bool:
    """Whether a node runs the backward pass of compiled code, or of a class with the same name."""
    return bool(node.name().startswith("CompiledFunction"))


def _compiled_node(out: Any, first_own: int) -> Any:
    """The node of autograd that runs the backward pass of a compiled function, by its results; None if it has none.

    Nodes with smaller numbers than `first_own`, the first that the call has made, belong to other calls.
    """
    nodes: list[Any] = [leaf.grad_fn for leaf in tensors_in(out)]
    for _ in range(_DEEPEST_NODE):  # results that are views of others have a node more
        nodes = [node for node in nodes if node is not None and sequence_nr(node) >= first_own]
        found = next((node for node in nodes if _is_compiled_node(node)), None)
        if found is not None or not nodes:
            return found
        nodes = [each for node in nodes for each, _ in node.next_functions]
    return None


class PassingMode(CountingMode):
    """Counts ops and runs them unchanged. If counting an op fails, the op still runs, and `failure` says why."""

    counts_fakes = False

    def __init__(self, attention: AttentionConvention, parameters: Iterable[torch.Tensor]) -> None:
        super().__init__(ModuleStack(), attention)
        self.is_over = self.is_paused = self.has_left = False
        self.regions_under_way = 0
        self.region_nodes: set[int] = set()
        """Numbers of the nodes that run the backward passes of compiled code which the step has called."""
        self._compiles = may_compile()
        self.failure: str | None = None
        self.optimizer_flops = 0
        self.before_calls: int | None = None
        self.before_grad, self.has_grad_begun = 0, False
        self.axes: Axes | None = None
        self.by_scale: dict[Scale | Product, int] = {}
        """Needed FLOPs. Products stand for their scales while the shape of the batch is not known."""
        self._scale: Scale | Product = UNCLEAR
        self._scale_of_node: dict[int, Scale | Product] = {}
        self.weights = ByStorage()
        # Inside of `torch.func`, weights are replaced by wrappers without storage.
        with suppress(NotImplementedError), torch.no_grad():
            for parameter in parameters:
                own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                self.weights.put(storage_of(own), True)
        self._closures: list[tuple[frozenset[CodeType], int]] = []
        """For each optimizer step under way, the code of its closures, and the backward pass in which it began."""
        self._plain: dict[int, OpOverload] = {}
        """Ops of this step, by their ids, that only matter to products which a custom function repeats."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def note_call(self) -> None:
        # A module is not called by an optimizer without a closure: that one has raised, and did not end.
        self._closures = [entry for entry in self._closures if entry[0]]
        if self.before_calls is None:
            self.before_calls = sum(self.by_scale.values())

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._compiles and self._is_in_region():
            return func(*args, **kwargs)
        if types:
            # A DTensor finds out the shapes of its results.
            if not self.counts_fakes and _holds(FakeTensor, tuple(types)):
                return func(*args, **kwargs)
            if _holds(DTensor, tuple(types)):  # it runs ops on this rank's part, which are counted instead
                return NotImplemented
        if id(func) in self._plain:
            out = func(*args, **kwargs)
            self._guarded(self._look_for_hidden_kernel, func, args, kwargs, out)
            if not self._functions.is_idle():
                self._guarded(self._look_for_repetition, func, args, kwargs, out, None)
            return out
        if not isinstance(func, OpOverload):  # a higher-order operator, such as flex_attention
            out = func(*args, **kwargs)
            self._guarded(self._count_higher_order, func.name(), args, kwargs)
            return out
        if short_op_name(func) in METADATA_OPS:
            return NotImplemented
        if (
            torch.is_inference_mode_enabled()
            and can_decompose(func)
            and not _has_kernel(func, frozenset(each.device.type for each in tensors_in(args)))
        ):
            # Composite ops arrive undecomposed in inference mode. Decomposing the ops in `_WHOLE`, or one that has its
            # own kernel on the device, would change the last bits of results.
            has_formula = find_formula(func) is not None
            if short_op_name(func) not in _WHOLE and not has_formula:
                with self:
                    return func.decompose(*args, **kwargs)
            if not (has_formula or costs_nothing(func) or self.is_over or self.is_paused):
                self.failure = f"{op_name(func)} runs in inference mode, where the ops inside it cannot be counted"
            return func(*args, **kwargs)
        out = func(*args, **kwargs)
        self._guarded(self._look_for_hidden_kernel, func, args, kwargs, out)
        self._guarded(self._count_op, func, args, kwargs, out)
        return out

    def _look_for_hidden_kernel(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> None:
        if self._unwritten.is_read_by(func, args, kwargs, out):
            self._add_uncounted(UNSEEN_KERNEL)

    def add_kernel(self, kernel: Any, arguments: Mapping[str, Any]) -> None:
        if not (self._compiles and self._is_in_region()):
            self._scale = UNCLEAR
            self._guarded(super().add_kernel, kernel, arguments)

    def _is_in_region(self) -> bool:
        if self.regions_under_way or regions.state.is_compiling:
            return True
        node = current_autograd_node() if current_graph_task_id() != -1 else None
        if node is None or not _is_compiled_node(node) or not runs_compiled_backward():
            return False
        if sequence_nr(node) not in self.region_nodes and not self.is_paused:
            self.failure = LATE_BACKWARD
        return True

    def counted(self) -> StepCount:
        return StepCount.of(
            self.tally,
            failure=self.failure,
            optimizer=self.optimizer_flops,
            doubt=self._functions.doubt,
            before_calls=self.before_calls or 0,
            before_grad=self.before_grad,
        )

    def _guarded(self, count: Callable[..., None], *call: Any) -> None:
        if self.is_over or self.is_paused:
            return
        try:
            count(*call)
        except Exception as error:
            self.failure = f"{type(error).__name__}: {first_line(error)}"

    def _count_op(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        if may_differ_under_a_mode(func, args):
            self._leave_soon()
        formula = find_formula(func)
        self._look_for_repetition(func, args, kwargs, out, formula)
        is_free = formula is None and costs_nothing(func)
        if not is_free and getattr(out, "is_meta", False):  # nothing is computed
            return
        if not is_free:
            call = OpCall(func, bind(func, args, kwargs), out, self._attention, needs_grad())
            self._scale = self._scale_now(call)
            self._count(call, formula)
        elif func.overloadpacket is TO_COPY and self.weights.get(storage_of(args[0])):
            self.weights.put(storage_of(out), True)  # autocast multiplies with a copy of the weight
        if (
            is_free
            and func.overloadpacket is not TO_COPY
            and op_name(func) not in RISKY_OPS
            and not can_decompose(func)
        ):
            self._plain[id(func)] = func
        self._runs_again = False

    def _scale_now(self, call: OpCall) -> Scale | Product:
        if current_graph_task_id() != -1 and not torch.is_grad_enabled():
            node = current_autograd_node()
            return UNCLEAR if node is None else self._scale_of_node.get(sequence_nr(node), UNCLEAR)
        is_weight = [bool(self.weights.get(storage_of(factor))) for factor in factors_of(call)]
        product = product_of(call, is_weight)
        scale = product if product is not None and self.axes is None else scale_of(product, self.axes)
        self._scale_of_node[(recorded_operations() or 0) - 1] = scale
        return scale

    def _leave_soon(self) -> None:
        """Leave the mode at the next Python call: in the backward pass of a risky op, it would change the result.

        Inside of the handler, torch has popped the mode from its stack, so that it cannot be left here.
        """
        if self.failure is not None or sys.getprofile() is not None:
            return
        self.failure = RISKY

        def leave(frame: FrameType, event: str, argument: Any) -> None:
            if self.is_over or not (is_inside_mode(frame) or torch.is_inference_mode_enabled()):
                sys.setprofile(None)
                if not self.is_over and dispatch_mode_stack()[-1:] == [self]:
                    self.has_left = True
                    self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

        sys.setprofile(leave)

    def enter_optimizer(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin an optimizer step, and note its closures, which run forward and backward passes."""
        closures = (value for value in (*args[1:], *kwargs.values()) if callable(value))
        codes = frozenset(code for closure in closures for code in _codes_of(closure))
        self._closures.append((codes, current_graph_task_id()))

    def leave_optimizer(self) -> None:
        if self._closures:
            self._closures.pop()

    def add(self, name: str, flops: OpFlops) -> None:
        """Add the FLOPs of an op; those of the optimizer itself (Muon, L-BFGS) are added to `optimizer_flops`."""
        if self.is_in_optimizer:
            self.optimizer_flops += flops.needed + flops.extra
            return
        if torch.is_grad_enabled() or self.phase() != "forward":
            self.has_grad_begun = True
        elif not self.has_grad_begun:
            self.before_grad += flops.needed
        if self.phase() != "recompute" and not self._runs_again:
            self.by_scale[self._scale] = self.by_scale.get(self._scale, 0) + flops.needed
        super().add(name, flops)

    @property
    def is_in_optimizer(self) -> bool:
        # A backward pass that begins inside of the optimizer is the training's.
        if not self._closures or torch.is_grad_enabled() or current_graph_task_id() != self._closures[-1][1]:
            return False
        codes = frozenset[CodeType]().union(*(codes for codes, _ in self._closures))
        return not codes or all(frame.f_code not in codes for frame in frames_from(sys._getframe(1)))

    def phase(self) -> Phase:
        if current_graph_task_id() == -1:
            return "forward"
        return "recompute" if runs_forward_again() else "backward"

    def _module(self, phase: Phase) -> str:
        return ""


@cache
def _holds(kind: type, types: tuple[type, ...]) -> bool:
    return any(issubclass(each, kind) for each in types)


def _codes_of(closure: Any) -> tuple[CodeType, ...]:
    """The code of a function, of a method, of what `functools.partial` wraps, or of an object's `__call__`."""
    function = inspect.unwrap(getattr(closure, "func", closure))
    called: tuple[Any, ...] = getattr(function, "__func__", function), vars(type(function)).get("__call__")
    return tuple(each.__code__ for each in called if hasattr(each, "__code__"))
