"""Takes nested containers of tensors apart and puts them together again, as torch's private pytree module does.

Containers are tuples, lists, dicts, named tuples, torch's result tuples (`torch.return_types`) and the outputs of
transformers (`ModelOutput`). Everything else is a leaf, also a dataclass or an object of the user's.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from typing import Any

import torch

Structure = Any
"""The containers of a value without its leaves: None for a leaf, otherwise (type, keys, structures of the items).
Structures can be hashed and compared."""

_DICTS = (dict, OrderedDict, defaultdict)


def leaves_of(value: Any) -> list[Any]:
    """Return all leaves of a value, in order.

    >>> leaves_of(({"a": 1, "b": [2, None]}, 3))
    [1, 2, None, 3]
    """
    found: list[Any] = []
    _collect(value, found)
    return found


def tensors_in(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in leaves_of(value) if isinstance(leaf, torch.Tensor)]


def _collect(value: Any, found: list[Any]) -> None:
    items = _items(value)
    if items is None:
        found.append(value)
    else:
        for item in items:
            _collect(item, found)


def _items(value: Any) -> Any:
    """The items of a container; None for a leaf."""
    kind = type(value)
    if kind is tuple or kind is list:
        return value
    if kind in _DICTS or (isinstance(value, OrderedDict) and is_dataclass(value)):
        return value.values()
    return value if isinstance(value, tuple) and (hasattr(kind, "_fields") or _is_result(kind)) else None


def _is_result(kind: type) -> bool:
    return kind.__module__ == "torch.return_types"


def flatten(value: Any) -> tuple[list[Any], Structure]:
    """Return the leaves of a value and its structure, from which `rebuild` makes the value again.

    >>> leaves, structure = flatten({"a": (1, 2)})
    >>> leaves, rebuild([3, 4], structure)
    ([1, 2], {'a': (3, 4)})
    """
    found: list[Any] = []
    return found, _taken_apart(value, found)


def _taken_apart(value: Any, found: list[Any]) -> Structure:
    items = _items(value)
    if items is None:
        found.append(value)
        return None
    keys = tuple(value) if isinstance(value, dict) else ()
    factory = value.default_factory if type(value) is defaultdict else None
    return type(value), (keys, factory), tuple([_taken_apart(item, found) for item in items])


def rebuild(leaves: list[Any], structure: Structure) -> Any:
    return _put_together(iter(leaves), structure)


def _put_together(leaves: Iterator[Any], structure: Structure) -> Any:
    if structure is None:
        return next(leaves)
    kind, (keys, factory), parts = structure
    items = [_put_together(leaves, part) for part in parts]
    if kind is defaultdict:
        return defaultdict(factory, zip(keys, items, strict=True))
    if kind in _DICTS:
        return kind(zip(keys, items, strict=True))
    if issubclass(kind, OrderedDict):
        return kind(**dict(zip(keys, items, strict=True)))
    return kind(*items) if hasattr(kind, "_fields") else kind(items)


def map_tensors_in(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Return the value with `function` applied to its tensors."""
    leaves, structure = flatten(value)
    return rebuild([function(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], structure)
