"""The interface of a sink, which takes the records of a run.

Pass any object with the methods of `Sink` in `TrainingMonitor(sinks=[...])`.
"""

from typing import Protocol

from flopwatch.records.run import Record


class Sink(Protocol):
    """Takes the records of a run in order. flopwatch calls each sink in a thread of its own.

    Every method may raise: flopwatch then reports the error once, switches the sink off and names it in the summary. A
    method may also be slow or hang: the queue of the sink is bounded, so only this sink loses rows.
    """

    name: str

    def write(self, record: Record) -> None:
        """Take one record. The first is always a `RunStart`."""

    def flush(self) -> None:
        """Write buffered records; called after each group of rows, when the monitor is flushed, and at the end."""
        return  # a class that inherits this has nothing in a buffer

    def close(self) -> None:
        """Called once, after the last record."""
