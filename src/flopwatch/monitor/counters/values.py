"""The metrics of a row that come from hardware counters (pure)."""

from collections.abc import Mapping, Sequence

from flopwatch.records.counters import MEANS, CounterWindow
from flopwatch.records.run import Number

FLOP_RATE, ENERGY, POWER = "counters/flops_per_second_per_device", "counters/energy_joules", "counters/power_watts"
OF_RANKS = (
    ENERGY,
    POWER,
    FLOP_RATE,
    *("counters/tensor_active", "counters/sm_active", "counters/dram_active", "counters/sm_clock_mhz"),
)
"""The metrics that a rank reports: energy and power are added over ranks, the others averaged."""
_SUMS = (ENERGY, POWER)


def joined(windows: Sequence[CounterWindow]) -> CounterWindow | None:
    """Consecutive windows as one; means are weighted by the number of readings.

    >>> windows = CounterWindow("nvml", 1, 1.0, power_watts=100.0), CounterWindow("nvml", 3, 3.0, power_watts=200.0)
    >>> joined(windows).power_watts, joined(windows).seconds
    (175.0, 4.0)
    """
    if len(windows) < 2:
        return windows[0] if windows else None
    energy = [window.energy_joules for window in windows]
    return CounterWindow(
        windows[-1].source,
        sum(window.readings for window in windows),
        sum(window.seconds for window in windows),
        **{name: weighted_mean(windows, name, "readings") for name in MEANS},
        energy_joules=None if None in energy else sum(filter(None, energy)),
    )


def weighted_mean(items: Sequence[object], name: str, weight: str) -> float | None:
    """The mean of a field over the items that know it, each with its weight; None if none knows it."""
    known = [(getattr(each, name), getattr(each, weight)) for each in items if getattr(each, name) is not None]
    whole = sum(each for _, each in known)
    return sum(value * each for value, each in known) / whole if whole else None


def flops_by_counters(
    window: CounterWindow, tensor_peak_flops_per_s: float | None, peak_clock_mhz: float | None
) -> float | None:
    """FLOP/s of a device by its counters; None if a part is unknown.

    The share of cycles in which the tensor cores were busy, times the peak of the types in use, times the clock over
    the clock of the peak (the OFU of arXiv 2605.20799). Tensor cores are also busy with the padding of tiles, so the
    figure is somewhat higher than the FLOPs.

    >>> window = CounterWindow("nvml-gpm", 50, 10.0, tensor_active=0.5, sm_clock_mhz=1464.0)
    >>> flops_by_counters(window, tensor_peak_flops_per_s=989.4e12, peak_clock_mhz=1830.0) / 1e12
    395.76
    """
    active, clock = window.tensor_active, window.sm_clock_mhz  # a device that computes has no clock of 0
    if active is None or not clock or tensor_peak_flops_per_s is None or not peak_clock_mhz:
        return None
    return active * tensor_peak_flops_per_s * clock / peak_clock_mhz


def counter_values(
    window: CounterWindow | None,
    *,
    tensor_peak_flops_per_s: float | None,
    peak_clock_mhz: float | None,
    ranks_on_device: int = 1,
) -> dict[str, Number]:
    """The metrics of one rank's window; unknown ones are left out.

    Ranks that share a device share its energy, its power and its FLOP/s.
    """
    if window is None:
        return {}
    peak = None if tensor_peak_flops_per_s is None else tensor_peak_flops_per_s * ranks_on_device
    values: dict[str, float | None] = {
        "counters/tensor_active": window.tensor_active,
        "counters/sm_active": window.sm_active,
        "counters/dram_active": window.dram_active,
        "counters/sm_clock_mhz": window.sm_clock_mhz,
        POWER: _share(mean_watts(window), ranks_on_device),
        ENERGY: _share(window.energy_joules or None, ranks_on_device),
        FLOP_RATE: _share(flops_by_counters(window, peak, peak_clock_mhz), ranks_on_device),
    }
    return {key: value for key, value in values.items() if value is not None}


def mean_watts(window: CounterWindow) -> float | None:
    """The mean power of a window: of its energy if that is known, else of the readings. A counter at 0 is broken."""
    if window.energy_joules and window.seconds > 0:
        return window.energy_joules / window.seconds
    return window.power_watts or None


def _share(value: float | None, parts: int) -> float | None:
    return None if value is None else value / parts


def values_of_ranks(sums: Mapping[str, tuple[float, int]], ranks: int) -> dict[str, Number]:
    """The metrics of a job from sums over its ranks; a sum that lacks a rank is left out, unless it is a mean's."""
    known = {key: (total, count) for key, (total, count) in sums.items() if count}
    return {
        key: total if key in _SUMS else total / count
        for key, (total, count) in known.items()
        if key not in _SUMS or count == ranks
    }


def energy_per_work(values: Mapping[str, Number], watts: float | None) -> dict[str, Number]:
    """Energy per step, token and sample at a mean power, by the rates in `values`; only those that are known.

    The power is the mean over the window, so that a pause or an evaluation between steps is not charged to them.

    >>> energy_per_work({"perf/step_time": 0.5, "perf/tokens_per_second": 1000.0}, 300.0)
    {'perf/joules_per_step': 150.0, 'perf/joules_per_token': 0.3}
    """
    if watts is None:
        return {}
    found: dict[str, Number] = {}
    if values.get("perf/step_time"):
        found["perf/joules_per_step"] = watts * values["perf/step_time"]
    for name in ("token", "sample"):
        if rate := values.get(f"perf/{name}s_per_second"):
            found[f"perf/joules_per_{name}"] = watts / rate
    return found
