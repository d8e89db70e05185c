"""The dispatch mode that counts every op of a step, by phase (forward, backward, recomputation) and by module.

Two things need care besides formulas: kernels that run without the dispatcher (`Unwritten`), and collectives, which one
rank must not run while the other ranks do not count.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import distributed
from torch.multiprocessing.reductions import StorageWeakRef

from flopwatch.errors import MeasurementError
from flopwatch.flops.formulas import Formula, OpCall, OpFlops, bind, find_formula
from flopwatch.flops.formulas.attention import flex_backward, flex_forward
from flopwatch.flops.formulas.free_ops import COLLECTIVE_NAMESPACES, RISKY, costs_nothing
from flopwatch.flops.formulas.layers import KNOW_NESTED
from flopwatch.flops.formulas.matrices import sparse_product_flops
from flopwatch.flops.formulas.registry import compute_type, type_of_product
from flopwatch.flops.tracing.custom_functions import CustomFunctions, storage_address, written
from flopwatch.flops.tracing.replica import ModuleStack
from flopwatch.flops.tracing.tally import EventLog, Phase, Tally, float_tensors
from flopwatch.records.flops import AttentionConvention
from flopwatch.torch_internals import (
    PIN_MEMORY,
    TO_COPY,
    FakeTensor,
    HigherOrderOperator,
    OpOverload,
    TorchDispatchMode,
    can_decompose,
    current_autograd_node,
    current_graph_task_id,
    is_checkpoint_recomputing,
    next_sequence_nr,
    op_name,
    op_packet,
    python_body,
    sequence_nr,
    short_op_name,
    tree_leaves,
)

Execute = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]

THREADS = "threads"
THREADS_NOTE = "the model started threads while it was counted: what torch runs in them is not counted"
TRITON_KERNEL = "Triton kernel"
UNSEEN_KERNEL = "kernel past the dispatcher"
UNSEEN_KERNEL_NOTE = (
    "an uninitialised tensor is read: a kernel that does not go through torch's dispatcher (Triton, a CUDA extension) "
    "may have filled it; its FLOPs are not counted"
)
ONE_RANKS_SHARE = "the model's own code calls collectives: what is counted is the share of this rank"

_aten = torch.ops.aten
_MAKE_EMPTY = {
    _aten.empty,
    _aten.empty_like,
    _aten.empty_permuted,
    _aten.empty_strided,
    _aten.new_empty,
    _aten.new_empty_strided,
}
# They read the shape and type of their input, not its values.
_READ_NO_VALUES = {
    _aten.bernoulli,
    _aten.full_like,
    _aten.new_full,
    _aten.new_ones,
    _aten.new_zeros,
    _aten.ones_like,
    _aten.rand_like,
    _aten.randint_like,
    _aten.randn_like,
    _aten.resize_,
    _aten.set_,
    _aten.zeros_like,
}
_COPY_WHOLE = {_aten.clone, TO_COPY, PIN_MEMORY, _aten.lift_fresh_copy}
_DEVICE = torch.ops.prim.device.default
METADATA_OPS = {
    *("dim", "is_contiguous", "is_non_overlapping_and_dense", "is_strides_like_format", "numel", "size"),
    *("storage_offset", "stride"),
    *("sym_is_contiguous", "sym_numel", "sym_size", "sym_storage_offset", "sym_stride"),
}
"""They do no work. A mode must not handle them: an exception would cross C++ code that may not throw, and abort."""


class Unwritten:
    """Finds kernels that do not go through the dispatcher, by the storages that were made empty and never written.

    A Triton kernel or a CUDA extension that is called directly gets its output from `torch.empty` and fills it unseen:
    the dispatcher sees a tensor that is made, not written by any op, and then read.
    """

    def __init__(self) -> None:
        # The weak reference keeps torch from giving the address to another storage.
        self._storages: dict[int, StorageWeakRef] = {}

    def is_read_by(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> bool:
        """Record one op that ran; true when it read a tensor that no op had written."""
        packet = op_packet(func)
        if packet in _MAKE_EMPTY:
            self._made(out)
            return False
        if not self._storages:
            return False
        if packet in _COPY_WHOLE:  # a copy of an unwritten tensor is unwritten too
            if self._known(args[0]):
                self._made(out)
            return False
        written = list(_written_into(func, args, kwargs))
        read = self._values_read(func, args, kwargs, written)
        for tensor in written:
            self._storages.pop(storage_address(tensor), None)
        for tensor in read:
            self._storages.pop(storage_address(tensor), None)  # one report per storage
        return bool(read)

    def _values_read(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], written: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        if func.is_view or op_packet(func) in _READ_NO_VALUES or func.namespace != "aten":
            return []
        return [
            leaf
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, torch.Tensor) and not any(leaf is other for other in written) and self._known(leaf)
        ]

    def _made(self, tensor: Any) -> None:
        if isinstance(tensor, torch.Tensor) and tensor.numel() and storage_address(tensor):
            self._storages[storage_address(tensor)] = StorageWeakRef(tensor.untyped_storage())

    def _known(self, tensor: torch.Tensor) -> bool:
        return storage_address(tensor) in self._storages


def _written_into(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors an op writes into. For ops outside torch these are all its arguments: their schemas may be wrong."""
    if func.namespace != "aten":
        yield from (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
        return
    yield from written(func, args, kwargs)


class NeedsOtherRanksError(MeasurementError):
    """The model cannot be run without the other ranks."""


def is_collective(func: Any) -> bool:
    """Whether this op communicates with other ranks."""
    is_distributed = distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
    return func.namespace in COLLECTIVE_NAMESPACES and is_distributed


def refuse_real_collective(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], module: str) -> None:
    """Raise unless all tensors are fake, for which torch only works out the shapes.

    A collective that one rank runs alone hangs, or pairs up with the training's next one and corrupts it. Wrappers that
    only spread a model over ranks are removed before counting (see `replica`), so this one is the model's own.
    """
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    if tensors and all(isinstance(tensor, FakeTensor) for tensor in tensors):
        return
    where = f"module {module!r}" if module else "the model itself"
    raise NeedsOtherRanksError(
        f"{where} calls the collective {op_name(func)}, which this rank cannot run alone; "
        "count the model without its parallelism, or give its FLOPs yourself (flops_fn of the monitor)"
    )


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)


class CountingMode(TorchDispatchMode):
    """Counts what runs inside it into `tally`.

    Args:
        stack: Knows which module is running.
        attention: The convention for fused attention.
        execute: Runs an op. A trace passes its own, which also handles ops that torch's fake tensors cannot run.
        tally: Receives the FLOPs; a new one by default.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        stack: ModuleStack,
        attention: AttentionConvention,
        execute: Execute = _run,
        tally: Tally | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tally = tally or Tally()
        self.in_backward = False
        self.risky_ops: set[str] = set()
        """Ops of this step that torch computes differently while a dispatch mode is on."""
        self._stack = stack
        self._attention: AttentionConvention = attention
        self._execute = execute
        self._module_of_node: dict[int, str] = {}
        self._unwritten = Unwritten()
        self._functions = CustomFunctions(lambda: self._phase() == "recompute")
        self._runs_again = False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE and type(args[0]) is FakeTensor and not args[0].fake_mode.in_kernel_invocation:
            return args[0].fake_device  # the tensor's own answer, without its detour; autograd asks twice per op
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            return self._higher_order(func, args, kwargs)
        # They query a tensor, for its device for example, and do no work.
        if func.namespace == "prim":
            return func(*args, **kwargs)
        if short_op_name(func) in METADATA_OPS:
            return NotImplemented
        if is_collective(func):
            self._meet_collective(func, args, kwargs)
        if op_name(func) in RISKY:
            self.risky_ops.add(op_name(func))
        formula = find_formula(func)
        # Torch switches a mode off inside its own handler; `with self` switches it on again for the parts.
        if formula is None and self._must_decompose(func, args):
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        if formula is None and not costs_nothing(func):
            done, out = self._run_body(func, args, kwargs)
            if done:
                return out
        out = self._execute(func, args, kwargs)
        if self._unwritten.is_read_by(func, args, kwargs, out):
            self._add_unseen_kernel()
        self._look_for_repetition(func, args, kwargs, out, formula)
        if formula is not None or not costs_nothing(func):
            self._count(OpCall(func, bind(func, args, kwargs), out, self._attention, self._needs_grad()), formula)
        self._runs_again = False
        return out

    def _look_for_repetition(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, formula: Formula | None
    ) -> None:
        """Whether an op that ran is a product that a custom autograd function computes again."""
        doubt_before = self._functions.doubt
        self._runs_again = self._functions.runs_again(func, args, kwargs, out, is_product=formula is not None)
        if self._functions.doubt != doubt_before:
            self.tally.note(self._functions.doubt)

    def _must_decompose(self, func: OpOverload, args: tuple[Any, ...]) -> bool:
        """Whether an op is run as the ops it is composed of.

        Under inference mode composite ops arrive whole, and formulas exist for their parts. Nested tensors have kernels
        for some composite ops, and their parts would fail.
        """
        return can_decompose(func) and not _has_nested(args)

    def _meet_collective(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        refuse_real_collective(func, args, kwargs, self._stack.current)
        self.tally.note(ONE_RANKS_SHARE)

    def _run_body(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, Any]:
        """Count a `torch.library.custom_op` by the ops that its Python body calls; a failed attempt counts nothing."""
        body = python_body(func)
        if body is None:
            return False, None
        parts = EventLog()
        whole, self.tally = self.tally, parts
        try:
            with self:
                out = body(*args, **kwargs)
        except Exception:
            self.tally = whole
            return False, None
        self.tally = whole
        parts.add_to(whole)
        return True, out

    def _count(self, call: OpCall, formula: Formula | None) -> None:
        values, name = list(call.arguments.values()), op_name(call.func)
        if not _is_dense(values) and name not in KNOW_NESTED:
            flops = sparse_product_flops(call)
        else:
            flops = None if formula is None else _as_flops(formula(call))
        if flops is None:
            self.tally.add_uncounted(_short(name), self._module(self._phase()), float_tensors(values))
        else:
            self.add(name, _with_complex(flops, values), type_of_product(call.arguments))

    def _higher_order(self, func: HigherOrderOperator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = self._execute(func, args, kwargs)
        name = func.name()
        if name == "flex_attention":
            query, key, value, score_mod, block_mask = args[:5]
            flops = flex_forward(query, key, value, score_mod, block_mask, self._attention)
            self.add(name, flops, compute_type(query.dtype))
        elif name == "flex_attention_backward":
            query, key, value = args[:3]
            flops = flex_backward(query, key, value, args[7], args[9], self._attention)
            self.add(name, flops, compute_type(query.dtype))
        else:
            self._add_uncounted(name, args)
        return out

    def add(self, name: str, flops: OpFlops, dtype: str | None) -> None:
        """Attribute one op's FLOPs to the current phase and module."""
        phase = self._phase()
        module = self._module(phase)
        if phase == "recompute" or self._runs_again:
            flops = replace(flops, needed=0, extra=flops.needed + flops.extra)
        self.tally.add(_short(name), module, phase, flops, dtype)

    def _add_unseen_kernel(self) -> None:
        self.tally.add_uncounted(UNSEEN_KERNEL, self._module(self._phase()), ())
        self.tally.note(UNSEEN_KERNEL_NOTE)

    def add_threads(self) -> None:
        """The model has started a thread whose ops were not counted, or not all of them."""
        self.tally.add_uncounted(THREADS, "", ())
        self.tally.note(THREADS_NOTE)

    def add_triton_kernel(self) -> None:
        self.tally.add_uncounted(TRITON_KERNEL, self._module(self._phase()), ())

    def _add_uncounted(self, name: str, args: tuple[Any, ...]) -> None:
        self.tally.add_uncounted(_short(name), self._module(self._phase()), float_tensors(args))

    def _phase(self) -> Phase:
        """Forward outside autograd's engine; inside it, backward, or recomputation where the forward pass runs again.

        Both kinds of checkpointing enable grad mode and call modules, which a backward op never does. Grad mode alone
        is not enough: inside a custom autograd function or a nested checkpoint it is off again. A gradient that is
        taken inside the forward pass (a gradient penalty, forces) has grad mode on and runs inside a module anyway;
        there, recomputation shows in a module entered since the engine began, or in checkpointing's saved-tensor hook.
        """
        task = current_graph_task_id()
        if task == -1:
            return "forward"
        if self.in_backward:
            runs_again = torch.is_grad_enabled() or self._stack.is_inside or is_checkpoint_recomputing()
        else:
            runs_again = self._stack.entered_in == task or is_checkpoint_recomputing()
        return "recompute" if runs_again else "backward"

    def _module(self, phase: Phase) -> str:
        """The module an op belongs to; in the backward pass, the module whose forward op made the autograd node."""
        if phase == "backward":
            node = current_autograd_node()
            return "" if node is None else self._module_of_node.get(sequence_nr(node), "")
        # The dispatch mode runs below autograd, so the op's node exists: it took the number before the next one.
        self._module_of_node.setdefault(next_sequence_nr() - 1, self._stack.current)
        return self._stack.current

    @staticmethod
    def _needs_grad() -> tuple[bool, ...]:
        node = current_autograd_node()
        if node is None:
            return ()
        # An edge without a node leads to an input that needs no gradient.
        return tuple(edge is not None for edge, _ in cast("Any", node).next_functions)


def _as_flops(answer: OpFlops | int | None) -> OpFlops | None:
    return OpFlops(answer) if isinstance(answer, int) else answer


def _with_complex(flops: OpFlops, values: list[Any]) -> OpFlops:
    if any(isinstance(value, torch.Tensor) and value.is_complex() for value in values):
        # A complex multiply-add takes four real ones.
        return replace(flops, needed=4 * flops.needed, extra=4 * flops.extra)
    return flops


def _is_dense(values: list[Any]) -> bool:
    """False for sparse and nested tensors, whose shapes do not determine the work."""
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    return all(tensor.layout is torch.strided and not tensor.is_nested for tensor in tensors)


def _has_nested(args: tuple[Any, ...]) -> bool:
    return any(isinstance(value, torch.Tensor) and value.is_nested for value in args)


def _short(name: str) -> str:
    return name.removeprefix("aten::")
