"""How the processes of a trial share a model: each has all of it (DDP), or a part of it (FSDP2)."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from flopwatch.errors import InputError


class ReplicatedModel(DistributedDataParallel):
    """DDP through which the model's own methods and settings are still seen: trainers ask for `per_sample_losses`."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


def laid_out(model: nn.Module, layout: str | None, device: torch.device) -> nn.Module:
    """The model for this process; the process group is there already.

    Every process has built the same model from the same seed. Of FSDP2 the blocks of the model are units of their own,
    as its tutorial does, so that one block at a time is whole in memory.
    """
    if layout == "ddp":
        return ReplicatedModel(model, device_ids=None if device.type == "cpu" else [device])
    if layout != "fsdp":
        raise InputError(f"layout is ddp or fsdp, got {layout!r}")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))  # else it would take a GPU that is not asked for
    for block in dict.fromkeys(blocks(model)):  # a model may run one block several times
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def blocks(model: nn.Module) -> list[nn.Module]:
    """The members of the outermost module lists, such as a transformer's layers."""
    found: list[nn.Module] = []
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            found += [member for member in child if next(member.parameters(), None) is not None]
        else:
            found += blocks(child)
    return found
