"""The seam of `flopwatch doctor --gpu`: all that its checks ask of an accelerator. Not yet run on one.

The tests drive every check with a fake that computes on the CPU.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from flopwatch.cli.doctor.machine import built_for
from flopwatch.clock import monotonic_seconds
from flopwatch.errors import InputError
from flopwatch.hardware.counters.chain import OpenedCounters, open_counters
from flopwatch.hardware.device import find_device, read_device
from flopwatch.hardware.identity import identify
from flopwatch.hardware.measure import Shape, TimeMatmul, matmul_timer, measure_peak, plain_matmuls
from flopwatch.hardware.peaks import DeviceFacts, canonical_dtype
from flopwatch.monitor.timing.tape import StepTimer, timer_for
from flopwatch.records.flops import Peak


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of the device that torch's allocator has handed out, holds, and had handed out at most."""

    allocated: int
    reserved: int
    peak: int


@dataclass(frozen=True, slots=True)
class Load:
    """A training that keeps the device busy: a preset model and the sizes of its batches."""

    preset: str
    batch_size: int
    seq_len: int


class Accelerator(Protocol):
    """One accelerator of this machine.

    Attributes:
        device: The device on which the checks compute.
        facts: What torch reports about it.
        count: Number of such devices.
        backend: torch.distributed's backend for collectives between them.
        load: The training whose step times are compared.
    """

    device: torch.device
    facts: DeviceFacts
    count: int
    backend: str
    load: Load

    def synchronize(self) -> None:
        """Wait until the device has done all that is queued."""

    def timer(self) -> StepTimer:
        """The timer that the monitor uses on this device."""

    def time_matmul(self, dtype: torch.dtype) -> TimeMatmul:
        """A function that runs matmuls of a shape, and returns their seconds on the host's clock."""

    def measure_peak(self, dtype: str, seconds: float) -> Peak:
        """The rate of the fastest matmul, as `flopwatch peak --measure` finds it."""

    def trace(self, step: Callable[[], None], steps: int, file: Path) -> None:
        """Run steps under the profiler, and write their trace."""

    def allocate(self, size: int) -> torch.Tensor:
        """Take so many bytes of the device's memory; they are free when the tensor is gone."""

    def memory(self) -> Memory:
        """The memory of the device, as torch's allocator counts it."""

    def open_counters(self) -> OpenedCounters:
        """The first source of hardware counters that works, and why the others do not."""


_BACKENDS = {"cuda": "nccl", "xpu": "xccl", "npu": "hccl"}  # torch 2.6 has no public function that tells them


class TorchAccelerator:
    """The current accelerator, through torch. Written from torch's documentation, and not yet run on one."""

    load = Load("medium", 8, 512)  # about a teraFLOP per step

    def __init__(self, device: torch.device | str | None = None) -> None:
        self.device = find_device(device)
        if self.device.type == "cpu":
            raise InputError(why_there_is_none())
        self.facts = read_device(self.device)
        self.count = torch.accelerator.device_count()
        self.backend = _BACKENDS.get(self.device.type, "gloo")

    def synchronize(self) -> None:
        torch.accelerator.synchronize()

    def timer(self) -> StepTimer:
        return timer_for(self.device, monotonic_seconds)

    def time_matmul(self, dtype: torch.dtype) -> TimeMatmul:
        run = matmul_timer(self.device, dtype)

        def timed(shape: Shape, calls: int) -> float:
            with plain_matmuls(self.device, canonical_dtype(dtype)):
                return run(shape, calls)

        return timed

    def measure_peak(self, dtype: str, seconds: float) -> Peak:
        return measure_peak(self.device, dtype, seconds=seconds, refresh=True)

    def trace(self, step: Callable[[], None], steps: int, file: Path) -> None:
        activities = torch.profiler.supported_activities()
        self.synchronize()
        with torch.profiler.profile(activities=activities) as profiler:
            for number in range(steps):
                with torch.profiler.record_function(f"ProfilerStep#{number}"):
                    step()
            self.synchronize()
        profiler.export_chrome_trace(str(file))

    def allocate(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def memory(self) -> Memory:
        module = getattr(torch, self.device.type)
        if not hasattr(module, "memory_reserved"):
            return Memory(torch.mps.current_allocated_memory(), torch.mps.driver_allocated_memory(), 0)
        device = self.device
        return Memory(
            module.memory_allocated(device), module.memory_reserved(device), module.max_memory_allocated(device)
        )

    def open_counters(self) -> OpenedCounters:
        return open_counters(identify(self.device))


def why_there_is_none() -> str:
    """Why `--gpu` cannot run here, and what to do."""
    build = built_for()
    what = f"flopwatch doctor --gpu needs an accelerator, and torch {torch.__version__}, built for {build}, finds none"
    if build == "CPUs only":
        return f"{what}; run it on a machine with a GPU, with a torch for this GPU: https://pytorch.org/get-started"
    return f"{what}; run it on a machine with a GPU; `flopwatch doctor` says why one that is there is not found"
