"""Takes nested containers of tensors apart and puts them together again, as torch's private pytree module does.

Containers are tuples, lists, dicts, named tuples, torch's result tuples (`torch.return_types`) and the outputs of
transformers (`ModelOutput`). Everything else is a leaf, also a dataclass or an object of the user's.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import is_dataclass
from typing import Any

import torch

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
    kind = type(value)
    if kind is tuple or kind is list:
        return value
    if kind in _DICTS or (isinstance(value, OrderedDict) and is_dataclass(value)):
        return value.values()
    if isinstance(value, tuple) and (hasattr(kind, "_fields") or kind.__module__ == "torch.return_types"):
        return value
    return None


def map_tensors_in(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Return the value with `function` applied to its tensors.

    >>> map_tensors_in(lambda tensor: tuple(tensor.shape), {"a": [torch.zeros(2), 3]})
    {'a': [(2,), 3]}
    """
    items = _items(value)
    if items is None:
        return function(value) if isinstance(value, torch.Tensor) else value
    mapped = [map_tensors_in(function, item) for item in items]
    kind: Any = type(value)
    if kind is defaultdict:
        return kind(value.default_factory, zip(value, mapped, strict=True))
    if isinstance(value, dict):
        pairs = dict(zip(value, mapped, strict=True))
        return kind(pairs) if kind in _DICTS else kind(**pairs)
    return kind(*mapped) if hasattr(kind, "_fields") else kind(mapped)
