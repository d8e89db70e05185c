"""Describes what a batch contains: all its tensors, at any depth of nesting, and all plain values.

A description has two parts: the structure (names, types, numbers of dimensions, plain values) and the sizes (all
dimensions of all tensors, in order). One formula for the FLOPs of a step serves all batches of the same structure.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset

from flopwatch.errors import InputError
from flopwatch.torch_internals.ops import stored_count

_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)
# Batches are described on every step. To save time, lists with more plain values than this are reduced to a hash.
_LONGEST_LIST = 32
# If an array has more elements than this, only about this many, evenly spaced, are hashed, to save time.
_MOST_ELEMENTS = 4096
_SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
# Objects nested deeper than this are described by their type only, so that cyclic references come to an end.
_DEEPEST = 6


class Description(NamedTuple):
    """A hashable structure, and the sizes in its order: dimensions of tensors, and lengths of lists of equal items."""

    structure: Any
    sizes: tuple[int, ...]


def describe(batch: Any) -> Description:
    """Return the structure and sizes of a batch.

    >>> describe({"x": torch.zeros(2, 3), "flag": True}).sizes
    (2, 3)
    """
    sizes: list[int] = []
    structure = _described(batch, sizes, 0)
    return Description(structure, tuple(sizes))


def _described(value: Any, sizes: list[int], depth: int) -> Any:
    if isinstance(value, torch.Tensor):
        sizes.extend(value.shape)
        # How many elements a sparse tensor stores decides the FLOPs of its products.
        stored = stored_count(value) if value.layout in _SPARSE else None
        return "tensor", value.dtype, value.dim(), str(value.layout), value.requires_grad, stored
    if isinstance(value, _PLAIN):
        return "value", type(value).__name__, value
    if depth > _DEEPEST:
        return "object", type(value).__qualname__
    if isinstance(value, Mapping):
        return "dict", tuple((str(name), _described(item, sizes, depth + 1)) for name, item in value.items())
    if isinstance(value, list | tuple):
        return _described_list(value, sizes, depth)
    return _described_object(value, sizes, depth)


def _described_list(items: Any, sizes: list[int], depth: int) -> Any:
    """If all items have equal structure and sizes, describe one item and the number of items; else describe each."""
    if len(items) > _LONGEST_LIST and all(isinstance(item, _PLAIN) for item in items):
        return "value", len(items), hash(tuple(items))
    apart: list[tuple[Any, list[int]]] = []
    for item in items:
        own: list[int] = []
        apart.append((_described(item, own, depth + 1), own))
    # At depth 0 the items are the model's arguments. Even equal ones are described one by one: their meanings differ.
    if depth > 0 and apart and apart[0][1] and all(each == apart[0] for each in apart[1:]):
        sizes.append(len(apart))
        sizes.extend(apart[0][1])
        return "items", apart[0][0]
    for _, own in apart:
        sizes.extend(own)
    return "list", tuple(structure for structure, _ in apart)


def _described_object(value: Any, sizes: list[int], depth: int) -> Any:
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, set | frozenset):
        return "value", name, tuple(sorted(map(repr, value)))
    if type(value).__module__ == "numpy":
        flat = value.reshape(-1)
        some = flat if flat.size <= _MOST_ELEMENTS else flat[:: flat.size // _MOST_ELEMENTS]
        return "value", name, str(getattr(value, "dtype", "")), getattr(value, "shape", ()), hash(some.tobytes())
    held = getattr(value, "__dict__", None)
    if callable(value) or not isinstance(held, dict):
        return "object", name, getattr(value, "__qualname__", ""), id(getattr(value, "__code__", None))
    return "parts", name, tuple((key, _described(item, sizes, depth + 1)) for key, item in held.items())


def tensors_of(batch: Any, path: str = "", depth: int = 0, *, in_objects: bool = False) -> dict[str, torch.Tensor]:
    """Return all tensors by their path, such as `targets.0.boxes`; a batch that is one tensor has the path `0`.

    Objects of other classes than lists, dicts and dataclasses are searched if `in_objects` is True.
    """
    if isinstance(batch, torch.Tensor):
        return {path or "0": batch}
    found: dict[str, torch.Tensor] = {}
    for name, child in _children(batch, depth) or (_attributes(batch, depth) if in_objects else ()):
        found |= tensors_of(child, inside(path, name), depth + 1, in_objects=in_objects)
    return found


def inside(path: str, name: Any) -> str:
    return f"{path}.{name}" if path else str(name)


def _children(value: Any, depth: int) -> list[tuple[Any, Any]]:
    if depth > _DEEPEST:
        return []
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, list | tuple):
        return list(enumerate(value))
    if is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in fields(value)]
    return []


def _attributes(value: Any, depth: int) -> list[tuple[str, Any]]:
    # Loaders and data sets yield batches, but are not batches.
    is_other = callable(value) or isinstance(value, ModuleType | DataLoader | Dataset | Iterator)
    return [] if depth > _DEEPEST or is_other else list(getattr(value, "__dict__", {}).items())


def map_tensors(batch: Any, change: Callable[[str, torch.Tensor], Any], path: str = "", depth: int = 0) -> Any:
    """Return a copy of the batch in which `change(path, tensor)` replaces each tensor.

    Lists, dicts and dataclasses are copied. Objects of other classes are not searched for tensors.
    """
    if isinstance(batch, torch.Tensor):
        return change(path or "0", batch)
    items = {name: map_tensors(child, change, inside(path, name), depth + 1) for name, child in _children(batch, depth)}
    if not items:
        return batch
    if isinstance(batch, Mapping):
        return items
    if isinstance(batch, list):
        return list(items.values())
    if isinstance(batch, tuple):
        return type(batch)(*items.values()) if hasattr(batch, "_fields") else tuple(items.values())
    twin = copy.copy(batch)
    for name, item in items.items():
        object.__setattr__(twin, name, item)
    return twin


MAIN_SEQUENCE = ("input_ids", "inputs_embeds", "input_values", "decoder_input_ids", "labels")
"""Arguments whose dimension 1 is a sequence, the most important one first. `input_values` is raw audio."""
FLAT_IMAGES = {"pixel_values": "image_grid_thw", "pixel_values_videos": "video_grid_thw"}
"""Maps the argument with the patches of all images to the argument with the images' sizes in patches, as in Qwen-VL."""
_MOST_KEYS = 12


class BatchShape(NamedTuple):
    """The number of samples, and of positions per sample; `seq_len` is None for a batch without a text sequence."""

    batch_size: int
    seq_len: int | None


def named(batch: Any) -> dict[str, Any]:
    if isinstance(batch, Mapping):
        return dict(batch)
    items = batch if isinstance(batch, tuple | list) else [batch]
    return {str(index): item for index, item in enumerate(items)}


def read_shape(batch: Any) -> BatchShape:
    arguments = named(batch)
    tensors = {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}
    first: Any = next(iter(arguments.values()), None)
    # As for object detectors: a list with one entry per sample.
    is_list = isinstance(first, list) and first and all(isinstance(item, torch.Tensor | Mapping) for item in first)
    samples = len(first) if is_list and tensors_of(first) else None
    if not tensors:
        tensors = tensors_of(batch) or {
            str(at): each for at, each in enumerate(tensors_of(batch, in_objects=True).values())
        }
    if not tensors:
        raise InputError(
            f"the batch holds no tensor (got {_content(batch)}); pass what the model is called with: a tensor, a tuple "
            "or a dict of tensors. For a DataLoader pass next(iter(loader)), for numpy torch.from_numpy(array)"
        )
    for name, tensor in tensors.items():
        if tensor.numel() == 0:
            raise InputError(f"the batch is empty: its tensor {name!r} has the shape {tuple(tensor.shape)}")
    for name in MAIN_SEQUENCE:
        if name in tensors and tensors[name].dim() == (3 if name == "inputs_embeds" else 2):
            if name == "labels" and "pixel_values" in tensors:  # with images, `labels` holds classes and no sequence
                continue
            return BatchShape(tensors[name].shape[0], tensors[name].shape[1])
    if samples is not None:
        return BatchShape(samples, None)
    first = next((tensor for name, tensor in tensors.items() if name not in FLAT_IMAGES), next(iter(tensors.values())))
    if first.dim() == 0:
        return BatchShape(1, None)
    are_token_ids = first.dim() == 2 and not first.is_floating_point()
    return BatchShape(first.shape[0], first.shape[1] if are_token_ids else None)


def _content(batch: Any) -> str:
    if isinstance(batch, list | tuple) and batch:
        return f"a {type(batch).__name__} of {type(batch[0]).__name__}"
    if not isinstance(batch, Mapping):
        return type(batch).__name__
    keys = [f"{key!r} ({type(value).__name__})" for key, value in list(batch.items())[:_MOST_KEYS]]
    more = f" and {len(batch) - _MOST_KEYS} more keys" if len(batch) > _MOST_KEYS else ""
    return f"a dict with the keys {', '.join(keys)}{more}" if keys else "an empty dict"


def real_lengths(batch: Any) -> list[int] | None:
    """Return for each row how many positions `attention_mask` marks as real; None if no row has padding."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2 or mask.device.type == "meta":
        return None
    lengths = [int(length) for length in (mask != 0).sum(dim=1).tolist()]
    if min(lengths) == 0:
        raise InputError(
            f"attention_mask marks every position of row {lengths.index(0)} as padding; "
            "pass a batch in which every row has at least one real position"
        )
    return None if all(length == mask.shape[1] for length in lengths) else lengths


def as_call(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments with which the model is called on this batch.

    A dict holds keyword arguments, a tuple or list holds positional ones, anything else is the only argument.
    """
    if isinstance(batch, Mapping):
        if not all(isinstance(name, str) for name in batch):
            raise InputError(f"the keys of a batch must be names of the model's arguments, got {list(batch)[:5]}")
        return (), dict(batch)
    if isinstance(batch, tuple | list):
        return tuple(batch), {}
    return (batch,), {}


IGNORED_LABEL = -100
"""The label that torch's cross entropy and transformers leave out of the loss."""
# The seed is fixed, so that fitting the same model twice gives the same formula.
_SEED = 20_24


def altered_batches(batch: Any, name: str) -> Iterator[Any]:
    """Yield copies of the batch with other values of one integer argument, to test whether they change the FLOPs.

    The values are shuffled, drawn anew, halved or masked. The model may reject some of the copies.
    """
    own = [tensor for path, tensor in tensors_of(batch).items() if path.partition(".")[0] == name]
    if not own or any(tensor.is_floating_point() or tensor.device.type == "meta" for tensor in own):
        return
    changes: list[Callable[[torch.Tensor], torch.Tensor]] = [_shuffled_rows, _drawn_anew]
    if "label" in name:
        changes.append(_half_ignored)
    elif all(bool(((tensor == 0) | (tensor == 1)).all()) for tensor in own):
        changes = [_half_off, torch.ones_like]
    else:
        changes.append(lambda tensor: torch.clamp(tensor // 2, min=min(1, int(tensor.min()))))
    for change in changes:

        def changed(path: str, tensor: torch.Tensor, change: Any = change) -> torch.Tensor:
            return change(tensor.detach().cpu().clone()) if path.partition(".")[0] == name else tensor

        yield map_tensors(batch, changed)


def _shuffled_rows(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dim() == 0:
        return tensor
    order = torch.randperm(tensor.shape[-1], generator=torch.Generator().manual_seed(_SEED))
    return tensor[..., order]


def _drawn_anew(tensor: torch.Tensor) -> torch.Tensor:
    low, high = int(tensor.min()), int(tensor.max())
    generator = torch.Generator().manual_seed(_SEED)
    return torch.randint(low, high + 1, tensor.shape, generator=generator).to(tensor.dtype)


def _half_ignored(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dim() > 1:
        tensor[..., : tensor.shape[-1] // 2] = IGNORED_LABEL
    return tensor


def _half_off(tensor: torch.Tensor) -> torch.Tensor:
    tensor[..., tensor.shape[-1] // 2 + 1 :] = 0
    return tensor
