"""The processes of one trial as their workers see them: what is each one's part, and what they are together.

`ALONE` stands for a trial of one process, so that measuring asks nobody how many there are.
"""

import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from flopwatch.errors import UnsupportedError
from flopwatch.monitor.ranks.shared_devices import device_identity
from flopwatch.records import Peak
from flopwatch.sweep.job_figures import job_cost, job_memory, job_peak, slowest_rows
from flopwatch.sweep.processes import check_processes, needs_one_process, world_size
from flopwatch.sweep.trainers.layouts import laid_out
from flopwatch.sweep.trainers.micro_batches import batch_rows, micro_batches
from flopwatch.trial_records import MemoryUse, StepCost, TrialSpec

_LEAST_TIMEOUT_SECONDS = 1800.0
"""torch's own for gloo. A hang is for the supervisor to end: collectives must not give up before it does."""


class RankGroup:
    """One process among those of its trial.

    Attributes:
        rank: Its number; 0 writes what all have measured.
        size: How many there are.
    """

    rank = 0
    size = 1

    def device(self, asked: torch.device) -> torch.device:
        """The device of this process."""
        return asked

    def share(self, batch_size: int) -> int:
        """Samples of this process."""
        return batch_size // self.size

    def own_part(self, batch: Mapping[str, Any], batch_size: int) -> dict[str, Any]:
        """The samples of this process among those of the trial's batch."""
        return dict(batch)

    def laid_out(self, model: nn.Module, device: torch.device) -> nn.Module:
        return model

    def job_cost(self, cost: StepCost) -> StepCost:
        """Of the whole trial, from each process's own."""
        return cost

    def job_peak(self, device: torch.device, peak_of: Any) -> Peak | None:
        found: Peak | None = peak_of()
        return found

    def job_memory(self, memory: MemoryUse) -> MemoryUse:
        return memory

    def slowest_rows(self, rows: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """The times of the steps, of the process that was slowest."""
        return rows


class ManyRanks(RankGroup):
    """Started by torchrun, whose variables say which one this is."""

    def __init__(self, spec: TrialSpec) -> None:
        check_processes(spec)
        if reason := needs_one_process(spec):
            raise UnsupportedError(reason)
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._layout = spec.layout
        silence = spec.limits.no_progress_seconds or 0.0
        self._timeout = timedelta(seconds=max(_LEAST_TIMEOUT_SECONDS, 2 * silence))

    def device(self, asked: torch.device) -> torch.device:
        """Joins the other processes, over the network that belongs to the device."""
        if asked.type == "cpu":
            dist.init_process_group("gloo", timeout=self._timeout)
            return asked
        own = torch.device(asked.type, int(os.environ["LOCAL_RANK"]) % torch.accelerator.device_count())
        torch.accelerator.set_device_index(own.index)
        own_backend = dist.get_default_backend_for_device(own)
        dist.init_process_group(f"cpu:gloo,{own.type}:{own_backend}", timeout=self._timeout, device_id=own)
        return own

    def own_part(self, batch: Mapping[str, Any], batch_size: int) -> dict[str, Any]:
        """
        Raises:
            UnsupportedError: The batch is not one of so many samples.
        """
        rows = batch_rows(batch)
        if rows != batch_size:
            raise UnsupportedError(
                f"the batch has {rows} rows for {batch_size} samples, so {self.size} processes cannot share it; make "
                "a batch with one row for each sample, or leave nodes and processes out"
            )
        part = micro_batches(batch, self.share(batch_size))[self.rank]
        # A view would keep the samples of all processes in memory.
        return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in part.items()}

    def laid_out(self, model: nn.Module, device: torch.device) -> nn.Module:
        return laid_out(model, self._layout, device)

    def job_cost(self, cost: StepCost) -> StepCost:
        return job_cost(self._gathered(cost))

    def job_peak(self, device: torch.device, peak_of: Any) -> Peak | None:
        """Of every device once. One process of those that share a device asks, with the threads of all of them."""
        mine = device_identity(device)
        told = self._gathered((mine, torch.get_num_threads()))
        first = [identity for identity, _ in told].index(mine) == self.rank
        peak = None
        if first:
            own, together = torch.get_num_threads(), sum(threads for identity, threads in told if identity == mine)
            torch.set_num_threads(min(together, len(os.sched_getaffinity(0))))
            peak = peak_of()
            torch.set_num_threads(own)
        return job_peak(self._gathered((first, peak)))

    def job_memory(self, memory: MemoryUse) -> MemoryUse:
        return job_memory(self._gathered(memory))

    def slowest_rows(self, rows: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        return slowest_rows(self._gathered(list(rows)))

    def _gathered(self, mine: Any) -> list[Any]:
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, mine)
        return found


ALONE = RankGroup()


def rank_group(spec: TrialSpec) -> RankGroup:
    return ManyRanks(spec) if world_size(spec) > 1 else ALONE
