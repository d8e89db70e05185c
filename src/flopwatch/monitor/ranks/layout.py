"""How the ranks of a training are laid out: which ranks share a device or a batch, and which rank reports to which."""

import os
import socket
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from flopwatch.records.flops import Peak
from flopwatch.torch_internals.modules import fsdp_groups

_LOCAL_RANKS = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
"""Environment variables with the number of ranks on this host: set by torchrun and accelerate, Open MPI, or MPICH."""


def shared_peak(peak: Peak, ranks: int) -> Peak:
    """Divide a device's peak by the number of ranks that share the device. A peak given by the user is not divided.

    >>> cpu = Peak(3e12, "a CPU", "fp32", "16 cores x 3 GHz", "derived", "high")
    >>> shared_peak(cpu, 3).flops_per_s, shared_peak(cpu, 3).source
    (1000000000000.0, '16 cores x 3 GHz, shared by 3 ranks')
    """
    if ranks <= 1 or peak.kind == "override":
        return peak
    source = f"{peak.source}, shared by {ranks} ranks"
    return replace(peak, flops_per_s=peak.flops_per_s / ranks, fraction=peak.fraction / ranks, source=source)


def device_identity(device: torch.device) -> str:
    """Identify the accelerator, or the set of CPU cores, on which this rank computes.

    Sets of cores that overlap without being equal count as different devices.
    """
    host = socket.gethostname()
    if device.type == "cpu":
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else ["all"]
        return f"{host}/cpu/{','.join(map(str, cores))}"
    # The device's index alone is not enough: with one visible device per rank, each rank's device has index 0.
    module: Any = getattr(torch, device.type, None)
    properties = module.get_device_properties(device) if hasattr(module, "get_device_properties") else None
    return f"{host}/{device}/{getattr(properties, 'uuid', None) or os.environ.get('LOCAL_RANK', '')}"


def ranks_by_launcher(device_type: str, environment: Mapping[str, str] = os.environ) -> int:
    """How many ranks share the device according to the launcher's variables: all ranks of a host share its CPU.

    >>> ranks_by_launcher("cpu", {"LOCAL_WORLD_SIZE": "4"}), ranks_by_launcher("cuda", {"LOCAL_WORLD_SIZE": "4"})
    (4, 1)
    """
    return _ranks_on_host(environment) if device_type == "cpu" else 1


def ranks_per_host(world_size: int, environment: Mapping[str, str] = os.environ) -> int:
    """How many consecutive ranks each host has, by the launcher's variables; 1 if this does not divide the world size.

    >>> ranks_per_host(16, {"LOCAL_WORLD_SIZE": "8"}), ranks_per_host(12, {"LOCAL_WORLD_SIZE": "8"})
    (8, 1)
    """
    ranks = _ranks_on_host(environment)
    return ranks if world_size % ranks == 0 else 1


def _ranks_on_host(environment: Mapping[str, str]) -> int:
    counts = [environment[name] for name in _LOCAL_RANKS if environment.get(name, "").isdigit()]
    return max(int(counts[0]), 1) if counts else 1


def data_parallel_size(model: nn.Module | None, world_size: int) -> int:
    """Find out from the model's parameters how many ranks have different batches.

    This detects tensor parallelism (DTensor parameters on a mesh that is not FSDP2's). Context and pipeline parallelism
    do not change the parameters, so users must pass `data_parallel_size`.
    """
    parameter = next((p for p in model.parameters() if isinstance(p, DTensor)), None) if model is not None else None
    if model is None or parameter is None:
        return world_size
    sharded = next((size for module in model.modules() if (size := _fsdp_size(module))), None)
    if sharded is not None:
        return sharded
    mesh_size: int = parameter.device_mesh.size()
    return max(1, world_size // mesh_size)


def waits_in_forward(model: nn.Module | None) -> bool:
    """Whether layers of the model wait for those of other ranks in the forward pass too, not only in the backward."""
    waiting = FSDPModule | FullyShardedDataParallel | nn.SyncBatchNorm
    return model is not None and (
        any(isinstance(module, waiting) for module in model.modules())
        or any(isinstance(parameter, DTensor) for parameter in model.parameters())
    )


def repeated_weights(model: nn.Module | None) -> list[str]:
    """Weights of a tensor parallel model that are not divided over its ranks, so that each rank may run them alike."""
    if model is None:
        return []
    data_ranks = next((size for module in model.modules() if (size := _fsdp_size(module))), 1)
    # FSDP2 puts its own dimensions of the mesh before those of tensor parallelism.
    divided = {
        id(p)
        for p in model.parameters()
        if isinstance(p, DTensor) and p.device_mesh.size() > data_ranks and not p.placements[-1].is_replicate()
    }
    if not divided:
        return []
    return [
        f"{owner}.{name}".removeprefix(".")
        for owner, module in model.named_modules()
        for name, p in module.named_parameters(recurse=False)
        if p.dim() > 1 and id(p) not in divided and not isinstance(module, nn.Embedding)
    ]


def _fsdp_size(module: nn.Module) -> int | None:
    """Number of ranks over which FSDP2 shards and replicates this module; None without FSDP2."""
    if not isinstance(module, FSDPModule):
        return None
    sizes = [int(group.mesh_info.mesh.size()) for group in fsdp_groups(module)]
    sizes = sizes or [_data_ranks(p) for p in module.parameters() if isinstance(p, DTensor)]
    # The largest mesh is used, because experts can be sharded over a smaller mesh than other parameters.
    return max(sizes, default=None)


def _data_ranks(parameter: DTensor) -> int:
    """Number of ranks over which FSDP2 shards and replicates a parameter.

    FSDP2 shards over one dimension of the mesh. Dimensions before it hold replicas, those after it are of tensor
    parallelism.
    """
    mesh, placements = parameter.device_mesh, parameter.placements
    sharded = next(
        (dim for dim, placement in enumerate(placements) if not placement.is_replicate()), len(placements) - 1
    )
    return prod(mesh.size(dim) for dim in range(sharded + 1))


FAN_OUT = 8
"""A rank has at most this many children on its own host, and at most this many on other hosts."""


def children(rank: int, root: int, world_size: int, per_host: int = 1) -> list[int]:
    """The ranks that send their reports to this rank.

    The ranks of a host form a tree below its first rank, or below the root on the root's host. The first ranks of the
    hosts form a tree below the root.

    >>> children(0, 0, 4), children(1, 0, 11)
    ([1, 2, 3], [9, 10])
    >>> children(4, 1, 8, per_host=4), children(1, 1, 8, per_host=4)
    ([5, 6, 7], [2, 3, 0, 4])
    """
    host, local = divmod(rank, per_host)
    root_host, first_of_root_host = divmod(root, per_host)
    first = first_of_root_host if host == root_host else 0
    place, hosts = (local - first) % per_host, world_size // per_host
    below = range(place * FAN_OUT + 1, min((place + 1) * FAN_OUT + 1, per_host))
    own_host = [host * per_host + (first + each) % per_host for each in below]
    if place > 0:
        return own_host
    host_place = (host - root_host) % hosts
    hosts_below = range(host_place * FAN_OUT + 1, min((host_place + 1) * FAN_OUT + 1, hosts))
    return [*own_host, *((root_host + each) % hosts * per_host for each in hosts_below)]
