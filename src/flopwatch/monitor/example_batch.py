"""What the model itself takes of a batch that a loop hands to the monitor, where its calls are not seen."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from flopwatch.flops.replica import unwrap
from flopwatch.models.dummy import dummy_batch
from flopwatch.monitor.batch_reader import Plan
from flopwatch.monitor.calls import PACKING

MADE_UP = "only attention_mask was given and no call of the model was seen, so the rest of the batch was made up"


def is_mask_only(batch: Any) -> bool:
    return isinstance(batch, Mapping) and set(batch) - set(PACKING) <= {"attention_mask"}


def example_batch(model: nn.Module, batch: Any, plan: Plan) -> Any:
    """Packed rows as plain ones, nothing that `forward` does not know; a mask alone becomes a batch of its shape."""
    if isinstance(batch, Mapping):
        tensors = {name: value for name, value in batch.items() if name not in PACKING or _is_multimodal(value)}
        if is_mask_only(batch):
            return dummy_batch(unwrap(model), plan.batch_size, plan.seq_len or 1)
        parameters = _parameters(model)
        if parameters is not None and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            tensors = {name: value for name, value in tensors.items() if name in parameters}
        return tensors
    if isinstance(batch, tuple | list):
        parameters = _parameters(model)
        if parameters is not None and not any(p.kind is p.VAR_POSITIONAL for p in parameters.values()):
            batch = tuple(batch)[: len(parameters)]
    return batch


def _is_multimodal(positions: Any) -> bool:
    """Position ids of several axes belong to images; TRL packs a plain int beside its tensors."""
    return isinstance(positions, torch.Tensor) and positions.dim() > 2


def _parameters(model: nn.Module) -> Mapping[str, inspect.Parameter] | None:
    try:
        return inspect.signature(unwrap(model).forward).parameters
    except (TypeError, ValueError):
        return None
