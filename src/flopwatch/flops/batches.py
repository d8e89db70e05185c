"""Reads a batch: its size, its length, which positions are real, and one row of it."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from flopwatch.errors import InputError
from flopwatch.flops.structure import tensors_of

MAIN_SEQUENCE = ("input_ids", "inputs_embeds", "input_values", "decoder_input_ids", "labels")
"""Arguments whose dimension 1 is the sequence, the first that is there; `input_values` is raw audio."""
FLAT_IMAGES = {"pixel_values": "image_grid_thw", "pixel_values_videos": "video_grid_thw"}
"""Patches of all images in one list, and the tensor that says how many patches each image has (Qwen-VL and others)."""
_DEEPEST = 8
_MOST_KEYS = 12


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
    arguments = named(batch)
    tensors = {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}
    samples = _items_of_lists(arguments)
    if not tensors:
        tensors = tensors_of(batch) or {str(index): leaf for index, leaf in enumerate(tensors_inside(batch))}
    if not tensors:
        raise InputError(
            f"the batch holds no tensor: {_content(batch)}; pass a dict of the model's keyword arguments, "
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
    if samples is not None:
        return BatchShape(samples, None)
    first = next((tensor for name, tensor in tensors.items() if name not in FLAT_IMAGES), next(iter(tensors.values())))
    if first.dim() == 0:
        return BatchShape(1, None)
    are_token_ids = first.dim() == 2 and not first.is_floating_point()
    return BatchShape(first.shape[0], first.shape[1] if are_token_ids else None)


def _items_of_lists(arguments: Mapping[str, Any]) -> int | None:
    """Samples of a batch whose first argument is a list with an entry per sample (images, targets of a detector)."""
    first = next(iter(arguments.values()), None)
    is_list = isinstance(first, list) and first and all(isinstance(item, torch.Tensor | Mapping) for item in first)
    return len(first or ()) if is_list and tensors_of(first) else None


def tensors_inside(value: Any, depth: int = _DEEPEST) -> Iterator[torch.Tensor]:
    """Every tensor in lists, dicts, dataclasses and plain objects, in their order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth > 0:
        for part in _parts_of(value):
            yield from tensors_inside(part, depth - 1)


def _parts_of(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, str | bytes | int | float | type | ModuleType | nn.Module) or callable(value):
        return ()
    if isinstance(value, DataLoader | Dataset | Iterator):  # they give batches, and are none
        return ()
    return vars(value).values() if hasattr(value, "__dict__") else ()


def _content(batch: Any) -> str:
    if not isinstance(batch, Mapping):
        return f"got {type(batch).__name__}"
    keys = [f"{key!r} ({type(value).__name__})" for key, value in list(batch.items())[:_MOST_KEYS]]
    more = f" and {len(batch) - _MOST_KEYS} more" if len(batch) > _MOST_KEYS else ""
    return f"it has the keys {', '.join(keys)}{more}" if keys else "it is an empty dict"


def real_lengths(batch: Any) -> list[int] | None:
    """Positions of each row that `attention_mask` calls real, or None when nothing is padded."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2 or mask.device.type == "meta":
        return None
    lengths = [int(length) for length in (mask != 0).sum(dim=1).tolist()]
    if min(lengths) == 0:
        raise InputError(f"attention_mask calls every position of row {lengths.index(0)} padding")
    return None if all(length == mask.shape[1] for length in lengths) else lengths


def images_of_row(
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


def as_call(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A batch is keyword arguments, positional arguments or the one argument of the model."""
    if isinstance(batch, Mapping):
        if not all(isinstance(name, str) for name in batch):
            raise InputError(f"a batch given as a dict needs argument names as keys, got {list(batch)[:5]}")
        return (), dict(batch)
    if isinstance(batch, tuple | list):
        return tuple(batch), {}
    return (batch,), {}
