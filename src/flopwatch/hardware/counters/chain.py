"""The order in which the sources of a device are tried."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from flopwatch.guard import caught
from flopwatch.hardware.counters.protocol import (
    CounterProbe,
    CounterSource,
    CountersUnavailableError,
    DeviceIdentity,
)
from flopwatch.text import first_line


@dataclass(frozen=True, slots=True)
class OpenedCounters:
    """The first source that works.

    Attributes:
        source: The source; None if there is none.
        reasons: Why each source that was tried before it is not used, in one line, by name.
    """

    source: CounterSource | None
    reasons: Mapping[str, str]


def probes_for(device: DeviceIdentity) -> tuple[CounterProbe, ...]:
    """The sources that may know a device, the best one first; none for a device that no source knows."""
    return ()


def open_counters(device: DeviceIdentity, probes: Sequence[CounterProbe] | None = None) -> OpenedCounters:
    """Try each source once, and return the first one that gives a reading.

    A driver that does not answer makes this wait; `CounterSampler` tries them in its own thread.
    """
    reasons: dict[str, str] = {}
    for probe in probes_for(device) if probes is None else probes:
        try:
            return OpenedCounters(open_and_read(probe, device), reasons)
        except Exception as error:  # noqa: BLE001 - a driver's bindings may raise anything
            reasons[probe.name] = why_not(error)
    return OpenedCounters(None, reasons)


def open_and_read(probe: CounterProbe, device: DeviceIdentity) -> CounterSource:
    """Open a source, and take one reading to see that it works."""
    source = probe.open(device)
    try:
        source.sample()
    except BaseException:
        with suppress(Exception):
            source.close()
        raise
    return source


def why_not(error: BaseException) -> str:
    """Why a source is not used, in one line."""
    caught("hardware counters", error)
    said = first_line(error)
    return said if isinstance(error, CountersUnavailableError) else f"{type(error).__name__}: {said}"
