"""A dispatch mode that counts the FLOPs of a step's ops by phase (forward, backward, recomputation) and by module.

The mode also finds kernels that bypass torch's dispatcher, and prevents one rank from running a collective alone.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import distributed

from flopwatch.errors import MeasurementError
from flopwatch.flops.formulas.attention import backward_flops, flex_sizes, forward_flops
from flopwatch.flops.formulas.free_ops import COLLECTIVE_NAMESPACES, costs_nothing
from flopwatch.flops.formulas.layers import TAKE_NESTED
from flopwatch.flops.formulas.matrices import sparse_product_flops
from flopwatch.flops.formulas.registry import (
    Formula,
    OpCall,
    OpFlops,
    bind,
    compute_type,
    find_formula,
    tensors_in,
    type_of_product,
)
from flopwatch.flops.tracing import kernels
from flopwatch.flops.tracing.custom_functions import ByStorage, CustomFunctions, storage_of, written
from flopwatch.flops.tracing.masked_products import MaskedProducts
from flopwatch.flops.tracing.replica import ModuleStack
from flopwatch.records.flops import AttentionConvention, FlopCount, Method, PhaseFlops, UncountedOp
from flopwatch.torch_internals import check_countable
from flopwatch.torch_internals.autograd import (
    current_autograd_node,
    current_graph_task_id,
    graph_kernel,
    recorded_operations,
    runs_forward_again,
    sequence_nr,
)
from flopwatch.torch_internals.ops import (
    PIN_MEMORY,
    TO_COPY,
    FakeTensor,
    OpOverload,
    TorchDispatchMode,
    can_decompose,
    op_name,
    python_body,
    receive_higher_order_ops,
    short_op_name,
)

Execute = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]

THREADS = "threads"
THREADS_NOTE = "the model started threads, and ops that ran in them are not counted"
UNSEEN_KERNEL = "kernel past the dispatcher"
UNSEEN_KERNEL_NOTE = (
    "the model reads a tensor that no op of torch has filled; if a kernel that bypasses torch's dispatcher (Triton, a "
    "CUDA extension) has filled it, the FLOPs of this kernel are not counted"
)
ONE_RANKS_SHARE = "the model's own code calls collectives, so only the share of this rank is counted"

_aten = torch.ops.aten
_EMPTY = ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")
_MAKE_EMPTY = {getattr(_aten, name) for name in _EMPTY}
# Ops that read the shape and type of their input, but not its values.
_LIKE = ("full_like", "ones_like", "rand_like", "randint_like", "randn_like", "zeros_like")
_NEW = ("bernoulli", "new_full", "new_ones", "new_zeros", "resize_", "set_")
_READ_NO_VALUES = {getattr(_aten, name) for name in (*_LIKE, *_NEW)}
_COPY_WHOLE = {_aten.clone, TO_COPY, PIN_MEMORY, _aten.lift_fresh_copy}
_DEVICE = torch.ops.prim.device.default
METADATA_OPS = {
    *("dim", "is_contiguous", "is_non_overlapping_and_dense", "is_strides_like_format", "numel", "size"),
    *("storage_offset", "stride"),
    *("sym_is_contiguous", "sym_numel", "sym_size", "sym_storage_offset", "sym_stride"),
}
"""Ops that only query a tensor. A dispatch mode must not handle them: an exception in them would abort the process."""


UNMASKED_PRODUCTS = "attention in the form of plain matrix products counts masked pairs too, as its mask is not visible"

UNKNOWN_TYPE = "unknown"


def counted_convention(
    wanted: AttentionConvention, ops: Collection[str], products: tuple[bool, bool] | None = None
) -> tuple[AttentionConvention, str | None]:
    """The convention that a count of these ops has, and what is to be said about it.

    If no masked pair was left out, a count is `full` although `causal` was wanted. `products` says whether batched
    products were found under a mask that was read, and whether others were found; None if this was not looked for.
    """
    if wanted == "full":
        return "full", None
    # All fused attention ops have one of these words in their names.
    is_fused = any("attention" in op or "attn" in op for op in ops)
    has_masked, has_others = products or (False, any("bmm" in op for op in ops))
    is_causal = is_fused or has_masked
    return "causal" if is_causal else "full", UNMASKED_PRODUCTS if has_others or not is_causal else None


Phase = Literal["forward", "backward", "recompute"]


class Tally:
    def __init__(self) -> None:
        # The keys are op, module, compute type and phase.
        self._flops: Counter[tuple[str, str, str, str]] = Counter()
        self._counted_calls = 0
        self._uncounted: Counter[tuple[str, str, tuple[tuple[int, ...], ...]]] = Counter()
        self._notes: dict[str, None] = {}

    def add(self, op: str, module: str, phase: Phase, flops: OpFlops) -> None:
        self._counted_calls += 1
        self._flops[op, module, flops.dtype or UNKNOWN_TYPE, phase] += flops.needed
        # Extra FLOPs count like recomputation: the hardware executes them, but the model does not need them.
        self._flops[op, module, flops.dtype or UNKNOWN_TYPE, "recompute"] += flops.extra
        self.note(flops.note)

    def add_uncounted(self, op: str, module: str, tensors: Iterable[torch.Tensor] = ()) -> None:
        # Reading the shape of a nested tensor raises an error.
        self._uncounted[op, module, tuple(() if tensor.is_nested else tuple(tensor.shape) for tensor in tensors)] += 1

    def note(self, text: str | None) -> None:
        if text:
            self._notes[text] = None

    def add_to(self, other: "Tally") -> None:
        other._flops.update(self._flops)
        other._counted_calls += self._counted_calls
        other._uncounted += self._uncounted
        other._notes |= self._notes

    def leave_out_masked(self, products: MaskedProducts) -> tuple[bool, bool]:
        """Subtract FLOPs on masked pairs; return whether products were under a known mask, and whether others were."""
        masked, has_others = products.masked_flops()
        for product, needed, extra in masked:
            place = product.op, product.module, product.dtype
            self._flops[(*place, product.phase)] -= needed
            self._flops[(*place, "recompute")] -= extra
        return bool(masked), has_others

    def as_count(
        self, method: Method, attention: AttentionConvention, products: MaskedProducts | None = None
    ) -> FlopCount:
        found = None if products is None else self.leave_out_masked(products)
        by_op = self._grouped(0)
        attention, note = counted_convention(attention, by_op, found)
        self.note(note)
        total = sum(by_op.values(), PhaseFlops())
        uncounted_calls = sum(self._uncounted.values())
        calls = self._counted_calls + uncounted_calls
        return FlopCount(
            model_flops=total.forward + total.backward,
            hardware_flops=total.total,
            forward_flops=total.forward,
            backward_flops=total.backward,
            recompute_flops=total.recompute,
            method=method,
            attention=attention,
            coverage=self._counted_calls / calls if calls else 1.0,
            uncounted=tuple(UncountedOp(*key, calls) for key, calls in self._uncounted.items()),
            by_op=by_op,
            by_module=self._grouped(1),
            by_dtype={dtype: flops for dtype, flops in self._grouped(2).items() if flops.total},
            notes=tuple(self._notes),
        )

    def _grouped(self, part: int) -> dict[str, PhaseFlops]:
        groups: dict[str, PhaseFlops] = defaultdict(PhaseFlops)
        for key, flops in self._flops.items():
            groups[key[part]] += PhaseFlops(**{key[-1]: flops})
        return dict(groups)


def phases_of(count: FlopCount) -> PhaseFlops:
    return PhaseFlops(count.forward_flops, count.backward_flops, count.recompute_flops)


class Unwritten:
    """Finds kernels that bypass the dispatcher, by tensors that are read although no op has written to them.

    A Triton kernel or a CUDA extension that is called directly fills a tensor from `torch.empty` without any op.
    """

    def __init__(self) -> None:
        self._storages = ByStorage()

    def is_read_by(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> bool:
        packet = func.overloadpacket
        if packet in _MAKE_EMPTY:
            self._made(out)
            return False
        if not self._storages:
            return False
        if packet in _COPY_WHOLE:  # a copy of a tensor that no op has written counts as not written too
            if self._known(args[0]):
                self._made(out)
            return False
        is_own = func.namespace == "aten"
        # If the op is not torch's own, it may write to all: its schema may be wrong.
        into = list(written(func, args, kwargs)) if is_own else tensors_in((args, kwargs))
        read = []
        if is_own and not func.is_view and packet not in _READ_NO_VALUES:
            found = (leaf for leaf in tensors_in((args, kwargs)) if not any(leaf is other for other in into))
            read = [leaf for leaf in found if self._known(leaf)]
        self.write((*into, *read))  # those that were read too, so that each storage is reported once
        return bool(read)

    def write(self, tensors: Sequence[torch.Tensor]) -> None:
        """Record that these tensors may have been written, by an op or by a kernel that is counted by itself."""
        for tensor in tensors:
            self._storages.drop(storage_of(tensor))

    def _made(self, tensor: Any) -> None:
        if not isinstance(tensor, torch.Tensor) or not tensor.numel() or storage_of(tensor) is None:
            return
        # Torch fills some integer tensors on the CPU without an op, such as the order of the buckets of DDP.
        if tensor.is_floating_point() or tensor.is_complex() or tensor.device.type != "cpu":
            self._storages.put(storage_of(tensor), True)

    def _known(self, tensor: torch.Tensor) -> bool:
        return self._storages.get(storage_of(tensor)) is not None


class NeedsOtherRanksError(MeasurementError):
    """The model cannot run without the other ranks."""


def refuse_real_collective(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], module: str) -> None:
    """Raise NeedsOtherRanksError for a collective, unless torch only computes shapes, as for fake tensors.

    A collective that one rank runs alone hangs, or is matched with the training's next collective and corrupts it.
    Wrappers such as DDP are removed before counting (see `replica`), so only the model's own code calls collectives.
    """
    tensors = tensors_in((args, kwargs))
    if tensors and all(isinstance(tensor, FakeTensor) for tensor in tensors):
        return
    where = f"module {module!r}" if module else "the model itself"
    raise NeedsOtherRanksError(
        f"{where} calls the collective {op_name(func)}, which this rank cannot run alone; "
        "count the model without its parallelism, or pass its FLOPs to the monitor as flops_fn"
    )


def run_op(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)


class CountingMode(TorchDispatchMode):
    """Counts the FLOPs of the ops that run while the mode is active, and adds them to `tally`.

    `execute` runs an op. A trace passes a function that also handles ops which torch's fake tensors cannot run.
    `products` collects the products and masks of attention that is written as plain products.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        stack: ModuleStack,
        attention: AttentionConvention,
        execute: Execute = run_op,
        products: MaskedProducts | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        receive_higher_order_ops(type(self))
        self.tally = Tally()
        self._stack = stack
        self._attention: AttentionConvention = attention
        self._products = products
        self._execute = execute
        check_countable()
        self._module_of_node: dict[int, str] = {}
        self._unwritten = Unwritten()
        self._functions = CustomFunctions()
        self._runs_again = False

    def __torch_dispatch__(  # noqa: C901 - the cases in their order, with no further call per op
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE and type(args[0]) is FakeTensor and not args[0].fake_mode.in_kernel_invocation:
            return args[0].fake_device  # saves time, because autograd queries the device twice per op
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload):  # a higher-order op, such as flex_attention
            out = self._execute(func, args, kwargs)
            self._count_higher_order(func.name(), args, kwargs)
            return out
        if func.namespace == "prim":  # these ops only query a tensor, for example for its device
            return func(*args, **kwargs)
        if short_op_name(func) in METADATA_OPS:
            return NotImplemented
        is_distributed = distributed.is_available() and distributed.is_initialized()
        if func.namespace in COLLECTIVE_NAMESPACES and is_distributed and distributed.get_world_size() > 1:
            refuse_real_collective(func, args, kwargs, self._stack.current)
            self.tally.note(ONE_RANKS_SHARE)
        formula = find_formula(func)
        # Under inference mode, composite ops arrive undecomposed, and only their parts have formulas. Composite ops
        # on nested tensors are left whole: some of them have kernels for nested tensors, while their parts would fail.
        if (
            formula is None
            and can_decompose(func)
            and not any(isinstance(value, torch.Tensor) and value.is_nested for value in args)
        ):
            with self:  # switches the mode on again, because torch switches it off inside its handler
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        if formula is None and not costs_nothing(func):
            done, out = self._run_body(func, args, kwargs)
            if done:
                return out
        out = self._execute(func, args, kwargs)
        if self._unwritten.is_read_by(func, args, kwargs, out):
            self._add_uncounted(UNSEEN_KERNEL)
            self.tally.note(UNSEEN_KERNEL_NOTE)
        self._look_for_repetition(func, args, kwargs, out, formula)
        if formula is not None or not costs_nothing(func):
            self._count(OpCall(func, bind(func, args, kwargs), out, self._attention, needs_grad()), formula)
        elif self._products is not None and current_graph_task_id() == -1:
            self._products.note_mask(func, args, self._stack.current)
        self._runs_again = False
        return out

    def _look_for_repetition(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, formula: Formula | None
    ) -> None:
        doubt_before = self._functions.doubt
        self._runs_again = self._functions.runs_again(func, args, kwargs, out, is_product=formula is not None)
        if self._functions.doubt != doubt_before:
            self.tally.note(self._functions.doubt)

    def _run_body(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, Any]:
        """Run the Python body of a `torch.library.custom_op` and count the ops in it.

        Returns whether that worked, and the result. If the body fails, nothing is counted.
        """
        body = python_body(func)
        if body is None:
            return False, None
        whole, self.tally = self.tally, Tally()
        numbers = {} if self._products is None else self._products.numbers()
        try:
            with self:
                out = body(*args, **kwargs)
        except Exception:  # noqa: BLE001 - code of the user, which may need values of its tensors
            self.tally = whole
            if self._products is not None:
                self._products.forget_after(numbers)
            return False, None
        self.tally.add_to(whole)
        self.tally = whole
        return True, out

    def _count(self, call: OpCall, formula: Formula | None) -> None:
        name = op_name(call.func)
        try:
            flops = flops_of_call(call, formula)
        except KeyError:  # in this torch release, the op's arguments have other names than the formula knows
            flops = None
        if flops is None:
            self._add_uncounted(name, list(call.arguments.values()))
        else:
            self.add(name, flops)
            if self._products is not None:
                phase = self.phase()
                self._products.note_product(call, self._module(phase), phase, self._divided(phase, flops))

    def _count_higher_order(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if name == "flex_attention":
            sizes = flex_sizes(args[0], args[1], args[2], args[3], args[4], self._attention)
            self.add(name, replace(forward_flops(sizes), dtype=compute_type(args[0].dtype)))
        elif name == "flex_attention_backward":
            sizes = flex_sizes(args[0], args[1], args[2], args[7], args[9], self._attention)
            self.add(name, replace(backward_flops(sizes, ()), dtype=compute_type(args[0].dtype)))
        elif name.startswith("triton_kernel_wrapper"):
            kernel, constants = graph_kernel(kwargs["kernel_idx"], kwargs["constant_args_idx"])
            self.add_kernel(kernel, {**constants, **kwargs["kwargs"]})
        else:
            self._add_uncounted(name, args)

    def add(self, name: str, flops: OpFlops) -> None:
        phase = self.phase()
        self.tally.add(_short(name), self._module(phase), phase, self._divided(phase, flops))

    def _divided(self, phase: Phase, flops: OpFlops) -> OpFlops:
        """Count what runs a second time as extra FLOPs."""
        if phase == "recompute" or self._runs_again:
            return replace(flops, needed=0, extra=flops.needed + flops.extra)
        return flops

    def add_threads(self) -> None:
        self.tally.add_uncounted(THREADS, "")
        self.tally.note(THREADS_NOTE)

    def add_kernel(self, kernel: Any, arguments: Mapping[str, Any]) -> None:
        flops = kernels.flops_of(kernel, arguments)
        self._unwritten.write(tensors_in(list(arguments.values())))
        if flops is None:
            self._add_uncounted(kernels.name_of(kernel), list(arguments.values()))
        elif flops:
            self.add(kernels.name_of(kernel), OpFlops(flops, dtype=type_of_product(arguments)))

    def _add_uncounted(self, name: str, arguments: Sequence[Any] = ()) -> None:
        tensors = [each for each in tensors_in(list(arguments)) if each.is_floating_point() or each.is_complex()]
        self.tally.add_uncounted(_short(name), self._module(self.phase()), tensors)

    def phase(self) -> Phase:
        """Return the phase of the running op: forward outside autograd's engine, backward or recompute inside it.

        Only recomputation calls modules or checkpointing inside of the engine. Grad mode does not tell: a custom
        autograd function or a nested checkpoint switches it off, and a model may take a gradient in its forward pass.
        """
        if current_graph_task_id() == -1:
            return "forward"
        return "recompute" if runs_forward_again() else "backward"

    def _module(self, phase: Phase) -> str:
        """Return the module path of an op; in a backward pass, of the module that made the running autograd node."""
        if phase == "backward":
            node = current_autograd_node()
            return "" if node is None else self._module_of_node.get(sequence_nr(node), "")
        # Autograd makes the op's node before a dispatch mode runs, so the node has the newest sequence number.
        self._module_of_node.setdefault((recorded_operations() or 0) - 1, self._stack.current)
        return self._stack.current


def needs_grad() -> tuple[bool, ...]:
    """Whether each input of the running autograd node needs a gradient; otherwise its edge has no node."""
    node: Any = current_autograd_node()
    return () if node is None else tuple(edge is not None for edge, _ in node.next_functions)


def flops_of_call(call: OpCall, formula: Formula | None) -> OpFlops | None:
    tensors = [value for value in call.arguments.values() if isinstance(value, torch.Tensor)]
    # The shape of a sparse or nested tensor does not determine the FLOPs.
    is_dense = all(tensor.layout is torch.strided and not tensor.is_nested for tensor in tensors)
    if not is_dense and op_name(call.func) not in TAKE_NESTED:
        formula = sparse_product_flops
    answer = None if formula is None else formula(call)
    if answer is None:
        return None
    flops = OpFlops(answer) if isinstance(answer, int) else answer
    # A complex multiply-add takes four real ones.
    times = 4 if any(tensor.is_complex() for tensor in tensors) else 1
    dtype = flops.dtype or type_of_product(call.arguments)
    return replace(flops, needed=times * flops.needed, extra=times * flops.extra, dtype=dtype)


def _short(name: str) -> str:
    return name.removeprefix("aten::")
