"""Keeps one rank that counts from talking to the others, which do not count with it.

A collective that one rank runs alone hangs, or pairs up with the training's next one and spoils it. What only spreads a
model over ranks is taken off before counting (see `replica`), so what is met here is written in the model's own code.
"""

from typing import Any

import torch
from torch import distributed
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from flopwatch.errors import MeasurementError

ONE_RANKS_SHARE = "the model's own code calls collectives: what is counted is the share of this rank"

_NAMESPACES = {"c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "symm_mem"}


class NeedsOtherRanksError(MeasurementError):
    """The model cannot be run without the other ranks."""


def is_collective(func: Any) -> bool:
    """Whether this op talks to other ranks."""
    return func.namespace in _NAMESPACES and has_other_ranks()


def has_other_ranks() -> bool:
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def refuse_real_collective(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], module: str) -> None:
    """Raise unless the op has fake tensors only, of which torch just works out the shapes."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    if tensors and all(isinstance(tensor, FakeTensor) for tensor in tensors):
        return
    where = f"module {module!r}" if module else "the model itself"
    raise NeedsOtherRanksError(
        f"{where} calls the collective {func._schema.name}, which this rank cannot run alone; "
        "count the model without its parallelism, or give its FLOPs yourself (flops_fn of the monitor)"
    )
