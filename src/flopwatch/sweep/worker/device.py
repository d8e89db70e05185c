"""Times of a step and of its parts, and the most memory each part held. Thin: all that differs by device is here."""

import contextlib
import os
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from flopwatch.clock import monotonic_seconds
from flopwatch.sweep.host.environment import git_state, machine
from flopwatch.sweep.host.memory import resident
from flopwatch.sweep.trainers.protocol import StepPart

PARTS = ("forward", "backward", "optimizer")
CLEAR_REFS = Path("/proc/self/clear_refs")

_LEAST_RESET_BYTES = 64 << 20
"""On machines with many cores the kernel's counters are this far behind."""


def timed_step(parts: list[StepPart], device: torch.device) -> dict[str, float]:
    """Run the parts one after the other; seconds of each name and of all, waiting for the device only at the end."""
    names = [name for name, _ in parts]
    if device.type == "cpu":
        marks = [monotonic_seconds()]
        for _, part in parts:
            part()
            marks.append(monotonic_seconds())
        return _seconds(marks, names)
    torch.accelerator.synchronize()
    events = [torch.Event(device.type, enable_timing=True) for _ in range(len(parts) + 1)]
    began = monotonic_seconds()
    events[0].record()
    for (_, part), event in zip(parts, events[1:], strict=True):
        part()
        event.record()
    torch.accelerator.synchronize()
    whole = monotonic_seconds() - began
    milliseconds = [first.elapsed_time(second) for first, second in pairwise(events)]
    return {"seconds": whole} | _by_name(names, (value / 1000 for value in milliseconds))


def _seconds(marks: list[float], names: list[str]) -> dict[str, float]:
    return {"seconds": marks[-1] - marks[0]} | _by_name(names, (after - before for before, after in pairwise(marks)))


def _by_name(names: list[str], seconds: Iterable[float]) -> dict[str, float]:
    """A batch in micro-batches has several forward passes; the step's is their sum."""
    found = dict.fromkeys(PARTS, 0.0)
    for name, value in zip(names, seconds, strict=True):
        found[name] += value
    return found


def reset_peak(device: torch.device) -> bool:
    """Forget the most memory held so far; False when that cannot be done, so that no peak of a part can be told.

    On a CPU the kernel does that for this process (proc(5), clear_refs), where /proc is not read-only.
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
    # Some kernels take the word and do nothing.
    is_ignored = before and after and after.peak - after.now > _LEAST_RESET_BYTES and after.peak >= before.peak
    return not is_ignored


def peak_bytes(device: torch.device) -> int | None:
    """Most memory held since then: by tensors on the accelerator, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return host_peak_bytes()


def host_peak_bytes() -> int | None:
    """Most memory of this process since it began or `reset_peak`; None where the system does not tell."""
    memory = resident("self")
    return memory.peak if memory else None


# What a reader needs to know of the process that measured: device, clocks, threads, git.


def describe_worker(device: torch.device) -> dict[str, Any]:
    found = {
        **machine(),
        "device": str(device),
        "threads": torch.get_num_threads(),
        "visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "git": git_state(os.getcwd()),
    }
    if device.type == "cuda":
        found["device_name"] = torch.cuda.get_device_name(device)
        found["cuda"] = torch.version.cuda
        with contextlib.suppress(Exception):  # needs nvidia-ml-py and a driver that answers
            found["clock_mhz"] = torch.cuda.clock_rate(device)
    return {name: value for name, value in found.items() if value is not None}
