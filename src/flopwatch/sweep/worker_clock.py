"""Times of a step and of its parts, and the most memory each part held. Thin: all that differs by device is here."""

import contextlib
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import torch

from flopwatch.clock import monotonic_seconds
from flopwatch.sweep.training_step import StepPart

PARTS = ("forward", "backward", "optimizer")


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


def reset_peak(device: torch.device) -> None:
    """Forget the most memory held so far. On a CPU the kernel does that for this process (proc(5), clear_refs)."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")


def peak_bytes(device: torch.device) -> int | None:
    """Most memory held since then: by tensors on the accelerator, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return status_bytes("VmHWM")


def status_bytes(key: str) -> int | None:
    """A line of /proc/self/status, such as `VmRSS` or `VmHWM`; None where there is no such file."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) * 1024
    return None
