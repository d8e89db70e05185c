"""The hardware counters of a run: sampled beside the training, taken once per window, and held against the count."""

from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace

import torch

from flopwatch.errors import InputError
from flopwatch.hardware import read_device
from flopwatch.hardware.counters.sampler import CounterSampler
from flopwatch.hardware.identity import identify
from flopwatch.hardware.peak_clock import peak_clock_mhz
from flopwatch.language import Said
from flopwatch.monitor import notices
from flopwatch.monitor.config import ModeName, MonitorConfig
from flopwatch.monitor.counters.alarm import Compared, CounterAlarm, Disagreement
from flopwatch.monitor.counters.values import FLOP_RATE, counter_values, joined
from flopwatch.monitor.counting.costs import StepCosts
from flopwatch.monitor.measured_step import seconds_of
from flopwatch.monitor.notices import NoticeText, Notify
from flopwatch.monitor.ranks.reports import Window
from flopwatch.numbers import byte_size, flop_rate, percent
from flopwatch.records.counters import CounterWindow
from flopwatch.records.run import Number

_SWITCHED_OFF = Said("mode hybrid was asked for, and hardware counters are switched off")
_ABSENT = Said("mode hybrid was asked for, and there are no hardware counters")


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
        self._told: deque[tuple[str, str]] = deque()
        self._alarm = CounterAlarm()

    def start(self, device: torch.device) -> None:
        """Begin to sample this device in a thread; nothing is read here."""
        if not self._is_wanted or device == self._device:
            return
        self.close()
        self._device, self._peak_clock_mhz = device, None
        with suppress(InputError):  # torch does not say what device it is
            self._peak_clock_mhz = peak_clock_mhz(read_device(device))
        self._sampler = CounterSampler(identify(device), lambda code, message: self._told.append((code, message)))

    def take(self) -> tuple[CounterWindow, ...]:
        """The readings since the last call, if there are any; tells what the sampling thread has to say."""
        if self._sampler is None:
            return ()
        window = self._sampler.take()
        while self._told:
            self._tell(*self._told.popleft())
        return () if window is None else (window,)

    def close(self) -> None:
        if self._sampler is not None:
            self.take()
            self._sampler.close()
            self._sampler = None

    def _tell(self, code: str, message: str) -> None:
        if code != "counters_absent":
            self._notify("info", code, message)
        elif self._config.mode == "hybrid":
            self._notify(*notices.notice("hybrid_without_counters", why=message, mode=self._become_other(_ABSENT)))
        else:
            self._notify(*notices.notice("counters_absent", why=message))

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
        """The notice that counters and count disagree, when it is confirmed, once per likely reason; else None.

        `values` are those of the window's row, of all ranks if they have reported.
        """
        seen, peak = joined(window.counters), costs.peak
        counted = values.get("perf/hardware_flops_per_second_per_device")
        if seen is None or peak is None or counted is None or seen.flops_per_s is not None:
            return None  # a CPU's counter of instructions also counts what is no matrix product
        clock = values.get("counters/sm_clock_mhz")
        mean_peak = values.get("perf/peak_flops_per_second_per_device", peak.flops_per_s)
        found = self._alarm.add(
            Compared(
                seen.seconds,
                seconds_of(step for step in window.steps if not step.is_warm_up),
                seen.readings,
                peak.dtype,
                costs.tensor_peak(mean_peak) or mean_peak,
                counted * costs.tensor_share,
                values.get(FLOP_RATE),
                values.get("counters/tensor_active"),
                None if clock is None or not self._peak_clock_mhz else clock / self._peak_clock_mhz,
                seen.throttled or (),
                None if costs.peaks.ranks > 1 else seen.other_memory_bytes,
                costs.tensor_peaks(),
                costs.uses_tensor_cores,
                costs.is_type_seen,
            )
        )
        return None if found is None else _notice_of(found, seen.source)


def _notice_of(found: Disagreement, source: str) -> NoticeText:
    seen = found.compared
    counters, counted = flop_rate(seen.counter_flops_per_s), flop_rate(seen.counted_flops_per_s)
    if found.kind == "throttled":
        reason, often = seen.throttled[0]
        return notices.notice(
            "counters_throttled",
            source=source,
            busy=percent(seen.tensor_active),
            clock=percent(seen.clock_share),
            reason=reason,
            often=percent(often),
        )
    if found.kind == "other_process":
        held = byte_size(seen.other_memory_bytes)
        return notices.notice("counters_other_process", source=source, counters=counters, counted=counted, held=held)
    if found.kind == "not_counted":
        return notices.notice("counters_not_counted", source=source, counters=counters, counted=counted)
    if seen.counter_flops_per_s is None:
        busy = percent(seen.tensor_active)
        return notices.notice("counters_tensor_cores_busy", source=source, busy=busy, dtype=seen.dtype)
    likely = found.likely_type or Said("another type, or outside of the tensor cores")
    return notices.notice(
        "counters_peak_type", source=source, counters=counters, counted=counted, dtype=seen.dtype, likely=likely
    )
