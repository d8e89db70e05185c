"""Tells whether two tensors hold the same values without reading any: by the ops that made them.

Every storage has a content, which is a number. A storage that was never met has a content of its own. What an op gives
has the content "this op on these contents with these arguments", so that the same op on the same values gives the same
content again, in whatever storage; a write gives a storage another content. Compilers call this value numbering (Cocke
and Schwartz, Programming Languages and Their Compilers, 1970).
"""

from collections import Counter
from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

_aten = torch.ops.aten
_COPIES = {_aten.clone, _aten._to_copy}


class Value(NamedTuple):
    """What a tensor holds: a part of a content. Equal values are equal numbers, element by element."""

    content: int
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


class _Content(NamedTuple):
    number: int
    shift: int
    """From offsets in this storage to offsets in the content, where a copy left out what was before."""
    is_from_forward: bool
    reference: StorageWeakRef | None
    """Keeps the storage's address from being given to another one; not its memory."""


class Values:
    """The contents of the storages that were met."""

    def __init__(self) -> None:
        self._contents: dict[int, _Content] = {}
        self._numbers: dict[Hashable, int] = {}
        self._made_in_backward: set[int] = set()
        self._draws: Counter[Hashable] = Counter()

    def restart_draws(self) -> None:
        """A forward pass that runs again draws the same random numbers in the same order, or it would be wrong."""
        self._draws.clear()

    def of(self, tensor: torch.Tensor, *, in_backward: bool) -> Value:
        """The value of a tensor; `in_backward` tells when it is met, which matters the first time."""
        content = self._content(tensor, in_backward)
        # The stride of a dimension with one element means nothing.
        strides = tuple(0 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        offset = int(tensor.storage_offset()) + content.shift
        return Value(content.number, offset, tuple(tensor.shape), strides, tensor.dtype)

    def is_rebuilt(self, tensor: torch.Tensor) -> bool:
        """Whether it was first computed in the backward pass, out of nothing but what the forward pass had."""
        content = self._contents.get(storage_address(tensor))
        return content is not None and content.is_from_forward and content.number in self._made_in_backward

    def is_unknown(self, tensor: torch.Tensor) -> bool:
        """Whether it came from elsewhere into the backward pass: a gradient, or something unpacked."""
        content = self._contents.get(storage_address(tensor))
        return content is None or not content.is_from_forward

    def follow(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, *, in_backward: bool
    ) -> None:
        """Note what an op has given and written."""
        leaves = tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if self._follow_copy(func, args, out, in_backward):
            return
        key: Hashable = (func, *(self._part(leaf, in_backward) for leaf in leaves))
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._draws[key] += 1
            key = key, self._draws[key]
        is_from_forward = all(self._content(tensor, in_backward).is_from_forward for tensor in tensors)
        results = list(written(func, args, kwargs))
        given = {storage_address(tensor) for tensor in tensors}
        results += [
            leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor) and storage_address(leaf) not in given
        ]
        for index, tensor in enumerate(results):
            self._set(tensor, self._number((key, index), in_backward), 0, is_from_forward)

    def look_on(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Note what an op that is not followed has changed of what is known."""
        if not self._contents:
            return
        if func._overloadpacket in _COPIES and storage_address(args[0]) in self._contents:
            self._follow_copy(func, args, out, in_backward=False)
        if func._schema.is_mutable:
            for tensor in written(func, args, kwargs):
                if storage_address(tensor) in self._contents:
                    self._set(tensor, self._number(object(), in_backward=False), 0, is_from_forward=False)

    def _follow_copy(self, func: OpOverload, args: tuple[Any, ...], out: Any, in_backward: bool) -> bool:
        """A copy in the same layout and type has its source's content, on whatever device."""
        if func._overloadpacket not in _COPIES:
            return False
        source = args[0]
        if source.dtype != out.dtype or source.stride() != out.stride() or not storage_address(source):
            return False
        if storage_address(out) != storage_address(source):
            content = self._content(source, in_backward)
            shift = content.shift + int(source.storage_offset()) - int(out.storage_offset())
            self._set(out, content.number, shift, content.is_from_forward)
        return True

    def _content(self, tensor: torch.Tensor, in_backward: bool) -> _Content:
        known = self._contents.get(storage_address(tensor))
        return known or self._set(tensor, self._number(object(), in_backward=False), 0, not in_backward)

    def _set(self, tensor: torch.Tensor, number: int, shift: int, is_from_forward: bool) -> _Content:
        address = storage_address(tensor)
        if not address:
            return _Content(number, shift, is_from_forward, None)
        self._contents[address] = _Content(number, shift, is_from_forward, StorageWeakRef(tensor.untyped_storage()))
        return self._contents[address]

    def _number(self, key: Hashable, in_backward: bool) -> int:
        if key not in self._numbers:
            self._numbers[key] = len(self._numbers)
            if in_backward:
                self._made_in_backward.add(self._numbers[key])
        return self._numbers[key]

    def _part(self, leaf: Any, in_backward: bool) -> Hashable:
        if isinstance(leaf, torch.Tensor):
            return self.of(leaf, in_backward=in_backward) if storage_address(leaf) else object()
        return (type(leaf), leaf) if isinstance(leaf, Hashable) else id(leaf)


def written(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors that an op writes into, by its schema."""
    if not func._schema.is_mutable:
        return
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = kwargs.get(argument.name, args[index] if index < len(args) else None)
            yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


def storage_address(tensor: torch.Tensor) -> int:
    """Where the storage's own record lies, which views share; 0 for tensors that have no storage of their own."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return 0
    return int(tensor.untyped_storage()._cdata)
