"""`flex_attention`: attention whose mask is a function of the indices."""

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention.flex_attention import _vmap_for_bhqkv, noop_mask

from flopwatch.flops.formulas.attention import (
    MASK_NOT_READABLE,
    AttentionSizes,
    backward_flops,
    forward_flops,
    full_sizes,
)
from flopwatch.flops.formulas.registry import OpFlops
from flopwatch.records import AttentionConvention

SCORES_MAY_MASK = "a score_mod of flex_attention may mask pairs too: only its block mask is taken into account"

_MOST_PAIRS_AT_ONCE = 2**24


def flex_forward(
    query: Any, key: Any, value: Any, score_mod: Any, block_mask: tuple[Any, ...], attention: AttentionConvention
) -> OpFlops:
    return forward_flops(_sizes(query, key, value, score_mod, block_mask, attention))


def flex_backward(
    query: Any,
    key: Any,
    value: Any,
    score_mod: Any,
    block_mask: tuple[Any, ...],
    attention: AttentionConvention,
    needs_grad: tuple[bool, ...] = (),
) -> OpFlops:
    return backward_flops(_sizes(query, key, value, score_mod, block_mask, attention), needs_grad)


def _sizes(
    query: Any, key: Any, value: Any, score_mod: Any, block_mask: tuple[Any, ...], attention: AttentionConvention
) -> AttentionSizes:
    full = full_sizes(query, key, value)
    if attention == "full":
        return full
    note = None if getattr(score_mod, "__name__", "") == "_identity" else SCORES_MAY_MASK
    mask_mod = block_mask[-1]
    if mask_mod is noop_mask:
        return AttentionSizes(full.pairs, full.query_width, full.value_width, note)
    # The mask may be one for all samples or heads; its blocks say for how many there is one of its own.
    batch, heads = next(item for item in block_mask if isinstance(item, torch.Tensor)).shape[:2]
    pairs = _unmasked_pairs(mask_mod, batch, heads, query.shape[-2], key.shape[-2])
    if pairs is None:
        return AttentionSizes(full.pairs, full.query_width, full.value_width, MASK_NOT_READABLE)
    shared_by = query.shape[0] * query.shape[1] // (batch * heads)
    return AttentionSizes(pairs * shared_by, full.query_width, full.value_width, note)


def _unmasked_pairs(mask_mod: Any, batch: int, heads: int, queries: int, keys: int) -> int | None:
    """Pairs that the mask lets through, asked for some rows at a time; None when it depends on fake values."""
    allowed = _vmap_for_bhqkv(mask_mod, prefix=())
    rows_at_once = max(1, _MOST_PAIRS_AT_ONCE // (batch * heads * keys))
    indices = torch.arange(batch), torch.arange(heads), torch.arange(queries), torch.arange(keys)
    pairs = 0
    for rows in indices[2].split(rows_at_once):
        mask = allowed(indices[0], indices[1], rows, indices[3])
        if isinstance(mask, FakeTensor):
            return None
        pairs += int(mask.sum())
    return pairs
