"""Marks in time: by the host's clock, or by events in the stream of an accelerator."""

from typing import Any, Protocol

import torch

from flopwatch.clock import Clock


class StepTimer(Protocol):
    """Sets marks in time, and measures the time between two marks.

    On an accelerator marks are events, because the host queues work ahead of the device: host time would show when
    work was queued, not when it ran. Events are read one window later, so the host never waits for them.
    """

    def mark(self) -> Any:
        """Set a mark after all work that is queued now."""

    def has_passed(self, mark: Any) -> bool:
        """Whether the device has reached the mark."""

    def seconds(self, start: Any, end: Any) -> float:
        """Seconds between two marks, both of which the device has reached."""


class HostTimer:
    """Uses the host's clock; a mark is a number of seconds."""

    def __init__(self, clock: Clock) -> None:
        self.mark = clock

    def has_passed(self, mark: float) -> bool:
        return True

    def seconds(self, start: float, end: float) -> float:
        return end - start


class EventTimer:
    """Measures time with events in the current stream. Written from torch's documentation, and not yet run on a GPU."""

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
