"""The seam of hardware counters: a source gives readings of one device."""

from typing import Protocol

from flopwatch.records.counters import CounterReading


class CounterSource(Protocol):
    """Reads the counters of one device. `sample` is called by a thread of its own, never on the path of a step.

    Attributes:
        name: The name that stands in `CounterReading.source`.
    """

    name: str

    def sample(self) -> CounterReading:
        """Read the counters now. Raises `CountersUnavailableError` or any other exception if it cannot."""

    def close(self) -> None:
        """Release what the source holds; never raises."""


class CountersUnavailableError(Exception):
    """A source is not there; the message says in one line why, and what would bring it."""
