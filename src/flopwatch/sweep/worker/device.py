"""Everything that depends on the device: choosing and describing it, timing a step, its memory and peak FLOP/s."""

import contextlib
import os
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from flopwatch.clock import monotonic_seconds
from flopwatch.errors import InputError
from flopwatch.git_state import git_state
from flopwatch.hardware import matmul_dtype, measure_peak, peak_flops
from flopwatch.hardware.device import find_device
from flopwatch.records.flops import Peak
from flopwatch.records.trial import MemoryUse
from flopwatch.sweep.host.environment import machine
from flopwatch.sweep.host.memory import resident
from flopwatch.sweep.host.processes import GPUS
from flopwatch.sweep.trainers.protocol import StepPart

PARTS = ("forward", "backward", "optimizer")
CLEAR_REFS = Path("/proc/self/clear_refs")

_LEAST_RESET_BYTES = 64 << 20
"""A peak at most this far above the present size counts as reset, because the kernel's memory counters may lag."""


def choose_device(name: str) -> torch.device:
    """The device of this name; `auto` is the accelerator if there is one.

    Raises:
        InputError: The trial was given a GPU that torch does not find. Measuring the CPU instead would be misleading.
    """
    if name != "auto":
        return torch.device(name)
    found = find_device()
    if found.type == "cpu" and (gpus := os.environ.get(GPUS)):
        raise InputError(f"the trial has GPU {gpus}, but torch finds no GPU; use device=cpu to measure the CPU")
    return found


def timed_step(parts: list[StepPart], device: torch.device) -> dict[str, float]:
    """Run the parts in order; return the seconds of the whole step, and of forward, backward and optimizer.

    On an accelerator, the parts are timed with events, because synchronising between them would slow the step down.
    """
    if device.type == "cpu":
        marks = [monotonic_seconds()]
        for _, part in parts:
            part()
            marks.append(monotonic_seconds())
        return _by_name(parts, marks[-1] - marks[0], [after - before for before, after in pairwise(marks)])
    torch.accelerator.synchronize()
    events = [torch.Event(device.type, enable_timing=True) for _ in range(len(parts) + 1)]
    began = monotonic_seconds()
    events[0].record()
    for (_, part), event in zip(parts, events[1:], strict=True):
        part()
        event.record()
    torch.accelerator.synchronize()
    whole = monotonic_seconds() - began
    return _by_name(parts, whole, [first.elapsed_time(second) / 1000 for first, second in pairwise(events)])


def _by_name(parts: list[StepPart], whole: float, seconds: list[float]) -> dict[str, float]:
    """The sum of the seconds by name, because a step with micro-batches has several forward and backward passes."""
    found = {"seconds": whole, **dict.fromkeys(PARTS, 0.0)}
    for (name, _), value in zip(parts, seconds, strict=True):
        found[name] += value
    return found


def reset_peak(device: torch.device) -> bool:
    """Reset the peak of this process's memory; return False if that is impossible, for example with a read-only /proc.

    On a CPU, writing 5 to /proc/self/clear_refs makes the kernel reset its high-water mark (proc(5)).
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    before = resident("self")
    try:
        CLEAR_REFS.write_text("5")
    except OSError:
        return False
    after = resident("self")
    # Some kernels accept the write to clear_refs, but do not reset the peak.
    is_ignored = before and after and after.peak - after.now > _LEAST_RESET_BYTES and after.peak >= before.peak
    return not is_ignored


def peak_bytes(device: torch.device) -> int | None:
    """Peak memory since `reset_peak`: that of tensors on CUDA, else this process's resident memory; None if unknown."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return _host_peak_bytes()


def _host_peak_bytes() -> int | None:
    memory = resident("self")
    return memory.peak if memory else None


def with_peaks(memory: MemoryUse, device: torch.device) -> MemoryUse:
    """A copy of `memory` with the peaks of device and host memory so far."""
    if device.type == "cuda":
        counts = torch.cuda.memory_stats(device)
        memory = replace(
            memory,
            allocated_bytes=torch.cuda.max_memory_allocated(device),
            reserved_bytes=torch.cuda.max_memory_reserved(device),
            alloc_retries=counts.get("num_alloc_retries", 0),
            device_bytes=torch.cuda.get_device_properties(device).total_memory,
        )
    return replace(memory, host_bytes=_host_peak_bytes(), host_method="high_water")


def device_peak(device: torch.device, dtype: str) -> Peak | None:
    """The peak FLOP/s by the datasheet; for a CPU without one, the FLOP/s of the fastest matmul measured on it."""
    compute = matmul_dtype(device.type, {"bf16": torch.bfloat16, "fp16": torch.float16}.get(dtype, torch.float32))
    known = peak_flops(device, compute)
    return known or (measure_peak(device, compute) if device.type == "cpu" else None)


def describe_worker(device: torch.device) -> dict[str, Any]:
    """The conditions of the measurement: machine, device, clock rate, threads, git commit (with `+` if changed)."""
    state = git_state(os.getcwd())
    found = {
        **machine(),
        "device": str(device),
        "threads": torch.get_num_threads(),
        "visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "git": None if state is None else f"{state['commit'][:12]}{'+' if state['dirty'] else ''}",
    }
    if device.type == "cuda":
        found["device_name"] = torch.cuda.get_device_name(device)
        found["cuda"] = torch.version.cuda
        with contextlib.suppress(Exception):  # `clock_rate` fails without nvidia-ml-py or a working driver
            found["clock_mhz"] = torch.cuda.clock_rate(device)
    return {name: value for name, value in found.items() if value is not None}
