"""Finds kernels that do not go through torch's dispatcher: they fill tensors that no op has written.

A Triton kernel or a CUDA extension that is called directly gets its output from `torch.empty` and fills it unseen. What
the dispatcher sees is a tensor that is made, never written, and read.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from flopwatch.flops.values import storage_address, written

UNSEEN_KERNEL = "kernel past the dispatcher"
UNSEEN_KERNEL_NOTE = (
    "an uninitialised tensor is read: a kernel that does not go through torch's dispatcher (Triton, a CUDA extension) "
    "may have filled it; its FLOPs are not counted"
)

_aten = torch.ops.aten
_MAKE_EMPTY = {
    _aten.empty,
    _aten.empty_like,
    _aten.empty_permuted,
    _aten.empty_strided,
    _aten.new_empty,
    _aten.new_empty_strided,
}
# They look at shape and type only.
_READ_NO_VALUES = {
    _aten.bernoulli,
    _aten.full_like,
    _aten.new_full,
    _aten.new_ones,
    _aten.new_zeros,
    _aten.ones_like,
    _aten.rand_like,
    _aten.randint_like,
    _aten.randn_like,
    _aten.resize_,
    _aten.set_,
    _aten.zeros_like,
}
_COPY_WHOLE = {_aten.clone, _aten._to_copy, _aten._pin_memory, _aten.lift_fresh_copy}


class Unwritten:
    """Keeps the storages that were made empty and not written since."""

    def __init__(self) -> None:
        # The weak reference keeps the address from being given to another storage.
        self._storages: dict[int, StorageWeakRef] = {}

    def is_read_by(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> bool:
        """Take note of one op that ran; true when it read something that nobody had written."""
        packet = func._overloadpacket
        if packet in _MAKE_EMPTY:
            self._made(out)
            return False
        if not self._storages:
            return False
        if packet in _COPY_WHOLE:  # a copy of nothing is nothing yet
            if self._known(args[0]):
                self._made(out)
            return False
        written = list(_written_into(func, args, kwargs))
        read = self._values_read(func, args, kwargs, written)
        for tensor in written:
            self._storages.pop(storage_address(tensor), None)
        for tensor in read:
            self._storages.pop(storage_address(tensor), None)  # told once
        return bool(read)

    def _values_read(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], written: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        if func.is_view or func._overloadpacket in _READ_NO_VALUES or func.namespace != "aten":
            return []
        return [
            leaf
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, torch.Tensor) and not any(leaf is other for other in written) and self._known(leaf)
        ]

    def _made(self, tensor: Any) -> None:
        if isinstance(tensor, torch.Tensor) and tensor.numel() and storage_address(tensor):
            self._storages[storage_address(tensor)] = StorageWeakRef(tensor.untyped_storage())

    def _known(self, tensor: torch.Tensor) -> bool:
        return storage_address(tensor) in self._storages


def _written_into(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors an op writes into; of ops outside of torch all it is given: nobody holds their schemas to it."""
    if func.namespace != "aten":
        yield from (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
        return
    yield from written(func, args, kwargs)
