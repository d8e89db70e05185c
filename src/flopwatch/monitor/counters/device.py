"""The hardware counters of a run: sampled beside the training, taken once per window, and held against the count."""

from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

import torch

from flopwatch.errors import InputError
from flopwatch.hardware import read_device
from flopwatch.hardware.counters.sampler import LONGEST_INTERVAL_SECONDS, CounterSampler
from flopwatch.hardware.identity import identify
from flopwatch.hardware.peak_clock import peak_clock_mhz
from flopwatch.language import Said
from flopwatch.monitor import notices
from flopwatch.monitor.config import ModeName, MonitorConfig
from flopwatch.monitor.counters.values import FLOP_RATE, counter_values, joined, weighted_mean
from flopwatch.monitor.counting.costs import StepCosts
from flopwatch.monitor.measured_step import seconds_of
from flopwatch.monitor.notices import NoticeText, Notify
from flopwatch.monitor.ranks.reports import Window
from flopwatch.numbers import flop_rate
from flopwatch.records.counters import CounterWindow
from flopwatch.records.run import Number

_SWITCHED_OFF = Said("mode hybrid was asked for, and hardware counters are switched off")
_ABSENT = Said("mode hybrid was asked for, and there are no hardware counters")

_TOLERANCE, _LEAST_POINTS = 0.25, 3.0
"""Counted FLOP/s and those by counters agree up to this factor, either way, or if they differ by fewer points of the
peak. Over 608 production trainings they were within 2 points of each other after a correction for tiles (arXiv
2605.20799); without it, the cores may be busy with padding up to 15 % in trainings whose sizes are no multiples of a
tile."""
_SPAN_SECONDS, _SPAN_READINGS = 15.0, 30
"""Windows are compared together until they have these, because a short one says little: both its ends are uncertain."""
_RATES = "counted_flops_per_s", "counter_flops_per_s"
_COVERED = 0.9
"""Windows whose steps take less than this share of the counters' time are left out: other work is in the rest."""


@dataclass(frozen=True, slots=True)
class Compared:
    """One device in some seconds: what the steps did by count, and by its counters.

    Attributes:
        seconds: Time between the first and the last reading; `steps_seconds` is that of the timed steps.
        counted_flops_per_s: Executed FLOPs per second of step time, in types of the tensor cores.
    """

    seconds: float
    steps_seconds: float
    readings: int
    peak_flops_per_s: float
    counted_flops_per_s: float
    counter_flops_per_s: float

    @property
    def is_comparable(self) -> bool:
        """Whether the counters saw the steps and little else; readings come up to an interval after the steps' ends."""
        interval = self.seconds / max(self.readings, 1)
        allowed = max((1 - _COVERED) * self.seconds, min(interval, LONGEST_INTERVAL_SECONDS))
        return self.seconds > 0 and abs(self.steps_seconds - self.seconds) <= allowed

    @property
    def disagrees(self) -> bool:
        """Whether the counters show plainly more or less than the count.

        >>> [Compared(10, 10, 50, 989e12, 400e12, shown).disagrees for shown in (430e12, 800e12)]
        [False, True]
        """
        low, high = sorted((self.counter_flops_per_s, self.counted_flops_per_s))
        return 100 * (high - low) >= _LEAST_POINTS * self.peak_flops_per_s and high > (1 + _TOLERANCE) * low


class CounterAlarm:
    """Compares over spans of several windows, and gives the first disagreement."""

    def __init__(self) -> None:
        self._span: list[Compared] = []
        self._is_given = False

    def add(self, window: Compared) -> Compared | None:
        """Add a window; return the span that ends with it if it disagrees and none did before."""
        if self._is_given or not window.is_comparable:
            return None
        self._span.append(window)
        seconds, readings = (sum(getattr(each, name) for each in self._span) for name in ("seconds", "readings"))
        if seconds < _SPAN_SECONDS or readings < _SPAN_READINGS:
            return None
        counted, shown = (weighted_mean(self._span, name, "seconds") or 0.0 for name in _RATES)
        span = replace(window, counted_flops_per_s=counted, counter_flops_per_s=shown)
        self._span, self._is_given = [], span.disagrees
        return span if self._is_given else None


class DeviceCounters:
    """Reads the counters of this rank's device, if the configuration asks for them. Its methods never wait.

    `on_mode` gets the mode that `hybrid` becomes without counters, and why.
    """

    def __init__(self, config: MonitorConfig, notify: Notify, on_mode: Callable[[ModeName, str], None]) -> None:
        self._config, self._notify, self._on_mode = config, notify, on_mode
        is_hybrid = config.mode == "hybrid"
        self._is_wanted = is_hybrid and config.hardware_counters_enabled if config.counters is None else config.counters
        if is_hybrid and not self._is_wanted:
            self._become_other(_SWITCHED_OFF)
        self._sampler: CounterSampler | None = None
        self._device: torch.device | None = None
        self._peak_clock_mhz: float | None = None
        self._told: deque[str] = deque()
        self._alarm = CounterAlarm()

    def start(self, device: torch.device) -> None:
        """Begin to sample this device in a thread; nothing is read here."""
        if not self._is_wanted or device == self._device:
            return
        self.close()
        self._device, self._peak_clock_mhz = device, None
        with suppress(InputError):  # torch does not say what device it is
            self._peak_clock_mhz = peak_clock_mhz(read_device(device))
        self._sampler = CounterSampler(identify(device), self._told.append)

    def take(self) -> tuple[CounterWindow, ...]:
        """The readings since the last call, if there are any; tells what the sampling thread has to say."""
        if self._sampler is None:
            return ()
        window = self._sampler.take()
        while self._told:
            self._tell(self._told.popleft())
        return () if window is None else (window,)

    def close(self) -> None:
        if self._sampler is not None:
            self.take()
            self._sampler.close()
            self._sampler = None

    def _tell(self, why_absent: str) -> None:
        if self._config.mode == "hybrid":
            self._notify(*notices.notice("hybrid_without_counters", why=why_absent, mode=self._become_other(_ABSENT)))
        else:
            self._notify(*notices.notice("counters_absent", why=why_absent))

    def _become_other(self, why: str) -> ModeName:
        mode: ModeName = "profiler" if self._config.fallback_to_profiler else "smart"
        self._on_mode(mode, Said("{why}, so FLOPs are counted as in mode {mode}", why=why, mode=mode))
        return mode

    def with_values(self, window: Window, costs: StepCosts, peak_flops_per_s: float | None) -> Window:
        """The window with the metrics of its counters; the peak is that of the types in use, on one device."""
        values = counter_values(
            joined(window.counters),
            tensor_peak_flops_per_s=costs.tensor_peak(peak_flops_per_s),
            peak_clock_mhz=self._peak_clock_mhz,
            ranks_on_device=costs.peaks.ranks,
        )
        return replace(window, counter_values=values)

    def disagreement(self, window: Window, values: Mapping[str, Number], costs: StepCosts) -> NoticeText | None:
        """The notice that counters and count disagree, once, when it is confirmed; else None.

        `values` are those of the window's row, of all ranks if they have reported.
        """
        seen, peak, shown = joined(window.counters), costs.peak, values.get(FLOP_RATE)
        counted = values.get("perf/hardware_flops_per_second_per_device")
        if seen is None or peak is None or not counted or shown is None:
            return None
        mean_peak = values.get("perf/peak_flops_per_second_per_device", peak.flops_per_s)
        found = self._alarm.add(
            Compared(
                seen.seconds,
                seconds_of(step for step in window.steps if not step.is_warm_up),
                seen.readings,
                costs.tensor_peak(mean_peak) or mean_peak,
                counted * costs.tensor_share,
                shown,
            )
        )
        if found is None:
            return None
        return notices.notice(
            "counters_disagree",
            counters=flop_rate(found.counter_flops_per_s),
            counted=flop_rate(found.counted_flops_per_s),
            source=seen.source,
            dtype=peak.dtype,
        )
