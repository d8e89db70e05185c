"""Make a batch a model can take, from what it says of itself."""

import inspect
from typing import Any

import torch
from torch import nn

from flopwatch.errors import InputError


def dummy_batch(model: nn.Module, batch_size: int, seq_len: int) -> dict[str, Any]:
    """A batch of zeros on the CPU with labels, for text models and for image classifiers.

    Args:
        model: Its `forward` must take `input_ids` or `pixel_values`.
        batch_size: Samples.
        seq_len: Positions of each; not used for images, whose size stands in the model's config.
    """
    for name, value in (("batch_size", batch_size), ("seq_len", seq_len)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(f"{name} is a positive whole number, got {value!r}")
    takes = inspect.signature(model.forward).parameters
    if "input_ids" in takes:
        ids = torch.zeros(batch_size, seq_len, dtype=torch.long)
        return {"input_ids": ids, "labels": ids.clone()} if "labels" in takes else {"input_ids": ids}
    size = getattr(getattr(model, "config", None), "image_size", None)
    if "pixel_values" in takes and isinstance(size, int):
        channels = getattr(model.config, "num_channels", 3)
        labels = {"labels": torch.zeros(batch_size, dtype=torch.long)} if "labels" in takes else {}
        return {"pixel_values": torch.zeros(batch_size, channels, size, size), **labels}
    raise InputError(
        f"cannot make a batch for {type(model).__name__}: its forward takes {', '.join(takes) or 'nothing'}; "
        "call flopwatch.count_flops(model, batch) with a batch of your own"
    )
