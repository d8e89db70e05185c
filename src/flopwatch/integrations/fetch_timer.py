"""Tells the monitor of a callback when the framework fetches a batch."""

from typing import Any

from flopwatch.integrations.harmless import harmless


class FetchTimer:
    """Whatever is wrong with the monitor, the training gets its batch."""

    def __init__(self, callback: Any) -> None:
        self._callback = callback
        self.strict = callback.strict

    @harmless
    def begin_wait(self) -> bool:
        """True when the fetching is timed."""
        monitor = self._callback.monitor
        return monitor is not None and bool(monitor.begin_wait())

    @harmless
    def end_wait(self, *, has_batch: bool = True) -> None:
        """After a `begin_wait` that was true."""
        if self._callback.monitor is not None:
            self._callback.monitor.end_wait(has_batch=has_batch)
