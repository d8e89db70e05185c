"""What a batch is made of: every tensor wherever it lies, every size, every plain value.

A batch is described by its structure (names, types, ranks, plain values: what must be the same for two batches to be of
one kind) and its sizes (all dimensions of all tensors, in order). A FLOP law belongs to a structure; which of the sizes
it may vary is written down in its layout. Nothing else leaves the description.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Any

import torch

_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)
_LONG, _MOST_ELEMENTS = 32, 4096
_SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
_DEEPEST = 6
"""Objects nested deeper than this (or in a circle) are described by their type."""


@dataclass(frozen=True, slots=True)
class Description:
    """A batch without its values.

    Attributes:
        structure: Names, types and ranks of everything in it, and the plain values; hashable.
        sizes: All dimensions of all tensors, and the lengths of lists of equal items, in the order of the structure.
    """

    structure: Any
    sizes: tuple[int, ...]


def describe(batch: Any) -> Description:
    """What a batch is, apart from the values of its tensors.

    >>> describe({"x": torch.zeros(2, 3), "flag": True}).sizes
    (2, 3)
    """
    sizes: list[int] = []
    structure = _described(batch, sizes, 0)
    return Description(structure, tuple(sizes))


def _described(value: Any, sizes: list[int], depth: int) -> Any:
    if isinstance(value, torch.Tensor):
        sizes.extend(value.shape)
        return "tensor", value.dtype, value.dim(), str(value.layout), value.requires_grad, stored_elements(value)
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
    """A list of items that are described alike, sizes included, counts as one item and how many there are."""
    if len(items) > _LONG and all(isinstance(item, _PLAIN) for item in items):
        return "value", len(items), hash(tuple(items))
    apart: list[tuple[Any, list[int]]] = []
    for item in items:
        own: list[int] = []
        apart.append((_described(item, own, depth + 1), own))
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
        return "value", name, str(getattr(value, "dtype", "")), getattr(value, "shape", ()), _numpy_hash(value)
    if callable(value) or isinstance(value, type):
        own_values = _described([*_closed_over(value)], sizes, depth + 1)
        return "object", name, getattr(value, "__qualname__", ""), id(getattr(value, "__code__", None)), own_values
    held = getattr(value, "__dict__", None)
    slots = [slot for kind in type(value).__mro__ for slot in _slots(kind) if hasattr(value, slot)]
    if not isinstance(held, dict) and slots:
        held = {slot: getattr(value, slot) for slot in slots}
    if not isinstance(held, dict) and is_dataclass(value):
        held = {field.name: getattr(value, field.name) for field in fields(value)}
    if not isinstance(held, dict):
        return "object", name
    parts = []
    for key, item in held.items():
        own: list[int] = []
        parts.append((key, _described(item, own, depth + 1)))
        sizes.extend(own)
    return "parts", name, tuple(parts)


def stored_elements(tensor: torch.Tensor) -> int | None:
    """How many elements a sparse tensor holds, which its products cost by; None for others."""
    return int(tensor._nnz()) if tensor.layout in _SPARSE else None


def _slots(kind: type) -> tuple[str, ...]:
    slots = kind.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _closed_over(function: Any) -> Iterator[Any]:
    """What a function has besides its code, and may be steered by."""
    if isinstance(function, partial):
        yield from (function.func, list(function.args), function.keywords)
    yield from getattr(function, "__defaults__", None) or ()
    for cell in getattr(function, "__closure__", None) or ():
        with suppress(ValueError):  # not filled yet
            yield cell.cell_contents


def _numpy_hash(value: Any) -> int:
    """Of a large array a few thousand elements: it is looked at on every step."""
    flat = value.reshape(-1)
    return hash((flat if flat.size <= _MOST_ELEMENTS else flat[:: flat.size // _MOST_ELEMENTS]).tobytes())


def tensors_of(batch: Any) -> dict[str, torch.Tensor]:
    """All tensors by their path, such as `targets.0.boxes`; a single tensor is called `0`."""
    found: dict[str, torch.Tensor] = {}
    for path, value in _leaves(batch, "", 0):
        if isinstance(value, torch.Tensor):
            found[path or "0"] = value
    return found


def _leaves(value: Any, path: str, depth: int) -> Iterator[tuple[str, Any]]:
    children = _children(value) if depth <= _DEEPEST else None
    if children is None:
        yield path, value
        return
    for name, child in children:
        yield from _leaves(child, f"{path}.{name}" if path else str(name), depth + 1)


def _children(value: Any) -> list[tuple[Any, Any]] | None:
    if isinstance(value, torch.Tensor | str | bytes):
        return None
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, list | tuple):
        return list(enumerate(value))
    if is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in fields(value)]
    return None


def map_tensors(
    batch: Any,
    change: Callable[[str, torch.Tensor], Any],
    change_other: Callable[[Any], Any] = lambda value: value,
    path: str = "",
    depth: int = 0,
) -> Any:
    """The same batch with every tensor changed; lists, dicts and dataclasses are made anew, other objects shared."""
    if isinstance(batch, torch.Tensor):
        return change(path or "0", batch)
    children = _children(batch) if depth <= _DEEPEST else None
    if children is None:
        return change_other(batch)
    changed = {
        name: map_tensors(child, change, change_other, f"{path}.{name}" if path else str(name), depth + 1)
        for name, child in children
    }
    return _rebuilt(batch, changed)


def _rebuilt(original: Any, items: dict[Any, Any]) -> Any:
    if type(original) is dict:
        return items
    if isinstance(original, Mapping):
        twin: Any = copy.copy(original)
        try:
            for name, item in items.items():
                twin[name] = item
        except TypeError:  # a mapping that cannot be written to
            return items
        return twin
    if isinstance(original, list):
        return list(items.values())
    if isinstance(original, tuple):
        values = items.values()
        return type(original)(*values) if hasattr(original, "_fields") else tuple(values)
    try:
        return replace(original, **items)
    except (TypeError, ValueError):  # fields that __init__ does not take
        twin = copy.copy(original)
        for name, item in items.items():
            object.__setattr__(twin, name, item)
        return twin
