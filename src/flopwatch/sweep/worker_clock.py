"""Times of a step and of its parts, and the most memory each part held. Thin: all that differs by device is here."""

import contextlib
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from flopwatch.clock import monotonic_seconds

PARTS = ("forward", "backward", "optimizer")


def timed_step(parts: list[Callable[[], Any]], device: torch.device) -> dict[str, float]:
    """Run the parts one after the other; seconds of each and of all, waiting for the device only at the end."""
    if device.type == "cpu":
        marks = [monotonic_seconds()]
        for part in parts:
            part()
            marks.append(monotonic_seconds())
        return _seconds(marks)
    torch.accelerator.synchronize()
    events = [torch.Event(device.type, enable_timing=True) for _ in range(len(parts) + 1)]
    began = monotonic_seconds()
    events[0].record()
    for part, event in zip(parts, events[1:], strict=True):
        part()
        event.record()
    torch.accelerator.synchronize()
    whole = monotonic_seconds() - began
    milliseconds = [first.elapsed_time(second) for first, second in pairwise(events)]
    return {"seconds": whole} | {name: value / 1000 for name, value in zip(PARTS, milliseconds, strict=True)}


def _seconds(marks: list[float]) -> dict[str, float]:
    parts = [after - before for before, after in pairwise(marks)]
    return {"seconds": marks[-1] - marks[0]} | dict(zip(PARTS, parts, strict=True))


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
