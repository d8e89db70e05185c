"""A training on a fake device: an H100 that is slower by a factor of 1e8, with a clock and counters by hand."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

import flopwatch
from flopwatch.hardware import peak_flops
from flopwatch.monitor.counters import device as device_counters
from flopwatch.monitor.counting import costs
from flopwatch.records.counters import CounterReading, CounterWindow, window_of
from flopwatch.records.flops import Peak
from flopwatch.testing import FakeClock, FakeCounters, RecordingSink, fake_device

WIDTH, TOKENS = 64, 256
STEP_FLOPS = (6 + 4) * WIDTH * WIDTH * TOKENS  # two layers; the first one needs no gradient of its input
SLOWER = 1e-8
BF16_PEAK, CLOCK_MHZ = 989.4e12 * SLOWER, 1829.9


def seconds_at(share_of_peak: float) -> float:
    """How long a step takes that uses this share of the peak in bf16."""
    return STEP_FLOPS / (share_of_peak * BF16_PEAK)


class Sampled:
    """Stands in for `CounterSampler`: each `take` reads the fake source every 0.2 s since the last one."""

    def __init__(self, counters: FakeCounters, clock: FakeClock, watts: float | None) -> None:
        self._counters, self._clock, self._watts = counters, clock, watts
        self._before = self._reading_at(clock())

    def _reading_at(self, seconds: float) -> CounterReading:
        joules = None if self._watts is None else self._watts * seconds
        return replace(self._counters.sample(), seconds=seconds, energy_joules=joules)

    def take(self) -> CounterWindow | None:
        began, before, now = self._before.seconds, self._before, self._clock()
        count = max(1, round((now - began) / 0.2))
        readings = [self._reading_at(began + (now - began) * number / count) for number in range(1, count + 1)]
        self._before = readings[-1]
        return window_of(readings, before)

    def close(self) -> None:
        self._counters.close()


def slow_peak(device: object, dtype: str, **more: Any) -> Peak | None:
    peak = peak_flops(fake_device("h100"), dtype, **more)
    return None if peak is None else replace(peak, flops_per_s=peak.flops_per_s * SLOWER)


class FakeTraining:
    """Steps of `STEP_FLOPS` FLOPs in bf16 that take `step_seconds` of a fake clock."""

    def __init__(
        self,
        tmp_path: Any,
        monkeypatch: Any,
        readings: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        log_every: int = 4,
        watts: float | None = None,
        **options: Any,
    ) -> None:
        self.clock, self.sink = FakeClock(), RecordingSink()
        shown = [readings] if isinstance(readings, Mapping) else readings
        source = FakeCounters("fake", shown, clock=self.clock)
        self.counters = source
        monkeypatch.setattr(device_counters, "CounterSampler", lambda *_: Sampled(source, self.clock, watts))
        facts = fake_device("h100")
        monkeypatch.setattr(device_counters, "read_device", lambda device: facts)
        monkeypatch.setattr(costs, "peak_flops", slow_peak)
        layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2)]
        self.model = nn.Sequential(*layers).to(torch.bfloat16)
        config = {"warm_up_steps": 0, "log_seconds": 1e9, **options.pop("config", {})}
        self.monitor = flopwatch.TrainingMonitor(
            tmp_path,
            model=self.model,
            mode="hybrid",
            sinks=[self.sink],
            clock=self.clock,
            strict=True,
            log_every=log_every,
            config=config,
            quiet=True,
            **options,
        )

    def train(
        self, step_seconds: Iterable[float], hidden: Callable[[torch.Tensor], torch.Tensor] | None = None
    ) -> None:
        self.run_steps(step_seconds, hidden)
        self.monitor.close()

    def run_steps(
        self, step_seconds: Iterable[float], hidden: Callable[[torch.Tensor], torch.Tensor] | None = None
    ) -> None:
        x = torch.randn(TOKENS, WIDTH, dtype=torch.bfloat16)
        for seconds in step_seconds:
            with self.monitor.step(x):
                out = self.model(x)
                (out if hidden is None else hidden(out)).sum().backward()
                self.clock.advance(seconds)

    def records(self, kind: str) -> list[Any]:
        return [record for record in self.sink.records if record.type == kind]

    def alarms(self) -> list[str]:
        """The codes of what was told about counters."""
        return [record.code for record in self.records("notice") if record.code.startswith("counters_")]
