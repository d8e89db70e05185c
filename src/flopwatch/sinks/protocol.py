"""What a sink is. Pass any object of this shape in `TrainingMonitor(sinks=[...])`."""

from typing import Protocol

from flopwatch.run_records import Record


class Sink(Protocol):
    """Takes the records of a run, in order, in a thread of its own.

    Every method may raise: the sink is then reported once, switched off, and named in the summary. It may also be
    slow or hang: its queue is bounded, and only this sink loses rows.
    """

    name: str

    def write(self, record: Record) -> None:
        """Take one record. The first is always a `RunStart`."""

    def flush(self) -> None:
        """Hand on what is buffered; called when rows have gathered for a while, when asked, and at the end."""

    def close(self) -> None:
        """Called once, after the last record."""
