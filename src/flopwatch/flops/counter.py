"""The dispatch mode that sees every op of a step and tells forward, backward and recomputation apart."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from flopwatch.flops.collectives import ONE_RANKS_SHARE, is_collective, refuse_real_collective
from flopwatch.flops.compute_type import compute_type, type_of_product
from flopwatch.flops.custom_functions import CustomFunctions
from flopwatch.flops.custom_ops import python_body
from flopwatch.flops.event_log import EventLog
from flopwatch.flops.formulas import Formula, OpCall, OpFlops, bind, find_formula
from flopwatch.flops.formulas.encoder import KNOW_NESTED
from flopwatch.flops.formulas.flex import flex_backward, flex_forward
from flopwatch.flops.formulas.sparse import sparse_product_flops
from flopwatch.flops.free_ops import costs_nothing
from flopwatch.flops.mode_risks import RISKY
from flopwatch.flops.replica import ModuleStack
from flopwatch.flops.tally import Phase, Tally, float_tensors
from flopwatch.flops.unwritten import UNSEEN_KERNEL, UNSEEN_KERNEL_NOTE, Unwritten
from flopwatch.records import AttentionConvention

Execute = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]

THREADS = "threads"
THREADS_NOTE = "the model started threads while it was counted: what torch runs in them is not counted"
TRITON_KERNEL = "Triton kernel"

# Questions about a tensor, not work. An exception here would cross C++ code that may not throw, and end the process.
QUESTIONS = {
    "dim",
    "is_contiguous",
    "is_non_overlapping_and_dense",
    "is_strides_like_format",
    "numel",
    "size",
    "storage_offset",
    "stride",
    "sym_is_contiguous",
    "sym_numel",
    "sym_size",
    "sym_storage_offset",
    "sym_stride",
}


_DEVICE = torch.ops.prim.device.default


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)


class CountingMode(TorchDispatchMode):
    """Counts what runs inside it into `tally`.

    Args:
        stack: Says which module runs.
        attention: The convention for fused attention.
        execute: Runs an op; the trace gives its own, which helps out where fake tensors have no answer.
        tally: Where the FLOPs go, a new one unless given.
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
        """Those met that torch computes in another way under a mode."""
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
            return args[0].fake_device  # what the tensor itself would say; autograd asks twice per op
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            return self._higher_order(func, args, kwargs)
        if func.namespace == "prim":
            return func(*args, **kwargs)
        if func._opname in QUESTIONS:
            return NotImplemented
        if is_collective(func):
            self._meet_collective(func, args, kwargs)
        if func._schema.name in RISKY:
            self.risky_ops.add(func._schema.name)
        formula = find_formula(func)
        if formula is None and self._takes_apart(func, args):
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
        told = self._functions.doubt
        self._runs_again = self._functions.runs_again(func, args, kwargs, out, is_product=formula is not None)
        if self._functions.doubt != told:
            self.tally.note(self._functions.doubt)

    def _takes_apart(self, func: OpOverload, args: tuple[Any, ...]) -> bool:
        """Whether an op is run as the ops it is made of.

        Under inference mode composite ops arrive whole; their parts are what we know. Nested tensors have kernels of
        their own for some of them, and fail in the parts.
        """
        return func._can_decompose() and not _has_nested(args)

    def _meet_collective(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        refuse_real_collective(func, args, kwargs, self._stack.current)
        self.tally.note(ONE_RANKS_SHARE)

    def _run_body(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, Any]:
        """Count an op that is written in Python by what it calls. Where that fails, as if it had not been tried."""
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
        parts.tell(whole)
        return True, out

    def _count(self, call: OpCall, formula: Formula | None) -> None:
        values, name = list(call.arguments.values()), call.func._schema.name
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
        """Put one op's FLOPs down to the phase and the module that run now."""
        phase = self._phase()
        module = self._module(phase)
        if phase == "recompute" or self._runs_again:
            flops = replace(flops, needed=0, extra=flops.needed + flops.extra)
        self.tally.add(_short(name), module, phase, flops, dtype)

    def _add_unseen_kernel(self) -> None:
        self.tally.add_uncounted(UNSEEN_KERNEL, self._module(self._phase()), ())
        self.tally.note(UNSEEN_KERNEL_NOTE)

    def add_threads(self) -> None:
        """The model has started a thread that nobody here can see into, or not to its end."""
        self.tally.add_uncounted(THREADS, "", ())
        self.tally.note(THREADS_NOTE)

    def add_triton_kernel(self) -> None:
        """A Triton kernel was launched directly."""
        self.tally.add_uncounted(TRITON_KERNEL, self._module(self._phase()), ())

    def _add_uncounted(self, name: str, args: tuple[Any, ...]) -> None:
        self.tally.add_uncounted(_short(name), self._module(self._phase()), float_tensors(args))

    def _phase(self) -> Phase:
        """Forward outside of autograd's engine; inside it, running the forward once more is recomputation.

        Both kinds of checkpointing switch grad mode on for that, and call modules, which a backward op never does. The
        second sign is needed too: inside a custom autograd function or a nested checkpoint grad mode is off again. A
        gradient taken inside the forward pass (a gradient penalty, forces) has grad mode on and runs inside a module;
        there, modules entered since it began and the checkpoint's own hook on saved tensors are the signs.
        """
        task = torch._C._current_graph_task_id()
        if task == -1:
            return "forward"
        if self.in_backward:
            runs_again = torch.is_grad_enabled() or self._stack.is_inside or _is_recomputing()
        else:
            runs_again = self._stack.entered_in == task or _is_recomputing()
        return "recompute" if runs_again else "backward"

    def _module(self, phase: Phase) -> str:
        """The module an op belongs to; in the backward pass, the one whose forward op made the autograd node."""
        if phase == "backward":
            node = torch._C._current_autograd_node()
            return "" if node is None else self._module_of_node.get(node._sequence_nr(), "")
        # Below autograd an op's node exists already: it took the number before the next one.
        self._module_of_node.setdefault(torch._C._autograd._get_sequence_nr() - 1, self._stack.current)
        return self._stack.current

    @staticmethod
    def _needs_grad() -> tuple[bool, ...]:
        node = torch._C._current_autograd_node()
        if node is None:
            return ()
        return tuple(edge is not None for edge, _ in cast("Any", node).next_functions)


def _is_recomputing() -> bool:
    """Whether `torch.utils.checkpoint` runs a part of the forward pass again: it then catches what autograd saves."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return bool(hooks) and "_recomputation_hook" in getattr(hooks[0], "__qualname__", "")


def _as_flops(answer: OpFlops | int | None) -> OpFlops | None:
    return OpFlops(answer) if isinstance(answer, int) else answer


def _with_complex(flops: OpFlops, values: list[Any]) -> OpFlops:
    if any(isinstance(value, torch.Tensor) and value.is_complex() for value in values):
        # One complex multiply-add is four real ones.
        return replace(flops, needed=4 * flops.needed, extra=4 * flops.extra)
    return flops


def _is_dense(values: list[Any]) -> bool:
    """Shapes tell nothing of the work in sparse and nested tensors."""
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    return all(tensor.layout is torch.strided and not tensor.is_nested for tensor in tensors)


def _has_nested(args: tuple[Any, ...]) -> bool:
    return any(isinstance(value, torch.Tensor) and value.is_nested for value in args)


def _short(name: str) -> str:
    return name.removeprefix("aten::")
