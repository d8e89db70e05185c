"""Fakes of torch's devices and of the timer of matmuls, for flopwatch's own tests."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from flopwatch.hardware.measure import Shape, matmul_flops
from flopwatch.hardware.peaks import DeviceFacts
from flopwatch.testing import FakeClock


def fake_torch(facts: DeviceFacts) -> Any:
    """A fake `torch` module of a machine that has this one device, for `read_device(torch_module=...)`."""

    def properties(device: object) -> SimpleNamespace:
        major, minor = facts.compute_capability or (9, 4)
        return SimpleNamespace(
            name=facts.name,
            multi_processor_count=facts.unit_count,
            gpu_eu_count=(facts.unit_count or 0) * 8,
            total_memory=(facts.memory_gib or 0) * 2**30,
            gcnArchName=facts.gcn_arch or facts.name,
            major=major,
            minor=minor,
            clock_rate=(facts.clock_mhz or 0) * 1e3,
        )

    namespace = SimpleNamespace(
        accelerator=SimpleNamespace(is_available=lambda: True, current_accelerator=lambda: torch.device(facts.kind)),
        version=SimpleNamespace(hip="6.4" if facts.gcn_arch else None),
        backends=SimpleNamespace(
            mps=SimpleNamespace(
                is_available=lambda: facts.kind == "mps",
                get_name=lambda: facts.name,
                get_core_count=lambda: facts.unit_count,
            )
        ),
    )
    own_module = SimpleNamespace(get_device_properties=properties, get_device_name=lambda device: facts.name)
    setattr(namespace, facts.kind, own_module)
    return namespace


class FakeEvents:
    """Replaces `torch.Event`: each fake event completes `lag_seconds` after it was recorded.

    >>> clock = FakeClock()
    >>> events = FakeEvents(clock, lag_seconds=3.0)
    >>> start, end = events("cuda:0"), events("cuda:0")
    >>> start.record(); clock.advance(2.0); end.record()
    >>> start.elapsed_time(end), end.query()
    (2000.0, False)
    >>> clock.advance(3.0); end.query()
    True

    Attributes:
        waits: How often `synchronize` was called.
    """

    def __init__(self, clock: FakeClock, lag_seconds: float = 0.0) -> None:
        self.waits = 0
        self._clock = clock
        self._lag_seconds = lag_seconds

    def __call__(self, device: object = None, *, enable_timing: bool = False) -> Any:
        recorded: list[float] = []

        def wait() -> None:
            self.waits += 1

        return SimpleNamespace(
            record=lambda: recorded.append(self._clock()),
            query=lambda: self._clock() >= recorded[-1] + self._lag_seconds,
            synchronize=wait,
            elapsed_time=lambda end: 1e3 * (end.recorded[-1] - recorded[-1]),
            recorded=recorded,
        )


class FakeMatmul:
    """Replaces the timer of `measure_peak`: computes times from `flops_per_s(shape)`, and advances `clock` by them.

    >>> clock = FakeClock()
    >>> time_matmul = FakeMatmul(clock, lambda shape: 1e9)
    >>> time_matmul((1000, 1000, 1000), 3), clock()
    (6.0, 6.0)

    Attributes:
        timed: The calls so far: shape and number of products.
    """

    def __init__(self, clock: FakeClock, flops_per_s: Callable[[Shape], float]) -> None:
        self.timed: list[tuple[Shape, int]] = []
        self._clock = clock
        self._flops_per_s = flops_per_s

    def __call__(self, shape: Shape, calls: int) -> float:
        self.timed.append((shape, calls))
        seconds = calls * matmul_flops(shape) / self._flops_per_s(shape)
        self._clock.advance(seconds)
        return seconds
