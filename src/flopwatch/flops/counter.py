"""The dispatch mode that sees every op of a step and tells forward, backward and recomputation apart."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode

from flopwatch.flops.collectives import ONE_RANKS_SHARE, is_collective, refuse_real_collective
from flopwatch.flops.compute_type import compute_type, type_of_product
from flopwatch.flops.formulas import OpCall, OpFlops, bind, find_formula
from flopwatch.flops.formulas.attention import attention_backward_flops, attention_forward_flops
from flopwatch.flops.replica import ModuleStack
from flopwatch.flops.suspects import is_suspect
from flopwatch.flops.tally import Phase, Tally, float_tensors
from flopwatch.records import AttentionConvention

Execute = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


# Questions about a tensor, not work. An exception here would cross C++ code that may not throw, and end the process.
_QUESTIONS = {
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


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)


class CountingMode(TorchDispatchMode):
    """Counts what runs inside it into `tally`.

    Args:
        stack: Says which module runs.
        attention: The convention for fused attention.
        execute: Runs an op; the trace gives its own, which helps out where fake tensors have no answer.
    """

    supports_higher_order_operators = True

    def __init__(self, stack: ModuleStack, attention: AttentionConvention, execute: Execute = _run) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tally = Tally()
        self.in_backward = False
        self._stack = stack
        self._attention: AttentionConvention = attention
        self._execute = execute
        self._module_of_node: dict[int, str] = {}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            return self._higher_order(func, args, kwargs)
        if func.namespace == "prim":
            return func(*args, **kwargs)
        if func._opname in _QUESTIONS:
            return NotImplemented
        if is_collective(func):
            refuse_real_collective(func, args, kwargs, self._stack.current)
            self.tally.note(ONE_RANKS_SHARE)
            return self._execute(func, args, kwargs)
        formula = find_formula(func)
        if formula is None and func._can_decompose():
            # Under inference mode composite ops arrive whole; their parts are what we know.
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        out = self._execute(func, args, kwargs)
        if formula is not None and _is_dense(args):
            call = OpCall(func, bind(func, args, kwargs), out, self._attention, self._needs_grad())
            self.add(func._schema.name, _flops(formula(call), args), type_of_product(call.arguments))
        elif formula is not None or is_suspect(func, [*args, *kwargs.values()], out):
            self._add_uncounted(func._schema.name, args)
        return out

    def _higher_order(self, func: HigherOrderOperator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = self._execute(func, args, kwargs)
        name = func.name()
        if name == "flex_attention":
            self.add(name, attention_forward_flops(*args[:3]), compute_type(args[0].dtype))
        elif name == "flex_attention_backward":
            self.add(name, attention_backward_flops(*args[:3]), compute_type(args[0].dtype))
        else:
            self._add_uncounted(name, args)
        return out

    def add(self, name: str, flops: OpFlops, dtype: str | None) -> None:
        """Put one op's FLOPs down to the phase and the module that run now."""
        phase = self._phase()
        module = self._module(phase)
        if phase == "recompute":
            flops = replace(flops, needed=0, extra=flops.needed + flops.extra)
        self.tally.add(_short(name), module, phase, flops, dtype)

    def _add_uncounted(self, name: str, args: tuple[Any, ...]) -> None:
        self.tally.add_uncounted(_short(name), self._module(self._phase()), float_tensors(args))

    def _phase(self) -> Phase:
        """Forward outside of autograd's engine; inside it, running the forward once more is recomputation.

        Both kinds of checkpointing switch grad mode on for that, and call modules, which a backward op never does. The
        second sign is needed too: inside a custom autograd function or a nested checkpoint grad mode is off again. A
        gradient taken inside the forward pass (a gradient penalty) looks the same, hence `in_backward`.
        """
        if torch._C._current_graph_task_id() == -1:
            return "forward"
        runs_again = torch.is_grad_enabled() or self._stack.is_inside
        return "recompute" if self.in_backward and runs_again else "backward"

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


def _flops(answer: OpFlops | int, args: tuple[Any, ...]) -> OpFlops:
    flops = answer if isinstance(answer, OpFlops) else OpFlops(answer)
    if any(isinstance(value, torch.Tensor) and value.is_complex() for value in args):
        # One complex multiply-add is four real ones.
        return replace(flops, needed=4 * flops.needed, extra=4 * flops.extra)
    return flops


def _is_dense(args: tuple[Any, ...]) -> bool:
    """Shapes tell nothing of the work in sparse and nested tensors."""
    return all(value.layout is torch.strided for value in args if isinstance(value, torch.Tensor))


def _short(name: str) -> str:
    return name.removeprefix("aten::")
