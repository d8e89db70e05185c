"""What hardware counters say about one device: one reading, and the readings of a logging window together."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite
from statistics import fmean
from typing import TypeGuard

MEANS = ("tensor_active", "sm_active", "dram_active", "sm_clock_mhz", "power_watts")
"""Fields of a reading whose mean is the value of a window."""


@dataclass(frozen=True, slots=True)
class CounterReading:
    """One reading of a device's counters. None means that the source does not know the value.

    Attributes:
        source: Where it comes from: `nvml-gpm`, or `nvml` without activity.
        seconds: Time of the reading on a clock that never goes back.
        tensor_active: Share of the cycles since the last reading in which the tensor (matrix) pipes were busy.
        sm_active: Share of these cycles in which a compute unit had work.
        dram_active: Share of these cycles in which the device's memory was read or written.
        sm_clock_mhz: Clock of the compute units now.
        power_watts: Power that the device draws now.
        energy_joules: Energy since a moment that the source chooses; it only grows.
    """

    source: str
    seconds: float
    tensor_active: float | None = None
    sm_active: float | None = None
    dram_active: float | None = None
    sm_clock_mhz: float | None = None
    power_watts: float | None = None
    energy_joules: float | None = None


@dataclass(frozen=True, slots=True)
class CounterWindow:
    """The readings of one logging window: means over the time for which a value is known, None if it never is.

    Attributes:
        source: The source of the readings.
        readings: Number of readings.
        seconds: Time between the first and the last reading, the last one of the window before included.
        energy_joules: Energy used in these seconds.
    """

    source: str
    readings: int
    seconds: float
    tensor_active: float | None = None
    sm_active: float | None = None
    dram_active: float | None = None
    sm_clock_mhz: float | None = None
    power_watts: float | None = None
    energy_joules: float | None = None


def window_of(readings: Sequence[CounterReading], before: CounterReading | None = None) -> CounterWindow | None:
    """The readings of a window together; `before` is the last reading before it. None without readings.

    >>> readings = CounterReading("nvml", 1.0, energy_joules=5.0), CounterReading("nvml", 3.0, power_watts=9.0)
    >>> window = window_of(readings)
    >>> window.source, window.readings, window.seconds, window.power_watts
    ('nvml', 2, 2.0, 9.0)
    """
    if not readings:
        return None
    weights = _seconds_of_each(readings, before)
    means = {name: _mean([getattr(reading, name) for reading in readings], weights) for name in MEANS}
    whole = [before, *readings] if before is not None else list(readings)
    return CounterWindow(
        readings[-1].source,
        len(readings),
        whole[-1].seconds - whole[0].seconds,
        **means,
        energy_joules=_energy_used(whole),
    )


def _seconds_of_each(readings: Sequence[CounterReading], before: CounterReading | None) -> list[float]:
    """Seconds from the reading before to each one; without a reading before, the first has those of the others."""
    seconds = [later.seconds - earlier.seconds for earlier, later in pairwise(readings)]
    first = fmean(seconds) if seconds else 1.0
    return [first if before is None else readings[0].seconds - before.seconds, *seconds]


def _is_known(value: float | None) -> TypeGuard[float]:
    """Drivers may also write NaN or infinity for what they do not know."""
    return value is not None and isfinite(value)


def _mean(values: Sequence[float | None], weights: Sequence[float]) -> float | None:
    """The mean over time. Readings are late on a busy machine, so that each stands for another time."""
    known = [(value, weight) for value, weight in zip(values, weights, strict=True) if _is_known(value)]
    if not known:
        return None
    total = sum(weight for _, weight in known)
    if total <= 0:
        return fmean(value for value, _ in known)
    return sum(value * weight for value, weight in known) / total


def _energy_used(readings: Sequence[CounterReading]) -> float | None:
    """Energy between the first and the last reading; None if its counter began again."""
    first, last = readings[0], readings[-1]
    known = [reading.energy_joules for reading in readings if _is_known(reading.energy_joules)]
    if first is last or not (_is_known(first.energy_joules) and known == sorted(known)):
        return None
    return known[-1] - known[0] if _is_known(last.energy_joules) else None
