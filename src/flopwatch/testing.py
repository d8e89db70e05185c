"""Fakes for tests of code that uses flopwatch: devices that are not here, a clock that stands still.

Nothing in the package imports this module.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from flopwatch.errors import InputError
from flopwatch.hardware.facts import DeviceFacts
from flopwatch.hardware.matmul_search import Shape, matmul_flops

FAKE_DEVICES = {
    "h100": DeviceFacts("NVIDIA H100 80GB HBM3", "cuda", 132, 79.1, None, (9, 0), 1980.0),
    "a100": DeviceFacts("NVIDIA A100-SXM4-40GB", "cuda", 108, 39.4, None, (8, 0), 1410.0),
    "a100-mig-1g.5gb": DeviceFacts("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "cuda", 14, 4.75, None, (8, 0), 1410.0),
    "a100-80gb-mig-1g.10gb": DeviceFacts("NVIDIA A100-SXM4-80GB MIG 1g.10gb", "cuda", 14, 9.5, None, (8, 0), 1410.0),
    "v100": DeviceFacts("Tesla V100-SXM2-32GB", "cuda", 80, 31.7, None, (7, 0), 1530.0),
    "mi300x": DeviceFacts("AMD Instinct MI300X", "cuda", 304, 191.7, "gfx942:sramecc+:xnack-", None, 2100.0),
    "mi300x-cpx": DeviceFacts("AMD Instinct MI300X", "cuda", 38, 23.9, "gfx942:sramecc+:xnack-", None, 2100.0),
    "max-1550-tile": DeviceFacts("Intel(R) Data Center GPU Max 1550", "xpu", 56, 64.0),
    "m1-max-24-cores": DeviceFacts("Apple M1 Max", "mps", 24),
    "ascend-910b2": DeviceFacts("Ascend910B2", "npu"),
    "unheard-of": DeviceFacts("Unheard-of Accelerator 9000", "cuda", 64, 80.0, None, (99, 0), 2000.0),
}


def fake_device(product: str) -> DeviceFacts:
    """A device that is not here, for `peak_flops(device=...)`.

    >>> fake_device("a100-mig-1g.5gb").unit_count
    14
    """
    if product not in FAKE_DEVICES:
        raise InputError(f"there is no fake device {product!r}; use one of: {', '.join(FAKE_DEVICES)}")
    return FAKE_DEVICES[product]


def fake_torch(facts: DeviceFacts) -> Any:
    """As much of torch as device reading asks for, answering as on a machine with this one device.

    >>> from flopwatch.hardware import read_device
    >>> read_device("cuda:0", fake_torch(fake_device("h100"))) == fake_device("h100")
    True
    """
    import torch  # kept out of the module: most fakes do without

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
        accelerator=SimpleNamespace(current_accelerator=lambda check_available: torch.device(facts.kind)),
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


class FakeClock:
    """A clock that moves only when told.

    >>> clock = FakeClock()
    >>> clock.advance(2.5)
    >>> clock()
    2.5
    """

    def __init__(self, seconds: float = 0.0) -> None:
        self._seconds = seconds

    def __call__(self) -> float:
        return self._seconds

    def advance(self, seconds: float) -> None:
        self._seconds += seconds


class FakeMatmul:
    """Stands in for the timer of `measure_peak`: each shape runs at the rate a function says, and the clock moves.

    >>> clock = FakeClock()
    >>> time_matmul = FakeMatmul(clock, lambda shape: 1e9)
    >>> time_matmul((1000, 1000, 1000), 3), clock()
    (6.0, 6.0)

    Attributes:
        timed: What was asked for: shape and number of calls.
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
