"""Counts the FLOPs of one training step of one model on one batch (`count_flops`).

A padded batch is counted twice: with padding, for the FLOPs that the hardware executes, and without, for those that the
model needs.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, get_args

import torch
from torch import nn

from flopwatch.errors import FlopwatchError, InputError, MeasurementError
from flopwatch.flops.batch_contents import IGNORED_LABEL, read_shape, real_lengths
from flopwatch.flops.batch_layout import (
    SAMPLES,
    Layout,
    grids_of,
    mask_variable,
    one_sample,
    select_positions,
    suggest_layouts,
)
from flopwatch.flops.fit import fit_flops_law, separate_lengths
from flopwatch.flops.methods import count_as_is
from flopwatch.flops.tracing.passes import CountOptions, LossFn, MethodChoice
from flopwatch.records.flops import AttentionConvention, FlopCount

# If a batch has more different rows than this, fitting a formula takes fewer traces than counting each row.
_MOST_ROWS_COUNTED = 8
_TARGET_MASK, _TARGET = "decoder_attention_mask", "labels"


def is_padded(batch: Any) -> bool:
    if real_lengths(batch) is not None:
        return True
    mask = batch.get(_TARGET_MASK) if isinstance(batch, Mapping) else None
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2 or mask.device.type == "meta":
        return False
    return not bool((mask != 0).all())


def unpadded_flops(model: nn.Module, batch: Mapping[str, Any], count: FlopCount, options: CountOptions) -> int:
    """Return the model FLOPs of the batch without its padding. Raises FlopwatchError if they cannot be determined."""

    def counted(part: Any) -> FlopCount:
        return count_as_is(model, part, options)

    layout = separate_lengths(model, batch, counted, suggest_layouts(batch)[0])
    columns = real_columns(batch, layout)
    rows = [one_sample(batch, layout, index) for index in range(layout.sizes[SAMPLES])]
    for variable, of_rows in columns.items():
        rows = [select_positions(row, layout, variable, own) for row, own in zip(rows, of_rows, strict=True)]
    # If values decide the FLOPs, each row is counted by itself.
    keys = [
        (
            index if count.steered_by else None,
            tuple(len(own[index]) for own in columns.values()),
            str(grids_of(row)),
            str(row.get("video_grid_thw")),
        )
        for index, row in enumerate(rows)
    ]

    def sum_of_rows() -> int:
        cost = {key: counted(rows[keys.index(key)]).model_flops for key in dict.fromkeys(keys)}
        return sum(cost[key] for key in keys)

    # The FLOPs of single rows do not add up if samples are compared with each other, as in a contrastive loss.
    one = counted(with_full_masks(one_sample(batch, suggest_layouts(batch)[-1], 0)))
    executed = count.forward_flops + count.backward_flops
    is_additive = executed == len(rows) * (one.forward_flops + one.backward_flops)
    if len(set(keys)) <= _MOST_ROWS_COUNTED and is_additive:
        return sum_of_rows()
    # Single rows have no padding, so neither does the batch that the law is fitted to. The attention kernel may be
    # another one with padding, and with it the FLOPs.
    law = fit_flops_law(
        model,
        with_full_masks(batch),
        attention=options.attention,
        loss_fn=options.loss_fn,
        training=options.training,
    )
    if is_additive and not law.exact:
        return sum_of_rows()
    if not law.exact or law.layout is None:
        raise MeasurementError(
            f"the samples' FLOPs do not add up to the batch's, and no exact formula was found ({'; '.join(law.notes)})"
        )
    lengths = [
        {name: len(columns[name][index]) if name in columns else law.layout.sizes[name] for name in law.layout.lengths}
        for index in range(len(rows))
    ]
    needed = law.phase_flops_of_rows(lengths, image_grids=grids_of(batch) or None)
    return needed.forward + needed.backward


def real_columns(batch: Mapping[str, Any], layout: Layout) -> dict[str, list[torch.Tensor]]:
    """Return the positions of each row that are not padding. The keys are `layout`'s names for the sequence lengths.

    The padding of a decoder's target is marked by `decoder_attention_mask` or by trailing labels that the loss ignores.
    """
    found: dict[str, list[torch.Tensor]] = {}
    for name in ("attention_mask", _TARGET_MASK):
        variable, mask = mask_variable(layout, name), batch.get(name)
        if variable is not None and isinstance(mask, torch.Tensor):
            found[variable] = [row.nonzero()[:, 0] for row in mask != 0]
    target = mask_variable(layout, _TARGET)
    if target is not None and target not in found and found:
        found[target] = [torch.arange(int(length)) for length in target_lengths(batch[_TARGET])]
    return found


def target_lengths(labels: torch.Tensor) -> torch.Tensor:
    """Return the length of each row up to its last label that the loss does not ignore; at least 1."""
    positions = torch.ones_like(labels).cumsum(1)
    return ((labels != IGNORED_LABEL) * positions).amax(1).clamp(min=1)


def with_full_masks(batch: Mapping[str, Any]) -> dict[str, Any]:
    masks = {
        name: batch[name] for name in ("attention_mask", _TARGET_MASK) if isinstance(batch.get(name), torch.Tensor)
    }
    return {**batch, **{name: torch.ones_like(mask) for name, mask in masks.items()}}


def count_flops(
    model: nn.Module,
    batch: Any,
    *,
    method: MethodChoice | Callable[[Any], int] = "auto",
    attention: AttentionConvention = "full",
    loss_fn: LossFn | None = None,
    training: bool = True,
) -> FlopCount:
    """Count the FLOPs of one step: forward, backward, recomputation.

    The model may be wrapped (`torch.compile`, DDP, FSDP2), tensor parallel or on the meta device. The count is always
    that of the whole model, and one rank may call this function alone. The model's gradients, buffers, random states,
    hooks and compiled graphs do not change.

    Args:
        model: Any `nn.Module`.
        batch: Keyword arguments as a dict, positional ones as a tuple, or the single tensor that the model takes.
        method: `trace` runs the model's code on fake tensors and uses no device; `step` runs and counts one real step;
            `estimate` calculates from the shapes of the weights; `auto` uses the first of these that works, and
            `FlopCount.method` says which. Instead, you can pass a function that returns the FLOPs of a batch.
        attention: `full` counts every pair of positions (as PaLM's appendix B does), `causal` only unmasked pairs.
        loss_fn: Computes the loss from the model's output; needed if the model does not return a loss.
        training: False counts only the forward pass.

    Returns:
        A `FlopCount`. Its `coverage` and `notes` say what the numbers leave out.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(64, 32)
        >>> count_flops(model, torch.randn(8, 64)).model_flops  # 2 x 8 x 64 x 32, forward and weight gradient
        65536
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if attention not in get_args(AttentionConvention):
        raise InputError(f"attention must be 'full' or 'causal', got {attention!r}")
    if isinstance(batch, Mapping):
        batch = dict(batch)  # torch's pytree finds tensors in a dict, but not in a tokenizer's BatchEncoding
    read_shape(batch)
    options = CountOptions(attention, loss_fn, training, method)
    count = count_as_is(model, batch, options)
    # `in` would not tell mypy which methods are left.
    if count.method == "flops_fn" or count.method == "estimate" or not is_padded(batch):  # noqa: PLR1714
        return count
    # The FLOPs of padding move from `model_flops` to `padding_flops`.
    try:
        needed = unpadded_flops(model, batch, count, options._replace(method=count.method))
    except FlopwatchError as error:
        note = f"model_flops includes padding, because the rows could not be counted without it: {error}"
        return replace(count, notes=(*count.notes, note))
    executed = count.forward_flops + count.backward_flops
    if needed == executed:
        note = "model_flops includes padding, because removing the masked positions did not change the FLOPs"
        return replace(count, notes=(*count.notes, note))
    return replace(count, model_flops=needed, padding_flops=executed - needed)
