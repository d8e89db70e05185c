"""Formulas for attention: the fused kernels of torch and of common packages, and flex_attention.

The forward pass has two products over pairs of positions, Q·Kᵀ and P·V. The backward pass needs four: dV, dP, dQ, dK
(Dao et al., FlashAttention, arXiv 2205.14135, algorithm 4). A fused kernel also computes Q·Kᵀ again, because it did not
keep the scores. This fifth product counts as executed, but not as needed. The same applies to the gradient of an input
that does not require one, because a fused kernel always computes it.
"""

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention import SDPBackend
from torch.nn.attention.flex_attention import create_mask, flex_attention, noop_mask
from torch.overrides import TorchFunctionMode

from flopwatch.flops.formulas.registry import OpCall, OpFlops, compute_type, formula, leaves_of
from flopwatch.records.flops import AttentionConvention
from flopwatch.torch_internals.ops import (
    FUSED_SDP_CHOICE,
    FakeTensor,
    is_flex_attention,
    is_flex_device_check,
    is_identity_score,
    modes_off,
)

MASK_NOT_READABLE = "the attention mask depends on activations and cannot be read, so masked pairs are counted too"

_FUSED = "aten::_scaled_dot_product_"
_HEADS_FIRST = [
    *(f"{_FUSED}{kind}_attention" for kind in ("flash", "efficient", "cudnn")),
    *(
        f"{_FUSED}{kind}"
        for kind in ("flash_attention_for_cpu", "fused_attention_overrideable", "attention_math_for_mps")
    ),
    "aten::_cudnn_attention",
]
_POSITIONS_FIRST = [
    *(
        "aten::_flash_attention",
        "aten::_efficient_attention",
        "flash_attn::_flash_attn",
        "flash_attn::_flash_attn_varlen",
    ),
    *("flash_attn_3::fwd", "torch_attn::_varlen_attn", "xformers_flash::flash", "xformers_flash3::flash"),
]


@dataclass(frozen=True, slots=True)
class AttentionSizes:
    pairs: int
    query_width: int
    value_width: int
    note: str | None = None


@formula(*_HEADS_FIRST, "aten::_cudnn_attention_forward", "torchao::qscaled_dot_product")
def _heads_first_forward(call: OpCall) -> OpFlops | None:
    return None if _has_paged_keys(call) else forward_flops(_heads_first_sizes(call))


@formula(*(name + "_backward" for name in _HEADS_FIRST))
def _heads_first_backward(call: OpCall) -> OpFlops:
    return backward_flops(_heads_first_sizes(call), call.needs_grad)


@formula(
    *_POSITIONS_FIRST, *(name + "_forward" for name in _POSITIONS_FIRST), *(name + "_fwd" for name in _POSITIONS_FIRST)
)
def _positions_first_forward(call: OpCall) -> OpFlops | None:
    return None if _has_paged_keys(call) else forward_flops(_positions_first_sizes(call))


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
    query: Any
    key: Any
    value: Any
    attn_mask: torch.Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    def is_fused(self) -> bool:
        # Real tensors are passed, because for fake ones torch would choose the kernel of the meta device.
        with modes_off():
            choice = FUSED_SDP_CHOICE(
                _stand_in(self.query),
                _stand_in(self.key),
                _stand_in(self.value),
                None if self.attn_mask is None else _stand_in(self.attn_mask),
                self.dropout_p,
                self.is_causal,
                enable_gqa=self.enable_gqa,
            )
        return bool(choice != int(SDPBackend.MATH.value))


def _stand_in(tensor: Any) -> torch.Tensor:
    """Return a real tensor of the same shape. All its rows share the memory of one row."""
    row = torch.empty(tensor.shape[-1], dtype=tensor.dtype)
    return row.expand(tensor.shape).requires_grad_(tensor.requires_grad)


def full_sizes(query: Any, key: Any, value: Any) -> AttentionSizes:
    """Return the sizes of attention over all pairs, for tensors of shape (batch, heads, positions, width)."""
    batch, heads, queries, width = query.shape
    return AttentionSizes(batch * heads * queries * key.shape[-2], width, value.shape[-1])


def _heads_first_sizes(call: OpCall) -> AttentionSizes:
    mask = next((call.arguments[name] for name in ("attn_mask", "attn_bias") if _given(call, name)), None)
    return _sizes_under(call.attention, *_operands(call), mask, bool(call.arguments.get("is_causal")))


def _sizes_under(
    attention: AttentionConvention, query: Any, key: Any, value: Any, mask: torch.Tensor | None, is_causal: bool
) -> AttentionSizes:
    full = full_sizes(query, key, value)
    if attention == "full":
        return full
    if mask is not None:
        pairs = unmasked_pairs(mask, full.pairs)
        return replace(full, note=MASK_NOT_READABLE) if pairs is None else replace(full, pairs=pairs)
    if not is_causal:
        return full
    batch, heads, queries, _ = query.shape
    return replace(full, pairs=batch * heads * causal_pairs(queries, key.shape[-2], last_aligned=False))


def _positions_first_sizes(call: OpCall) -> AttentionSizes:
    query, key, value = _operands(call)
    query_lengths = _lengths(call, query, ("cum_seq_q", "cu_seqlens_q", "cu_seq_q"))
    key_lengths = _lengths(call, key, ("cum_seq_k", "cu_seqlens_k", "cu_seq_k")) or query_lengths
    # aten's `custom_mask_type` is 0 for no mask, and 1 or 2 for the two alignments of a causal mask.
    causal = call.attention == "causal" and bool(
        call.arguments.get("is_causal") or call.arguments.get("causal") or call.arguments.get("custom_mask_type")
    )
    # Flash kernels align a causal mask with the last position, torch's own attention with the first.
    pairs = sum(
        causal_pairs(queries, keys, last_aligned=True) if causal else queries * keys
        for queries, keys in zip(query_lengths, key_lengths, strict=True)
    )
    return AttentionSizes(query.shape[-2] * pairs, query.shape[-1], value.shape[-1])


def causal_pairs(queries: int, keys: int, *, last_aligned: bool) -> int:
    """Return the number of (query, key) pairs that a causal mask allows, aligned with the first or the last position.

    >>> causal_pairs(4, 4, last_aligned=False)
    10
    """
    square = min(queries, keys)
    triangle = square * (square + 1) // 2
    if last_aligned:  # additional keys come before the diagonal, so every query attends to them
        return triangle + max(0, keys - queries) * queries
    return triangle + max(0, queries - keys) * keys


def _operands(call: OpCall) -> tuple[Any, Any, Any]:
    arguments = call.arguments
    names = ("query", "key", "value") if "query" in arguments else ("q", "k", "v")
    return arguments[names[0]], arguments[names[1]], arguments[names[2]]


def _has_paged_keys(call: OpCall) -> bool:
    """Whether the keys lie in the pages of a cache, or only some of them are used, so their shape is not the length."""
    return any(_given(call, name) for name in ("seqused_k", "block_table", "page_table"))


def _given(call: OpCall, name: str) -> bool:
    return isinstance(call.arguments.get(name), torch.Tensor)


def _lengths(call: OpCall, operand: Any, names: Sequence[str]) -> list[int]:
    """Return the lengths of the sequences in a packed batch, or of all rows of an unpacked one."""
    for name in names:
        if _given(call, name) and operand.dim() == 3:
            return [int(length) for length in call.arguments[name].diff().tolist()]
    if operand.dim() == 3:
        return [operand.shape[0]]
    return [operand.shape[1]] * operand.shape[0]


def unmasked_pairs(mask: torch.Tensor, full_pairs: int) -> int | None:
    """Return how many of all pairs a mask allows; None if its values cannot be read."""
    if isinstance(mask, FakeTensor) or mask.device.type == "meta":
        return None
    # An additive mask has 0 for allowed pairs and about the minimum of its type for masked pairs.
    allowed = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    # A mask with fewer heads or samples than the scores is broadcast to all of them.
    return int(torch.count_nonzero(allowed)) * (full_pairs // allowed.numel())


SCORES_MAY_MASK = "the score_mod of flex_attention may mask pairs too, but only the block mask is considered"

# The largest part of a mask that is evaluated at once. Its booleans take 16 MiB.
_MOST_PAIRS_AT_ONCE = 2**24


def flex_sizes(
    query: Any, key: Any, value: Any, score_mod: Any, block_mask: tuple[Any, ...], attention: AttentionConvention
) -> AttentionSizes:
    full = full_sizes(query, key, value)
    if attention == "full":
        return full
    note = None if is_identity_score(score_mod) else SCORES_MAY_MASK
    mask_mod = block_mask[-1]
    if mask_mod is noop_mask:
        return replace(full, note=note)
    # The first two dimensions of a block tensor are samples and heads. Size 1 means that all of them share one mask.
    batch, heads = next(item for item in block_mask if isinstance(item, torch.Tensor)).shape[:2]
    pairs = _pairs_of_mask_function(mask_mod, batch, heads, query.shape[-2], key.shape[-2])
    if pairs is None:
        return replace(full, note=MASK_NOT_READABLE)
    return replace(full, pairs=pairs * (query.shape[0] * query.shape[1] // (batch * heads)), note=note)


def _pairs_of_mask_function(mask_mod: Any, batch: int, heads: int, queries: int, keys: int) -> int | None:
    rows_at_once = max(1, _MOST_PAIRS_AT_ONCE // (batch * heads * keys))
    pairs = 0
    for first in range(0, queries, rows_at_once):
        rows = min(rows_at_once, queries - first)
        mask_of_rows = partial(_mask_from_row, mask_mod, first)
        mask = create_mask(mask_of_rows, batch, heads, rows, keys, device="cpu")
        if isinstance(mask, FakeTensor):
            return None
        pairs += int(mask.sum())
    return pairs


def _mask_from_row(mask_mod: Any, first: int, sample: Any, head: Any, query: Any, key: Any) -> Any:
    return mask_mod(sample, head, query + first, key)


Add = Callable[[str, OpFlops], None]
_WHOLE_ATTENTION = "scaled_dot_product_attention"


# The op behind `flex_attention` also returns the sums of exponentials and, where `return_aux` can ask for them, maxima.
_FLEX_STATISTICS = 2 if "return_aux" in inspect.signature(flex_attention).parameters else 1


class WholeAttention(TorchFunctionMode):
    """Replaces attention by a function that returns zeros of the right shape and passes attention's FLOPs to `add`.

    `scaled_dot_product_attention` is replaced where it has no fused kernel (dropout on the CPU, values of another width
    than queries) and would run as plain matrix products. Plain products do not show the mask, which a causal count
    needs, and run in fp32 on the CPU, unlike an accelerator's kernel. `flex_attention` is replaced because it has no
    backward pass on the CPU, where a trace runs.
    """

    def __init__(self, add: Add, attention: AttentionConvention) -> None:
        self._add = add
        self._attention: AttentionConvention = attention

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            call = AttentionCall(*args, **kwargs)
            if not call.is_fused():
                operands = map(_under_autocast, (call.query, call.key, call.value))
                sizes = partial(
                    _sizes_under, self._attention, call.query, call.key, call.value, call.attn_mask, call.is_causal
                )
                counted = _Counted((_WHOLE_ATTENTION, _WHOLE_ATTENTION), sizes, self._add)
                return _Attention.apply(*operands, counted)  # type: ignore[no-untyped-call]
        if is_flex_attention(func):
            return self._flex(*args, **kwargs)
        if getattr(func, "__self__", None) is torch.Tensor.requires_grad and is_flex_device_check(sys._getframe(1)):
            return False
        return func(*args, **kwargs)

    def _flex(self, query: Any, key: Any, value: Any, score_mod: Any, block_mask: Any, *rest: Any, **named: Any) -> Any:
        buffers = leaves_of((rest, named))
        learned = [item for item in buffers if isinstance(item, torch.Tensor) and item.requires_grad]
        sizes = partial(flex_sizes, query, key, value, score_mod, block_mask, self._attention)
        counted = _Counted(("flex_attention", "flex_attention_backward"), sizes, self._add, is_fused=True)
        out = _Attention.apply(query, key, value, counted, *learned)  # type: ignore[no-untyped-call]
        statistics = query.new_zeros(query.shape[:-1], dtype=torch.float32)
        return out, *[statistics] * _FLEX_STATISTICS


def _under_autocast(tensor: Any) -> Any:
    changes = torch.is_autocast_enabled("cpu") and tensor.is_floating_point() and tensor.dtype is not torch.float64
    return tensor.to(torch.get_autocast_dtype("cpu")) if changes else tensor


@dataclass(frozen=True)
class _Counted:
    ops: tuple[str, str]
    sizes: Callable[[], AttentionSizes]
    add: Add
    is_fused: bool = False


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, counted: _Counted, *learned: Any) -> torch.Tensor:
        ctx.save_for_backward(query, key, value, *learned)
        ctx.counted, ctx.dtype = counted, compute_type(query.dtype)
        counted.add(counted.ops[0], replace(forward_flops(counted.sizes()), dtype=ctx.dtype))
        return query.new_zeros(*query.shape[:-1], value.shape[-1])  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        counted = ctx.counted
        flops = replace(backward_flops(counted.sizes(), ctx.needs_input_grad[:3]), dtype=ctx.dtype)
        # Without a fused kernel nothing extra runs: the scores were kept, and only required gradients are computed.
        counted.add(counted.ops[1], flops if counted.is_fused else replace(flops, extra=0))
        gradients = [torch.zeros_like(tensor) for tensor in ctx.saved_tensors]
        return *gradients[:3], None, *gradients[3:]
