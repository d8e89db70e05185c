"""Reads a batch: its size, its length, which positions are real, and one row of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from flopwatch.errors import InputError

MAIN_SEQUENCE = ("input_ids", "inputs_embeds", "input_values", "decoder_input_ids", "labels")
"""Arguments whose dimension 1 is the sequence, the first that is there; `input_values` is raw audio."""
FLAT_IMAGES = {"pixel_values": "image_grid_thw", "pixel_values_videos": "video_grid_thw"}
"""Patches of all images in one list, and the tensor that says how many patches each image has (Qwen-VL and others)."""


@dataclass(frozen=True, slots=True)
class BatchShape:
    """Samples and positions of a batch; `seq_len` is None for a batch without a text sequence."""

    batch_size: int
    seq_len: int | None


def named(batch: Any) -> dict[str, Any]:
    """The batch as a dict; positional arguments go by their index."""
    if isinstance(batch, Mapping):
        return dict(batch)
    items = batch if isinstance(batch, tuple | list) else [batch]
    return {str(index): item for index, item in enumerate(items)}


def read_shape(batch: Any) -> BatchShape:
    """Batch size and length, from the tensors' shapes alone."""
    tensors = {name: value for name, value in named(batch).items() if isinstance(value, torch.Tensor)}
    if not tensors:  # nested tuples or dicts
        tensors = {str(index): leaf for index, leaf in enumerate(tree_leaves(batch)) if isinstance(leaf, torch.Tensor)}
    if not tensors:
        raise InputError(
            f"the batch holds no tensor (got {type(batch).__name__}); pass a dict of the model's keyword arguments, "
            "a tuple of its arguments, or a tensor; of a DataLoader next(iter(loader)), of an array torch.from_numpy"
        )
    for name, tensor in tensors.items():
        if tensor.numel() == 0:
            raise InputError(f"the batch is empty: {name!r} has the shape {tuple(tensor.shape)}")
    for name in MAIN_SEQUENCE:
        if name in tensors and tensors[name].dim() == (3 if name == "inputs_embeds" else 2):
            if name == "labels" and "pixel_values" in tensors:  # classes of an image, not a sequence
                continue
            return BatchShape(tensors[name].shape[0], tensors[name].shape[1])
    first = next((tensor for name, tensor in tensors.items() if name not in FLAT_IMAGES), next(iter(tensors.values())))
    if first.dim() == 0:
        return BatchShape(1, None)
    are_token_ids = first.dim() == 2 and not first.is_floating_point()
    return BatchShape(first.shape[0], first.shape[1] if are_token_ids else None)


def real_lengths(batch: Any) -> list[int] | None:
    """Positions of each row that `attention_mask` calls real, or None when nothing is padded."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2 or mask.device.type == "meta":
        return None
    lengths = [int(length) for length in (mask != 0).sum(dim=1).tolist()]
    if min(lengths) == 0:
        raise InputError(f"attention_mask calls every position of row {lengths.index(0)} padding")
    return None if all(length == mask.shape[1] for length in lengths) else lengths


def follows_sequence(name: str, tensor: torch.Tensor, seq_len: int) -> bool:
    """Whether dimension 1 of this tensor runs over the main sequence."""
    if tensor.dim() < 2 or tensor.shape[1] != seq_len or name in FLAT_IMAGES or name in FLAT_IMAGES.values():
        return False
    return name in MAIN_SEQUENCE or not tensor.is_floating_point()


def unpadded_row(batch: Mapping[str, Any], index: int) -> dict[str, Any]:
    """One row as a batch of its own, without its padding."""
    row = one_row(batch, index)
    mask = batch.get("attention_mask")
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2:
        return row
    columns = mask[index].nonzero()[:, 0]
    for name, value in row.items():
        if isinstance(value, torch.Tensor) and follows_sequence(name, value, mask.shape[1]):
            row[name] = value.index_select(1, columns.to(value.device))
    return row


def one_row(batch: Mapping[str, Any], index: int) -> dict[str, Any]:
    """One row of every tensor that has a row per sample; what is shared stays as it is."""
    batch_size = read_shape(batch).batch_size
    flat = [(pixels, grid) for pixels, grid in FLAT_IMAGES.items() if pixels in batch and grid in batch]
    row: dict[str, Any] = {}
    for name, value in batch.items():
        per_sample = isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape[0] == batch_size
        row[name] = value[index : index + 1] if per_sample else value
    for pixels, grid in flat:
        row[pixels], row[grid] = _images_of_row(batch[pixels], batch[grid], batch_size, index)
    return row


def _images_of_row(
    pixels: torch.Tensor, grids: torch.Tensor, batch_size: int, index: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Images are listed over the whole batch; with equally many per row, a row's are a slice."""
    if grids.shape[0] % batch_size:
        raise InputError(
            f"{grids.shape[0]} images over {batch_size} samples: flopwatch cannot tell which sample has which; "
            "pass a batch in which every sample has the same number of images"
        )
    per_row = grids.shape[0] // batch_size
    patches = [prod(grid) for grid in grids.tolist()]
    first, last = index * per_row, (index + 1) * per_row
    return pixels[sum(patches[:first]) : sum(patches[:last])], grids[first:last]
