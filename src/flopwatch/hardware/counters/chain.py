"""The order in which the sources of a device are tried."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, Final, TypeVar, cast

from flopwatch.clock import monotonic_seconds
from flopwatch.guard import caught
from flopwatch.hardware.counters.amd import AmdProbe
from flopwatch.hardware.counters.cpu import PerfProbe, RaplProbe
from flopwatch.hardware.counters.dcgm import DcgmProbe
from flopwatch.hardware.counters.nvml import NvmlProbe
from flopwatch.hardware.counters.protocol import (
    CounterProbe,
    CounterSource,
    CountersUnavailableError,
    DeviceIdentity,
)
from flopwatch.records.counters import CounterReading
from flopwatch.text import first_line

Answer = TypeVar("Answer")
_VALUES: Final = tuple(field.name for field in fields(CounterReading) if field.name not in ("source", "seconds"))


@dataclass(frozen=True, slots=True)
class OpenedCounters:
    """The first source that works.

    Attributes:
        source: The source; None if there is none.
        reasons: Why each source that was tried before it is not used, in one line, by name.
        first: The reading that showed that it works; sources do not give all values in each reading.
    """

    source: CounterSource | None
    reasons: Mapping[str, str]
    first: CounterReading | None = None


def probes_for(device: DeviceIdentity) -> tuple[CounterProbe, ...]:
    """The sources that may know a device, the best one first; none for a device that no source knows.

    >>> [probe.name for probe in probes_for(DeviceIdentity("cuda", "NVIDIA H100"))]
    ['nvml-gpm', 'dcgm+nvml', 'dcgm', 'nvml']
    """
    if device.kind == "cuda":
        nvml, dcgm = NvmlProbe(gpm=False), DcgmProbe()
        return NvmlProbe(gpm=True), JoinedProbe(dcgm, nvml), dcgm, nvml
    if device.kind == "rocm":
        return (AmdProbe(),)
    if device.kind == "cpu":
        perf, rapl = PerfProbe(), RaplProbe()
        return JoinedProbe(perf, rapl), rapl, perf
    return ()


class JoinedProbe:
    """Opens two sources that know different values of one device; both must be there."""

    def __init__(self, first: CounterProbe, second: CounterProbe) -> None:
        self.name = f"{first.name}+{second.name}"
        self._first, self._second = first, second

    def open(self, device: DeviceIdentity) -> CounterSource:
        first = self._first.open(device)
        try:
            return _Joined(self.name, first, self._second.open(device))
        except BaseException:
            first.close()
            raise


class _Joined:
    """Two sources read as one, each at its own interval; of what both know, the second one's value is taken."""

    def __init__(self, name: str, first: CounterSource, second: CounterSource) -> None:
        self.name = name
        self.interval_seconds = min(first.interval_seconds, second.interval_seconds)
        self._read_at = dict.fromkeys((first, second), -math.inf)

    def sample(self) -> CounterReading:
        now = monotonic_seconds()
        values: dict[str, Any] = {}
        for source, read_at in self._read_at.items():
            if now - read_at >= source.interval_seconds:
                self._read_at[source] = now
                reading = source.sample()
                values.update({name: getattr(reading, name) for name in _VALUES if getattr(reading, name) is not None})
        return CounterReading(self.name, now, **values)

    def close(self) -> None:
        for source in self._read_at:
            source.close()


def open_counters(
    device: DeviceIdentity, probes: Sequence[CounterProbe] | None = None, *, seconds: float = 5.0
) -> OpenedCounters:
    """Try each source once, and return the first one that gives a reading.

    A driver that does not answer is waited for `seconds`, here and in each call of the source that is returned. A
    monitor does not use this, because `CounterSampler` has a thread of its own.
    """
    reasons: dict[str, str] = {}
    for probe in probes_for(device) if probes is None else probes:
        try:
            source, first = within(seconds, partial(_open_and_read, probe, device))
            return OpenedCounters(_InTime(source, seconds), reasons, first)
        except Exception as error:  # noqa: BLE001 - a driver's bindings may raise anything
            reasons[probe.name] = why_not(error)
    return OpenedCounters(None, reasons)


class DriverHangsError(CountersUnavailableError):
    """A driver did not answer in time; the call may still run."""


def within(seconds: float, call: Callable[[], Answer]) -> Answer:
    """Call a driver in a thread, which is left behind if it does not answer in this time."""
    answers: SimpleQueue[tuple[Answer | None, BaseException | None]] = SimpleQueue()

    def run() -> None:
        try:
            answers.put((call(), None))
        except BaseException as error:  # noqa: BLE001 - it is raised again where the answer is awaited
            answers.put((None, error))

    Thread(target=run, name="flopwatch-driver", daemon=True).start()
    try:
        answer, error = answers.get(timeout=seconds)
    except Empty:
        raise DriverHangsError(f"it did not answer for {seconds:g} s") from None
    if isinstance(error, Exception):
        raise error
    if error is not None:  # such as SystemExit, which must not end the caller
        raise CountersUnavailableError(f"it raises {type(error).__name__}") from error
    return cast(Answer, answer)


class _InTime:
    """A source whose calls are given up after some time. It is not asked again after that, because it is busy."""

    def __init__(self, source: CounterSource, seconds: float) -> None:
        self.name, self.interval_seconds = source.name, source.interval_seconds
        self._source, self._seconds = source, seconds
        self._hangs = False

    def sample(self) -> CounterReading:
        return self._ask(self._source.sample)

    def close(self) -> None:
        with suppress(Exception):
            self._ask(self._source.close)

    def _ask(self, call: Callable[[], Answer]) -> Answer:
        if self._hangs:
            raise DriverHangsError("it does not answer")
        try:
            return within(self._seconds, call)
        except DriverHangsError:
            self._hangs = True
            raise


def _open_and_read(probe: CounterProbe, device: DeviceIdentity) -> tuple[CounterSource, CounterReading]:
    """Open a source, and take one reading to see that it works."""
    source = probe.open(device)
    try:
        return source, source.sample()
    except BaseException:
        with suppress(Exception):
            source.close()
        raise


def why_not(error: BaseException) -> str:
    """Why a source is not used, in one line."""
    caught("hardware counters", error)
    said = first_line(error)
    return said if isinstance(error, CountersUnavailableError) else f"{type(error).__name__}: {said}"
