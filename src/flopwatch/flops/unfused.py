"""Keeps attention whole where torch would take it apart.

`scaled_dot_product_attention` has no fused kernel for every case (dropout on the CPU, values of another width than
queries): it then runs as plain matrix products, which do not show that they are attention, nor its mask. For the
causal convention that must be known, so a trace puts one op in their place, with the same shapes and gradients.

It must be known too for a model on an accelerator, whose kernels keep the type: the CPU's products run in fp32.

`flex_attention` has no backward pass on the CPU, where the stand-ins are: there it is replaced in the same way.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._higher_order_ops import flex_attention as flex_attention_op
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention import flex_attention as flex_module
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from flopwatch.flops.compute_type import compute_type
from flopwatch.flops.formulas.attention import AttentionCall, unfused_backward, unfused_forward
from flopwatch.flops.formulas.flex import flex_backward, flex_forward
from flopwatch.flops.formulas.registry import OpFlops
from flopwatch.records import AttentionConvention

Add = Callable[[str, OpFlops, str], None]
_NAME = "scaled_dot_product_attention"


class WholeAttention(TorchFunctionMode):
    """Replaces attention that would be taken apart; `add` gets its FLOPs."""

    def __init__(self, add: Add, attention: AttentionConvention) -> None:
        self._add = add
        self._attention: AttentionConvention = attention

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            call = AttentionCall.bind(*args, **kwargs)
            if not call.is_fused():
                operands = map(_under_autocast, (call.query, call.key, call.value))
                return _Attention.apply(*operands, call, self._attention, self._add)  # type: ignore[no-untyped-call]
        if func is flex_attention_op:
            return self._flex(*args, **kwargs)
        if getattr(func, "__self__", None) is torch.Tensor.requires_grad and _is_flex_asking(sys._getframe(1)):
            return False
        return func(*args, **kwargs)

    def _flex(self, query: Any, key: Any, value: Any, score_mod: Any, block_mask: Any, *rest: Any, **named: Any) -> Any:
        buffers = tree_leaves((rest, named))
        learned = [item for item in buffers if isinstance(item, torch.Tensor) and item.requires_grad]
        about = _FlexCall(score_mod, block_mask, self._attention, self._add)
        out = _FlexAttention.apply(query, key, value, about, *learned)  # type: ignore[no-untyped-call]
        statistics = query.new_zeros(query.shape[:-1], dtype=torch.float32)
        return out, statistics, statistics


def _under_autocast(tensor: Any) -> Any:
    """As autocast hands it to attention."""
    changes = torch.is_autocast_enabled("cpu") and tensor.is_floating_point() and tensor.dtype is not torch.float64
    return tensor.to(torch.get_autocast_dtype("cpu")) if changes else tensor


def _is_flex_asking(frame: Any) -> bool:
    """`flex_attention` refuses tensors on the CPU that need a gradient; the live ones are where it works."""
    return bool(frame.f_code.co_name == "_validate_device" and frame.f_globals["__name__"] == flex_module.__name__)


@dataclass(frozen=True)
class _FlexCall:
    score_mod: Any
    block_mask: tuple[Any, ...]
    attention: AttentionConvention
    add: Add


class _FlexAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, call: _FlexCall, *learned: Any) -> torch.Tensor:
        ctx.save_for_backward(query, key, value, *learned)
        ctx.call = call
        flops = flex_forward(query, key, value, call.score_mod, call.block_mask, call.attention)
        call.add("flex_attention", flops, compute_type(query.dtype))
        return query.new_zeros(*query.shape[:-1], value.shape[-1])  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        saved, call, needs = ctx.saved_tensors, ctx.call, ctx.needs_input_grad
        query, key, value = saved[:3]
        flops = flex_backward(query, key, value, call.score_mod, call.block_mask, call.attention, needs[:3])
        call.add("flex_attention_backward", flops, compute_type(query.dtype))
        given = [torch.zeros_like(tensor) for tensor in saved]
        return *given[:3], None, *given[3:]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Any, key: Any, value: Any, call: AttentionCall, attention: AttentionConvention, add: Add
    ) -> torch.Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.call, ctx.attention, ctx.add, ctx.dtype = call, attention, add, compute_type(query.dtype)
        add(_NAME, unfused_forward(call, attention), ctx.dtype)
        return query.new_zeros(*query.shape[:-1], value.shape[-1])  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.add(_NAME, unfused_backward(ctx.call, ctx.attention, ctx.needs_input_grad[:3]), ctx.dtype)
        needed = zip(ctx.saved_tensors, ctx.needs_input_grad, strict=False)
        return *(torch.zeros_like(tensor) if needs else None for tensor, needs in needed), None, None, None
