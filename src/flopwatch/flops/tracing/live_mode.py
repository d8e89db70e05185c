"""A dispatch mode that counts the ops of a training step and runs each unchanged, and what it knows of the step."""

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from types import CodeType, FrameType
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from flopwatch.flops.formulas.free_ops import RISKY as RISKY_OPS
from flopwatch.flops.formulas.free_ops import costs_nothing, may_differ_under_a_mode
from flopwatch.flops.formulas.registry import OpCall, OpFlops, bind, find_formula, tensors_in
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
from flopwatch.flops.tracing.replica import ModuleStack
from flopwatch.flops.tracing.scaling import UNCLEAR, Axes, Product, Scale, factors_of, product_of, scale_of
from flopwatch.records.flops import AttentionConvention, PhaseFlops
from flopwatch.text import first_line
from flopwatch.torch_internals.autograd import (
    current_autograd_node,
    current_graph_task_id,
    frames_from,
    recorded_operations,
    runs_compiled_backward,
    sequence_nr,
)
from flopwatch.torch_internals.ops import (
    TO_COPY,
    FakeTensor,
    OpOverload,
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
LATE_BACKWARD = "a backward pass runs through compiled code whose call was not seen in the same step"


@dataclass(frozen=True, slots=True)
class StepCount:
    """FLOPs of one step, counted op by op as it ran.

    Attributes:
        by_scale: Needed FLOPs (without recomputation) by how they depend on the lengths of rows.
        uncounted: Names of ops without a formula.
        failure: Why the count is not complete; None if it is.
        disturbing_op: An op that computes other last bits under a dispatch mode, at which the count was left.
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
    disturbing_op: str | None = None
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


class Scales:
    """Needed FLOPs by how they depend on the lengths of a batch's rows.

    Attributes:
        axes: The shape of the micro-batch that is running.
        flops: Products stand for their scales while the shape of the batch is not known.
        now: The scale of the running op.
        weights: The storages of the model's parameters, and of copies of them.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self.axes: Axes | None = None
        self.flops: dict[Scale | Product, int] = {}
        self.now: Scale | Product = UNCLEAR
        self._of_node: dict[int, Scale | Product] = {}
        self.weights = ByStorage()
        # Inside of `torch.func`, weights are replaced by wrappers without storage.
        with suppress(NotImplementedError), torch.no_grad():
            for parameter in parameters:
                own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                self.weights.put(storage_of(own), True)

    def meet(self, call: OpCall) -> None:
        if current_graph_task_id() != -1 and not torch.is_grad_enabled():
            node = current_autograd_node()
            self.now = UNCLEAR if node is None else self._of_node.get(sequence_nr(node), UNCLEAR)
            return
        product = product_of(call, [bool(self.weights.get(storage_of(factor))) for factor in factors_of(call)])
        self.now = product if product is not None and self.axes is None else scale_of(product, self.axes)
        self._of_node[(recorded_operations() or 0) - 1] = self.now

    def add(self, needed: int) -> None:
        self.flops[self.now] = self.flops.get(self.now, 0) + needed


def by_scale(flops: Mapping[Scale | Product, int], axes: Axes | None) -> dict[Scale, int]:
    sums: dict[Scale, int] = {}
    for key, needed in flops.items():
        scale = scale_of(key, axes) if isinstance(key, Product) else key
        sums[scale] = sums.get(scale, 0) + needed
    return sums


class OptimizerSteps:
    """The optimizer steps under way, and the FLOPs of the optimizers themselves (Muon, L-BFGS)."""

    def __init__(self) -> None:
        self.flops = 0
        self._under_way: list[tuple[frozenset[CodeType], int]] = []
        """For each, the code of its closures, and the backward pass in which it began."""

    def enter(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin an optimizer step, and note its closures, which run forward and backward passes."""
        closures = (value for value in (*args[1:], *kwargs.values()) if callable(value))
        codes = frozenset(code for closure in closures for code in _codes_of(closure))
        self._under_way.append((codes, current_graph_task_id()))

    def leave(self) -> None:
        if self._under_way:
            self._under_way.pop()

    def note_call(self) -> None:
        # A module is not called by an optimizer without a closure: that one has raised, and did not end.
        self._under_way = [entry for entry in self._under_way if entry[0]]

    @property
    def is_running(self) -> bool:
        # A backward pass that begins inside of the optimizer is the training's.
        if not self._under_way or torch.is_grad_enabled() or current_graph_task_id() != self._under_way[-1][1]:
            return False
        codes = frozenset[CodeType]().union(*(codes for codes, _ in self._under_way))
        return not codes or all(frame.f_code not in codes for frame in frames_from(sys._getframe(1)))


@dataclass
class CompiledCalls:
    """Calls of compiled code in the step: how many run, and the numbers of the nodes of their backward passes."""

    may_run: bool
    under_way: int = 0
    nodes: set[int] = field(default_factory=set)

    def runs(self) -> bool | None:
        """Whether compiled code runs; None if it is a backward pass of code whose call was not seen."""
        if self.under_way or regions.state.is_compiling:
            return True
        node = current_autograd_node() if current_graph_task_id() != -1 else None
        if node is None or not is_compiled_node(node) or not runs_compiled_backward():
            return False
        return True if sequence_nr(node) in self.nodes else None


def is_compiled_node(node: Any) -> bool:
    """Whether a node runs the backward pass of compiled code, or of a class with the same name."""
    return bool(node.name().startswith("CompiledFunction"))


class PassingMode(CountingMode):
    """Counts ops and runs them unchanged. If counting an op fails, the op still runs, and `failure` says why."""

    counts_fakes = False

    def __init__(
        self, attention: AttentionConvention, parameters: Iterable[torch.Tensor], *, compiles: bool = False
    ) -> None:
        super().__init__(ModuleStack(), attention)
        self.is_over = self.is_paused = self.has_left = False
        self.failure: str | None = None
        self.disturbing_op: str | None = None
        self.scales, self.optimizer = Scales(parameters), OptimizerSteps()
        self.compiled = CompiledCalls(compiles)
        self.before_calls: int | None = None
        self.before_grad, self.has_grad_begun = 0, False
        self._plain: dict[int, OpOverload] = {}
        """Ops of this step, by their ids, that only matter to products which a custom function repeats."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def note_call(self) -> None:
        self.optimizer.note_call()
        if self.before_calls is None:
            self.before_calls = sum(self.scales.flops.values())

    def __torch_dispatch__(  # noqa: C901, PLR0911 - the cases in their order, with no further call per op
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.compiled.may_run and self._is_in_region():
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
        if not (self.compiled.may_run and self._is_in_region()):
            self.scales.now = UNCLEAR
            self._guarded(super().add_kernel, kernel, arguments)

    def _is_in_region(self) -> bool:
        runs = self.compiled.runs()
        if runs is None and not self.is_paused:
            self.failure = LATE_BACKWARD
        return runs is not False

    def counted(self) -> StepCount:
        return StepCount.of(
            self.tally,
            failure=self.failure,
            disturbing_op=self.disturbing_op,
            optimizer=self.optimizer.flops,
            doubt=self._functions.doubt,
            before_calls=self.before_calls or 0,
            before_grad=self.before_grad,
        )

    def _guarded(self, count: Callable[..., None], *call: Any) -> None:
        if self.is_over or self.is_paused:
            return
        try:
            count(*call)
        except Exception as error:  # noqa: BLE001 - the border to the training, per op: a `Guard` would cost more calls
            self.failure = f"{type(error).__name__}: {first_line(error)}"

    def _count_op(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        if self.disturbing_op is None and may_differ_under_a_mode(func, args):
            self._leave_soon(short_op_name(func))
        formula = find_formula(func)
        self._look_for_repetition(func, args, kwargs, out, formula)
        is_free = formula is None and costs_nothing(func)
        if not is_free and getattr(out, "is_meta", False):  # nothing is computed
            return
        if not is_free:
            call = OpCall(func, bind(func, args, kwargs), out, self._attention, needs_grad())
            self.scales.meet(call)
            self._count(call, formula)
        elif func.overloadpacket is TO_COPY:
            if self.scales.weights.get(storage_of(args[0])):
                self.scales.weights.put(storage_of(out), True)  # autocast multiplies with a copy of the weight
        elif op_name(func) not in RISKY_OPS and not can_decompose(func):
            self._plain[id(func)] = func
        self._runs_again = False

    def _leave_soon(self, op: str) -> None:
        """Leave the mode once torch has it on its stack again: in the backward pass of `op`, it would change bits.

        Inside of the handler, torch has taken the mode from its stack, so that it cannot be left here.
        """
        self.disturbing_op, self.failure = op, f"{op} computes other last bits while a step is counted"
        if sys.getprofile() is not None:  # the user's own
            return

        def leave(frame: FrameType, event: str, argument: Any) -> None:
            is_on_top = dispatch_mode_stack()[-1:] == [self] and not torch.is_inference_mode_enabled()
            if self.is_over or is_on_top:
                sys.setprofile(None)
                if not self.is_over:
                    self.has_left = True
                    self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

        sys.setprofile(leave)

    def add(self, name: str, flops: OpFlops) -> None:
        if self.optimizer.is_running:
            self.optimizer.flops += flops.needed + flops.extra
            return
        if torch.is_grad_enabled() or self.phase() != "forward":
            self.has_grad_begun = True
        elif not self.has_grad_begun:
            self.before_grad += flops.needed
        if self.phase() != "recompute" and not self._runs_again:
            self.scales.add(flops.needed)
        super().add(name, flops)

    def _module(self, phase: Phase) -> str:
        return ""


@cache
def _holds(kind: type, types: tuple[type, ...]) -> bool:
    return any(issubclass(each, kind) for each in types)


def _codes_of(closure: Any) -> tuple[CodeType, ...]:
    function = inspect.unwrap(getattr(closure, "func", closure))
    called: tuple[Any, ...] = getattr(function, "__func__", function), vars(type(function)).get("__call__")
    return tuple(each.__code__ for each in called if hasattr(each, "__code__"))
