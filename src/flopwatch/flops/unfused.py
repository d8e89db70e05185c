"""Keeps attention whole where torch would take it apart.

`scaled_dot_product_attention` has no fused kernel for every case (dropout on the CPU, values of another width than
queries): it then runs as plain matrix products, which do not show that they are attention, nor its mask. For the
causal convention that must be known, so a trace puts one op in their place, with the same shapes and gradients.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode

from flopwatch.flops.compute_type import compute_type
from flopwatch.flops.formulas.attention import AttentionCall, unfused_backward, unfused_forward
from flopwatch.flops.formulas.registry import OpFlops

Add = Callable[[str, OpFlops, str], None]
_NAME = "scaled_dot_product_attention"


class WholeAttention(TorchFunctionMode):
    """Replaces attention that would be taken apart; `add` gets its FLOPs."""

    def __init__(self, add: Add) -> None:
        self._add = add

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        call = AttentionCall.bind(*args, **kwargs)
        if call.is_fused():
            return func(*args, **kwargs)
        return _Attention.apply(call.query, call.key, call.value, call, self._add)  # type: ignore[no-untyped-call]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, call: AttentionCall, add: Add) -> torch.Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.call, ctx.add, ctx.dtype = call, add, compute_type(query.dtype)
        add(_NAME, unfused_forward(call), ctx.dtype)
        return query.new_empty(*query.shape[:-1], value.shape[-1])  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.add(_NAME, unfused_backward(ctx.call, ctx.needs_input_grad[:3]), ctx.dtype)
        needed = zip(ctx.saved_tensors, ctx.needs_input_grad, strict=False)
        return *(torch.empty_like(tensor) if needs else None for tensor, needs in needed), None, None
