"""What is known about one device, in plain values. Never loads torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """One device as the framework enumerates it; what cannot be read is None.

    Attributes:
        name: The name the device gives itself, such as `NVIDIA H100 80GB HBM3`.
        kind: torch's device type: `cuda` (also for ROCm), `xpu`, `mps`, `npu`, `cpu`; empty when only a name is known.
        unit_count: Streaming multiprocessors, compute units or cores this process sees; fewer than the product has
            on a MIG slice or an AMD partition.
        memory_gib: Memory as reported, which is below the nominal size.
        gcn_arch: AMD's architecture, such as `gfx942`.
        compute_capability: NVIDIA's architecture, such as `(9, 0)`.
        clock_mhz: Boost clock the driver states for this very device.
    """

    name: str
    kind: str = ""
    unit_count: int | None = None
    memory_gib: float | None = None
    gcn_arch: str | None = None
    compute_capability: tuple[int, int] | None = None
    clock_mhz: float | None = None


@dataclass(frozen=True, slots=True)
class Unknown:
    """Why there is no peak: a sentence for the person who asked."""

    reason: str
