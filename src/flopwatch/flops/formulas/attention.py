"""Fused attention: every kernel torch and the common packages have, under both conventions.

Forward is two products over the pairs of positions, Q·Kᵀ and P·V. The mathematics of the backward pass is four: dV,
dP, dQ, dK (Dao et al., FlashAttention, arXiv 2205.14135, algorithm 4). A fused kernel computes Q·Kᵀ once more, because
it did not keep the scores: that fifth product is executed, not needed. Neither is the gradient of an input that needs
none, which a fused kernel computes all the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import _disable_current_modes

from flopwatch.flops.formulas.registry import OpCall, OpFlops, formula
from flopwatch.records import AttentionConvention

MASK_NOT_READABLE = "the attention mask is computed from activations and could not be read: counted as full attention"

_HEADS_FIRST = [
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_fused_attention_overrideable",
    "aten::_scaled_dot_product_attention_math_for_mps",
    "aten::_cudnn_attention",
]
_POSITIONS_FIRST = [
    "aten::_flash_attention",
    "aten::_efficient_attention",
    "flash_attn::_flash_attn",
    "flash_attn::_flash_attn_varlen",
    "flash_attn_3::fwd",
    "torch_attn::_varlen_attn",
    "xformers_flash::flash",
    "xformers_flash3::flash",
]


@dataclass(frozen=True, slots=True)
class AttentionSizes:
    """What the products run over: (pairs of positions) x heads, summed over the batch, and the two widths."""

    pairs: int
    query_width: int
    value_width: int
    note: str | None = None


@formula(*_HEADS_FIRST, "aten::_cudnn_attention_forward", "torchao::qscaled_dot_product")
def _heads_first_forward(call: OpCall) -> OpFlops:
    return forward_flops(_heads_first_sizes(call))


@formula(*(name + "_backward" for name in _HEADS_FIRST))
def _heads_first_backward(call: OpCall) -> OpFlops:
    return backward_flops(_heads_first_sizes(call), call.needs_grad)


@formula(
    *_POSITIONS_FIRST, *(name + "_forward" for name in _POSITIONS_FIRST), *(name + "_fwd" for name in _POSITIONS_FIRST)
)
def _positions_first_forward(call: OpCall) -> OpFlops:
    return forward_flops(_positions_first_sizes(call))


@formula(*(name + "_backward" for name in _POSITIONS_FIRST), *(name + "_bwd" for name in _POSITIONS_FIRST))
def _positions_first_backward(call: OpCall) -> OpFlops:
    return backward_flops(_positions_first_sizes(call), call.needs_grad)


def forward_flops(sizes: AttentionSizes) -> OpFlops:
    return OpFlops(2 * sizes.pairs * (sizes.query_width + sizes.value_width), note=sizes.note)


def backward_flops(sizes: AttentionSizes, needs_grad: tuple[bool, ...]) -> OpFlops:
    query, key, value = needs_grad[:3] if len(needs_grad) >= 3 else (True, True, True)
    widths = (query + key) * sizes.query_width + (value + (query or key)) * sizes.value_width
    executed = 3 * sizes.query_width + 2 * sizes.value_width
    return OpFlops(2 * sizes.pairs * widths, 2 * sizes.pairs * (executed - widths), sizes.note)


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """The arguments of `torch.nn.functional.scaled_dot_product_attention`."""

    query: Any
    key: Any
    value: Any
    mask: torch.Tensor | None
    dropout_p: float
    is_causal: bool
    enable_gqa: bool

    @classmethod
    def bind(
        cls,
        query: Any,
        key: Any,
        value: Any,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> "AttentionCall":
        return cls(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)

    def is_fused(self) -> bool:
        """Whether torch has one kernel for it.

        Asked with real tensors of the same shape that take no memory: for fake ones torch answers as for the meta
        device, which is not what the call itself would do.
        """
        with _disable_current_modes():
            choice = torch._fused_sdp_choice(
                _stand_in(self.query),
                _stand_in(self.key),
                _stand_in(self.value),
                None if self.mask is None else _stand_in(self.mask),
                self.dropout_p,
                self.is_causal,
                enable_gqa=self.enable_gqa,
            )
        return choice != int(SDPBackend.MATH.value)


def _stand_in(tensor: Any) -> torch.Tensor:
    """One row of storage, repeated."""
    row = torch.empty(tensor.shape[-1], dtype=tensor.dtype)
    return row.expand(tensor.shape).requires_grad_(tensor.requires_grad)


def unfused_forward(call: AttentionCall, attention: AttentionConvention) -> OpFlops:
    return forward_flops(_unfused_sizes(call, attention))


def unfused_backward(call: AttentionCall, attention: AttentionConvention, needs_grad: tuple[bool, ...]) -> OpFlops:
    """Products run one by one: the scores are still there, and what nobody needs is not computed."""
    sizes = _unfused_sizes(call, attention)
    return OpFlops(backward_flops(sizes, needs_grad).needed, note=sizes.note)


def _unfused_sizes(call: AttentionCall, attention: AttentionConvention) -> AttentionSizes:
    if attention == "full":
        return full_sizes(call.query, call.key, call.value)
    return _unmasked_sizes(call.query, call.key, call.value, call.mask, is_causal=call.is_causal)


def full_sizes(query: Any, key: Any, value: Any) -> AttentionSizes:
    """All pairs, of tensors laid out (batch, heads, positions, width)."""
    batch, heads, queries, width = query.shape
    return AttentionSizes(batch * heads * queries * key.shape[-2], width, value.shape[-1])


def _heads_first_sizes(call: OpCall) -> AttentionSizes:
    query, key, value = _operands(call)
    if call.attention == "full":
        return full_sizes(query, key, value)
    mask = next((call.arguments[name] for name in ("attn_mask", "attn_bias") if _given(call, name)), None)
    return _unmasked_sizes(query, key, value, mask, is_causal=bool(call.arguments.get("is_causal")))


def _unmasked_sizes(query: Any, key: Any, value: Any, mask: torch.Tensor | None, *, is_causal: bool) -> AttentionSizes:
    full = full_sizes(query, key, value)
    if mask is not None:
        pairs = _unmasked_pairs(mask, full.pairs)
        note = MASK_NOT_READABLE if pairs is None else None
        return AttentionSizes(full.pairs if pairs is None else pairs, full.query_width, full.value_width, note)
    if not is_causal:
        return full
    batch, heads, queries, _ = query.shape
    pairs = batch * heads * causal_pairs(queries, key.shape[-2], last_aligned=False)
    return AttentionSizes(pairs, full.query_width, full.value_width)


def _positions_first_sizes(call: OpCall) -> AttentionSizes:
    query, key, value = _operands(call)
    query_lengths = _lengths(call, query, ("cum_seq_q", "cu_seqlens_q", "cu_seq_q"))
    key_lengths = _lengths(call, key, ("cum_seq_k", "cu_seqlens_k", "cu_seq_k")) or query_lengths
    causal = call.attention == "causal" and bool(
        call.arguments.get("is_causal") or call.arguments.get("causal") or call.arguments.get("custom_mask_type")
    )
    # The flash kernels align a causal mask with the last position, unlike torch's own attention.
    pairs = sum(
        causal_pairs(queries, keys, last_aligned=True) if causal else queries * keys
        for queries, keys in zip(query_lengths, key_lengths, strict=True)
    )
    return AttentionSizes(query.shape[-2] * pairs, query.shape[-1], value.shape[-1])


def causal_pairs(queries: int, keys: int, *, last_aligned: bool) -> int:
    """How many (query, key) pairs a causal mask leaves.

    >>> causal_pairs(4, 4, last_aligned=False)
    10
    """
    square = min(queries, keys)
    triangle = square * (square + 1) // 2
    if last_aligned:  # surplus keys lie before the diagonal and are seen by every query
        return triangle + max(0, keys - queries) * queries
    return triangle + max(0, queries - keys) * keys


def _operands(call: OpCall) -> tuple[Any, Any, Any]:
    arguments = call.arguments
    names = ("query", "key", "value") if "query" in arguments else ("q", "k", "v")
    return arguments[names[0]], arguments[names[1]], arguments[names[2]]


def _given(call: OpCall, name: str) -> bool:
    return isinstance(call.arguments.get(name), torch.Tensor)


def _lengths(call: OpCall, operand: Any, names: Sequence[str]) -> list[int]:
    """Lengths of the sequences in a packed batch; of every row where it is not packed."""
    for name in names:
        if _given(call, name) and operand.dim() == 3:
            return [int(length) for length in call.arguments[name].diff().tolist()]
    if operand.dim() == 3:
        return [operand.shape[0]]
    return [operand.shape[1]] * operand.shape[0]


def _unmasked_pairs(mask: torch.Tensor, full_pairs: int) -> int | None:
    """Pairs the mask lets through, or None when its values cannot be read (it is fake)."""
    if isinstance(mask, FakeTensor) or mask.device.type == "meta":
        return None
    allowed = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    # A mask of one head or one row is broadcast over the others.
    return int(torch.count_nonzero(allowed)) * (full_pairs // allowed.numel())
