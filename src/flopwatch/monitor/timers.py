"""When a step ends: host time on a CPU, events in the device's own stream elsewhere, read one window late.

On an accelerator the host runs ahead of the device, so host times say when work was queued, not when it was done. An
event costs a few microseconds to record and nothing to wait for, because nobody waits.
"""

from typing import Any, Protocol

import torch

from flopwatch.clock import Clock


class StepTimer(Protocol):
    """Marks moments; the time between two marks is known once the later one has passed."""

    def mark(self) -> Any:
        """Now."""

    def has_passed(self, mark: Any) -> bool:
        """Whether the device has got there."""

    def seconds(self, start: Any, end: Any) -> float:
        """Between two marks that have passed."""


class HostTimer:
    """Marks are seconds of the host's clock."""

    def __init__(self, clock: Clock) -> None:
        self.mark = clock

    def has_passed(self, mark: float) -> bool:
        return True

    def seconds(self, start: float, end: float) -> float:
        return end - start


class EventTimer:
    """Marks are events in the current stream. Written to torch's documented API; never run on a GPU here."""

    def __init__(self, device: torch.device, event: Any = torch.Event) -> None:
        self._device = device
        self._event = event

    def mark(self) -> Any:
        event = self._event(self._device, enable_timing=True)
        event.record()
        return event

    def has_passed(self, mark: Any) -> bool:
        return bool(mark.query())

    def seconds(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end)) / 1e3


def timer_for(device: torch.device, clock: Clock) -> StepTimer:
    return HostTimer(clock) if device.type in ("cpu", "meta", "mps") else EventTimer(device)
