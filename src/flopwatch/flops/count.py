"""`count_flops`: the FLOPs of one training step of one model on one batch."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, get_args

from torch import nn

from flopwatch.errors import FlopwatchError, InputError
from flopwatch.flops.batches import read_shape, real_lengths, unpadded_row
from flopwatch.flops.fit import fit_flops_law
from flopwatch.flops.methods import MethodChoice, count_as_is
from flopwatch.flops.passes import LossFn
from flopwatch.records import AttentionConvention, FlopCount

_MOST_KINDS_COUNTED = 8
"""With more different rows than this, fitting a law takes fewer traces than counting each."""


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

    The model may be wrapped (`torch.compile`, DDP, FSDP2), tensor parallel or on the meta device; the count is that of
    the whole model, and one rank may count alone. Nothing about it changes: not its gradients, buffers, random states,
    hooks or compiled graphs.

    Args:
        model: Any `nn.Module`.
        batch: Keyword arguments as a dict, positional ones as a tuple, or the single tensor the model takes.
        method: `trace` follows the model with fake tensors and runs nothing on a device; `step` counts one real step;
            `estimate` reads the modules' shapes; `auto` takes the first of them that works and says which. A function
            from the batch to its FLOPs is used as it is.
        attention: `full` counts every pair of positions (as PaLM's appendix B does), `causal` those not masked.
        loss_fn: From the model's output to the loss, where the model does not return one.
        training: False counts the forward pass alone.

    Returns:
        A `FlopCount`. Look at `coverage` and `notes` before you quote it.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(64, 32)
        >>> count_flops(model, torch.randn(8, 64)).model_flops  # 2 x 8 x 64 x 32, forward and weight gradient
        65536
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if attention not in get_args(AttentionConvention):
        raise InputError(f"attention is 'full' or 'causal', got {attention!r}")
    if isinstance(batch, Mapping):
        batch = dict(batch)  # a tokenizer's BatchEncoding is a mapping torch does not look into
    read_shape(batch)
    options: dict[str, Any] = {"attention": attention, "loss_fn": loss_fn, "training": training}
    count = count_as_is(model, batch, method=method, **options)
    if callable(method) or count.method == "estimate" or real_lengths(batch) is None:
        return count
    return _without_padding(count, model, batch, {**options, "method": count.method})


def _without_padding(
    count: FlopCount, model: nn.Module, batch: Mapping[str, Any], options: dict[str, Any]
) -> FlopCount:
    """Take off what was spent on padding: the mathematics needs each sample alone, at its own length."""
    try:
        needed = _sum_of_rows(model, batch, options)
    except FlopwatchError as error:
        note = f"padding counts as work here, because a row could not be counted alone: {error}"
        return replace(count, notes=(*count.notes, note))
    executed = count.forward_flops + count.backward_flops
    return replace(count, model_flops=needed, padding_flops=executed - needed)


def _sum_of_rows(model: nn.Module, batch: Mapping[str, Any], options: dict[str, Any]) -> int:
    """Rows of the same length with the same images cost the same, so one of each kind is counted."""
    lengths = real_lengths(batch) or []
    rows = [unpadded_row(batch, index) for index in range(len(lengths))]
    kinds = [(length, str(row.get("image_grid_thw"))) for length, row in zip(lengths, rows, strict=True)]
    masks_the_sequence = batch["attention_mask"].shape[1] == read_shape(batch).seq_len
    a_law_may_tell = masks_the_sequence and len(set(kinds)) == len(set(lengths)) and options["training"]
    if len(set(kinds)) > _MOST_KINDS_COUNTED and a_law_may_tell:
        law = fit_flops_law(model, batch, attention=options["attention"], loss_fn=options["loss_fn"])
        if law.exact:
            return law.model_flops(lengths=lengths)
    cost = {kind: count_as_is(model, rows[kinds.index(kind)], **options).model_flops for kind in set(kinds)}
    return sum(cost[kind] for kind in kinds)
