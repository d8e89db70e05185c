"""`count_flops`: the FLOPs of one training step of one model on one batch."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, get_args

from torch import nn

from flopwatch.errors import FlopwatchError, InputError
from flopwatch.flops.batches import read_shape
from flopwatch.flops.losses import LossFn
from flopwatch.flops.methods import MethodChoice, count_as_is
from flopwatch.flops.padding import is_padded, unpadded_flops
from flopwatch.records import AttentionConvention, FlopCount


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
    if callable(method) or count.method == "estimate" or not is_padded(batch):
        return count
    return _without_padding(count, model, batch, {**options, "method": count.method})


def _without_padding(
    count: FlopCount, model: nn.Module, batch: Mapping[str, Any], options: dict[str, Any]
) -> FlopCount:
    """Take off what was spent on padding: the mathematics needs each sample at its own length."""
    try:
        needed = unpadded_flops(model, batch, count, options)
    except FlopwatchError as error:
        note = f"padding counts as work here, because a row could not be counted alone: {error}"
        return replace(count, notes=(*count.notes, note))
    executed = count.forward_flops + count.backward_flops
    if needed == executed:
        note = "padding counts as work here: no sequence that the model computes with runs along the mask"
        return replace(count, notes=(*count.notes, note))
    return replace(count, model_flops=needed, padding_flops=executed - needed)
