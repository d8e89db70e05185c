"""What ranks share: a device, and with it its peak; or a batch, so that only some ranks see different data."""

import os
import socket
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FlatParameter, FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from flopwatch.records.flops import Peak
from flopwatch.torch_internals import fsdp_groups

_LOCAL_RANKS = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
"""Variables that hold the number of ranks on this host: torchrun and accelerate, Open MPI, MPICH."""


def shared_peak(peak: Peak, ranks: int) -> Peak:
    """The part of a device's peak that each of `ranks` ranks can use. A peak given by the user is not divided.

    >>> cpu = Peak(3e12, "a CPU", "fp32", "16 cores x 3 GHz", "derived", "high")
    >>> shared_peak(cpu, 3).flops_per_s, shared_peak(cpu, 3).source
    (1000000000000.0, '16 cores x 3 GHz, shared by 3 ranks')
    """
    if ranks <= 1 or peak.kind == "override":
        return peak
    source = f"{peak.source}, shared by {ranks} ranks"
    return replace(peak, flops_per_s=peak.flops_per_s / ranks, fraction=peak.fraction / ranks, source=source)


def device_identity(device: torch.device) -> str:
    """A text that is equal for ranks on the same device: the same set of cores of a host, or the same accelerator.

    Sets of cores that overlap without being equal count as different devices.
    """
    host = socket.gethostname()
    if device.type == "cpu":
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else ["all"]
        return f"{host}/cpu/{','.join(map(str, cores))}"
    # The index alone is not enough: with one visible device per rank, every rank calls its own number 0.
    return f"{host}/{device}/{_uuid(device) or os.environ.get('LOCAL_RANK', '')}"


def _uuid(device: torch.device) -> str | None:
    module: Any = getattr(torch, device.type, None)
    properties = module.get_device_properties(device) if hasattr(module, "get_device_properties") else None
    uuid = getattr(properties, "uuid", None)
    return None if uuid is None else str(uuid)


def ranks_by_launcher(device_type: str, environment: Mapping[str, str] = os.environ) -> int:
    """How many ranks share the device according to the launcher's variables: all ranks of a host share its CPU.

    >>> ranks_by_launcher("cpu", {"LOCAL_WORLD_SIZE": "4"}), ranks_by_launcher("cuda", {"LOCAL_WORLD_SIZE": "4"})
    (4, 1)
    """
    counts = [environment[name] for name in _LOCAL_RANKS if environment.get(name, "").isdigit()]
    return max(int(counts[0]), 1) if counts and device_type == "cpu" else 1


class DeviceCensus:
    """Counts the ranks on each device, with one counter per device in the run's store."""

    def __init__(self, store: Any, identity: str, world_size: int) -> None:
        self._store = store
        self._key = f"on_device/{identity}"
        self._world_size = world_size
        store.add(self._key, 1)
        store.add("on_any_device", 1)

    def ranks(self, *, is_final: bool = False) -> int | None:
        """How many ranks share this one's device; None while ranks are missing, unless `is_final`."""
        if not is_final and int(self._store.add("on_any_device", 0)) < self._world_size:
            return None
        return int(self._store.add(self._key, 0))


def data_parallel_size(model: nn.Module | None, world_size: int) -> int:
    """How many ranks work on different batches, as far as the model's parameters show.

    Tensor parallelism is visible (DTensor parameters on a mesh that is not FSDP2's). Context and pipeline parallelism
    leave no mark on parameters, so users pass `data_parallel_size`.
    """
    parameter = next((p for p in model.parameters() if isinstance(p, DTensor)), None) if model is not None else None
    if model is None or parameter is None:
        return world_size
    sharded = next((size for module in model.modules() if (size := _fsdp_size(module))), None)
    if sharded is not None:
        return sharded
    mesh_size: int = parameter.device_mesh.size()
    return max(1, world_size // mesh_size)


def is_sharded(model: nn.Module | None) -> bool:
    """Whether a rank holds only parts of the parameters: FSDP of either kind, tensor parallelism."""
    if model is None:
        return False
    return any(isinstance(p, DTensor | FlatParameter) for p in model.parameters()) or any(
        isinstance(module, FullyShardedDataParallel) for module in model.modules()
    )


def _fsdp_size(module: nn.Module) -> int | None:
    """Ranks that FSDP2 shards and replicates this module over."""
    if not isinstance(module, FSDPModule):
        return None
    # Experts may be sharded over a smaller mesh than the rest.
    return max((int(group.mesh_info.mesh.size()) for group in fsdp_groups(module)), default=None)
