"""A dispatch mode that counts the FLOPs of a step's ops by phase (forward, backward, recomputation) and by module.

The mode also finds kernels that bypass torch's dispatcher, and prevents one rank from running a collective alone.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

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
    type_of_product,
)
from flopwatch.flops.tracing import kernels
from flopwatch.flops.tracing.custom_functions import ByStorage, CustomFunctions, storage_of, written
from flopwatch.flops.tracing.replica import ModuleStack
from flopwatch.flops.tracing.tally import Phase, Tally
from flopwatch.flops.tree import tensors_in
from flopwatch.records.flops import AttentionConvention
from flopwatch.torch_internals.autograd import (
    current_autograd_node,
    current_graph_task_id,
    graph_kernel,
    is_checkpoint_recomputing,
    recorded_operations,
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
    op_packet,
    python_body,
    receive_higher_order_ops,
    short_op_name,
)
from flopwatch.torch_internals.probes import check_countable

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


class Unwritten:
    """Finds kernels that bypass the dispatcher, by tensors that are read although no op has written to them.

    A Triton kernel or a CUDA extension that is called directly fills a tensor from `torch.empty` without any op.
    """

    def __init__(self) -> None:
        self._storages = ByStorage()

    def is_read_by(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> bool:
        """Record an op that has run, and return whether it read a tensor that no op had written."""
        packet = op_packet(func)
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
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        stack: ModuleStack,
        attention: AttentionConvention,
        execute: Execute = run_op,
        tally: Tally | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        receive_higher_order_ops(type(self))
        self.tally = tally or Tally()
        self.in_backward = False
        self._stack = stack
        self._attention: AttentionConvention = attention
        self._execute = execute
        check_countable()
        self._module_of_node: dict[int, str] = {}
        self._unwritten = Unwritten()
        self._functions = CustomFunctions(lambda: self._phase() == "recompute")
        self._runs_again = False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE and type(args[0]) is FakeTensor and not args[0].fake_mode.in_kernel_invocation:
            return args[0].fake_device  # saves time, because autograd queries the device twice per op
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload):  # a higher-order op, such as flex_attention
            return self._higher_order(func, args, kwargs)
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
            self._count(OpCall(func, bind(func, args, kwargs), out, self._attention, self._needs_grad()), formula)
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
        parts = Tally()
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
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        # The shape of a sparse or nested tensor does not determine the FLOPs.
        is_dense = all(tensor.layout is torch.strided and not tensor.is_nested for tensor in tensors)
        if not is_dense and name not in TAKE_NESTED:
            flops = sparse_product_flops(call)
        else:
            try:
                answer = None if formula is None else formula(call)
            except KeyError:  # in this torch release, the op's arguments have other names than the formula knows
                answer = None
            flops = OpFlops(answer) if isinstance(answer, int) else answer
        if flops is None:
            self._add_uncounted(name, values)
        else:
            self.add(name, with_complex(flops, values), type_of_product(call.arguments))

    def _higher_order(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = self._execute(func, args, kwargs)
        self._count_higher_order(func.name(), args, kwargs)
        return out

    def _count_higher_order(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if name == "flex_attention":
            sizes = flex_sizes(args[0], args[1], args[2], args[3], args[4], self._attention)
            self.add(name, forward_flops(sizes), compute_type(args[0].dtype))
        elif name == "flex_attention_backward":
            sizes = flex_sizes(args[0], args[1], args[2], args[7], args[9], self._attention)
            self.add(name, backward_flops(sizes, ()), compute_type(args[0].dtype))
        elif name.startswith("triton_kernel_wrapper"):
            kernel, constants = graph_kernel(kwargs["kernel_idx"], kwargs["constant_args_idx"])
            self.add_kernel(kernel, {**constants, **kwargs["kwargs"]})
        else:
            self._add_uncounted(name, args)

    def add(self, name: str, flops: OpFlops, dtype: str | None) -> None:
        """Add one op's FLOPs to the tally, under the current phase and module."""
        phase = self._phase()
        module = self._module(phase)
        if phase == "recompute" or self._runs_again:
            flops = replace(flops, needed=0, extra=flops.needed + flops.extra)
        self.tally.add(_short(name), module, phase, flops, dtype)

    def add_threads(self) -> None:
        """Record that the model has started a thread in which not all ops were counted."""
        self.tally.add_uncounted(THREADS, "", ())
        self.tally.note(THREADS_NOTE)

    def add_kernel(self, kernel: Any, arguments: Mapping[str, Any]) -> None:
        """Add the FLOPs of a Triton kernel that is launched past torch's dispatcher."""
        flops = kernels.flops_of(kernel, arguments)
        self._unwritten.write(tensors_in(list(arguments.values())))
        if flops is None:
            self._add_uncounted(kernels.name_of(kernel), list(arguments.values()))
        elif flops:
            self.add(kernels.name_of(kernel), OpFlops(flops), type_of_product(arguments))

    def _add_uncounted(self, name: str, arguments: Sequence[Any] = ()) -> None:
        tensors = [each for each in tensors_in(list(arguments)) if each.is_floating_point() or each.is_complex()]
        self.tally.add_uncounted(_short(name), self._module(self._phase()), tensors)

    def _phase(self) -> Phase:
        """Return the phase of the running op: forward outside autograd's engine, backward or recompute inside it.

        In the step's backward pass, an op is recomputation if grad mode is on or a module is running, because only
        checkpointing causes either. Testing grad mode alone is not enough, because a custom autograd function or a
        nested checkpoint switches it off. A model may also take a gradient inside its forward pass (a gradient penalty,
        forces). Then modules run with grad mode on anyway, so an op is recomputation only if autograd's engine has
        called the running module, or if checkpointing's saved-tensor hook is running.
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
        """Return the module path of an op; in a backward pass, of the module that made the running autograd node."""
        if phase == "backward":
            node = current_autograd_node()
            return "" if node is None else self._module_of_node.get(sequence_nr(node), "")
        # Autograd makes the op's node before a dispatch mode runs, so the node has the newest sequence number.
        self._module_of_node.setdefault((recorded_operations() or 0) - 1, self._stack.current)
        return self._stack.current

    @staticmethod
    def _needs_grad() -> tuple[bool, ...]:
        node = current_autograd_node()
        if node is None:
            return ()
        # If an input needs no gradient, its edge has no node.
        return tuple(edge is not None for edge, _ in cast("Any", node).next_functions)


def with_complex(flops: OpFlops, values: list[Any]) -> OpFlops:
    if any(isinstance(value, torch.Tensor) and value.is_complex() for value in values):
        # A complex multiply-add takes four real ones.
        return replace(flops, needed=4 * flops.needed, extra=4 * flops.extra)
    return flops


def _short(name: str) -> str:
    return name.removeprefix("aten::")
