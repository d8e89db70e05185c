"""The processes of a trial: the part of batch and model that each one takes, and the results of all together."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from flopwatch.errors import UnsupportedError
from flopwatch.records.flops import Peak
from flopwatch.records.trial import MemoryUse, StepCost, TrialSpec
from flopwatch.stats import median
from flopwatch.sweep.host.processes import usable_cores
from flopwatch.sweep.spec.parsing import check_processes, needs_one_process
from flopwatch.sweep.trainers.batch import batch_rows, micro_batches

_LEAST_TIMEOUT_SECONDS = 1800.0
"""The shortest timeout of collectives (torch's default for gloo). A supervisor ends a hang before it times out."""


class ReplicatedModel(DistributedDataParallel):
    """DDP with the attributes of the wrapped model, because trainers read its `per_sample_losses` and `config`."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


class RankGroup:
    """The processes of a trial. Several are started by torchrun with RANK, WORLD_SIZE and LOCAL_RANK."""

    def __init__(self, spec: TrialSpec) -> None:
        check_processes(spec)
        if reason := needs_one_process(spec):
            raise UnsupportedError(reason)
        self.size = spec.processes
        self.rank = int(os.environ["RANK"]) if self.size > 1 else 0
        self._layout = spec.layout
        silence = spec.limits.no_progress_seconds or 0.0
        self._timeout = timedelta(seconds=max(_LEAST_TIMEOUT_SECONDS, 2 * silence))

    def device(self, device: torch.device) -> torch.device:
        """The device of this process. For several, torch.distributed is initialised with the backend of the device."""
        if self.size == 1:
            return device
        if device.type == "cpu":
            dist.init_process_group("gloo", timeout=self._timeout)
            return device
        own = torch.device(device.type, int(os.environ["LOCAL_RANK"]) % torch.accelerator.device_count())
        torch.accelerator.set_device_index(own.index)
        own_backend = dist.get_default_backend_for_device(own)
        dist.init_process_group(f"cpu:gloo,{own.type}:{own_backend}", timeout=self._timeout, device_id=own)
        return own

    def own_part(self, batch: Mapping[str, Any], batch_size: int) -> Mapping[str, Any]:
        if self.size == 1:
            return batch
        rows = batch_rows(batch)
        if rows != batch_size:
            raise UnsupportedError(
                f"{self.size} processes cannot share the batch, because it has {rows} rows for {batch_size} samples; "
                "make a batch with one row for each sample, or do not set `processes`"
            )
        part = micro_batches(batch, batch_size // self.size)[self.rank]
        # Clones, because views would keep the whole batch in memory.
        return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in part.items()}

    def distributed(self, model: nn.Module, device: torch.device) -> nn.Module:
        """The model as this process trains it: wrapped by DDP or sharded by FSDP2 if there are several processes.

        Every process has built the same model from the same seed. With FSDP2 each block is sharded as a unit, as in
        torch's tutorial, so that a process holds all parameters of only one block at a time.
        """
        if self.size == 1:
            return model
        if self._layout != "fsdp":
            return ReplicatedModel(model, device_ids=None if device.type == "cpu" else [device])
        # Imported here, because torch.distributed.fsdp takes a second to import and most trials do not use it.
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        # The default mesh would use a GPU even for a trial on the CPU.
        mesh = init_device_mesh(device.type, (self.size,))
        for block in dict.fromkeys(blocks(model)):  # a model may contain one block several times
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model

    def peak(self, device: torch.device, peak_of: Callable[[], Peak | None]) -> Peak | None:
        """For rank 0, the peak FLOP/s of all devices, which are alike; `peak_of` returns that of its device."""
        if self.size == 1:
            return peak_of()
        # Imported here, because it imports torch.distributed.fsdp, which takes a second.
        from flopwatch.monitor.ranks.layout import device_identity

        # If several processes share a device, its peak is measured with as many threads as all of them have.
        mine, own = device_identity(device), torch.get_num_threads()
        devices = self.gathered((mine, own))
        if self.rank > 0:
            return None
        torch.set_num_threads(min(sum(threads for name, threads in devices if name == mine), len(usable_cores())))
        peak = peak_of()
        torch.set_num_threads(own)
        return None if peak is None else summed_peak(peak, len({name for name, _ in devices}))

    def gathered(self, own: Any) -> list[Any]:
        found: list[Any] = [own] * self.size
        if self.size > 1:
            dist.all_gather_object(found, own)
        return found


def blocks(model: nn.Module) -> list[nn.Module]:
    """The members of the outermost `ModuleList`s, such as the layers of a transformer."""
    found: list[nn.Module] = []
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            found += [member for member in child if next(member.parameters(), None) is not None]
        else:
            found += blocks(child)
    return found


def job_cost(costs: Sequence[StepCost]) -> StepCost:
    """The FLOPs of all processes together; None if those of one process are unknown.

    >>> job_cost([StepCost(model_flops=10, hardware_flops=12), StepCost(model_flops=10)]).model_flops
    20
    """
    model, hardware = [cost.model_flops for cost in costs], [cost.hardware_flops for cost in costs]
    return replace(
        costs[0],
        model_flops=None if None in model else sum(filter(None, model)),
        hardware_flops=None if None in hardware else sum(filter(None, hardware)),
        coverage=min((cost.coverage for cost in costs if cost.coverage is not None), default=None),
        is_lower_bound=any(cost.is_lower_bound for cost in costs),
        notes=tuple(dict.fromkeys(note for cost in costs for note in cost.notes)),
    )


def summed_peak(peak: Peak, devices: int) -> Peak:
    """The peak of several devices of one kind.

    >>> summed_peak(Peak(1e12, "a GPU", "bf16", "its datasheet", "datasheet", "high"), 2).flops_per_s
    2000000000000.0
    """
    if devices == 1:
        return peak
    source = f"{peak.source}; summed over {devices} devices"
    return replace(peak, flops_per_s=devices * peak.flops_per_s, device=f"{devices} x {peak.device}", source=source)


def job_memory(memories: Sequence[MemoryUse]) -> MemoryUse:
    """The largest memory of any accelerator. Host memory is that of rank 0; the supervisor measures the total."""
    parts = dict.fromkeys(part for memory in memories for part in memory.by_phase)
    of_device = {
        name: max((value for memory in memories if (value := getattr(memory, name)) is not None), default=None)
        for name in ("allocated_bytes", "reserved_bytes", "alloc_retries")
    }
    by_phase = {part: max(memory.by_phase.get(part, 0) for memory in memories) for part in parts}
    return replace(memories[0], **of_device, by_phase=by_phase)


def slowest_rows(rows_by_rank: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """The rows of the process with the longest median step, each row with the rank of that process.

    >>> fast, slow = ({"phase": "measure", "seconds": seconds} for seconds in (1.0, 2.0))
    >>> slowest_rows([[fast], [slow]])
    [{'phase': 'measure', 'seconds': 2.0, 'rank': 1}]
    """

    def typical(rank: int) -> float:
        timed = sorted(row["seconds"] for row in rows_by_rank[rank] if row["phase"] == "measure")
        return median(timed) if timed else 0.0

    slowest = max(range(len(rows_by_rank)), key=typical)
    return [{**row, "rank": slowest} for row in rows_by_rank[slowest]]
