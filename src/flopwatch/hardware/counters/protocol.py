"""The seam of hardware counters: a source gives readings of one device."""

from dataclasses import dataclass
from typing import Protocol

from flopwatch.records.counters import CounterReading


@dataclass(frozen=True, slots=True)
class DeviceIdentity:
    """Which device of this machine is meant, in words that drivers understand. None means unknown.

    The index in torch is not part of it, because a driver may number its devices in another order.

    Attributes:
        kind: `cuda` (NVIDIA), `rocm` (AMD), `cpu`, or torch's device type of another device.
        name: The product's name.
        uuid: UUID without a prefix such as `GPU-`.
        pci_bus_id: PCI address, such as `0000:3b:00.0`.
        visible_as: The device's entry in `CUDA_VISIBLE_DEVICES`, which may be the UUID of a MIG instance.
    """

    kind: str
    name: str
    uuid: str | None = None
    pci_bus_id: str | None = None
    visible_as: str | None = None


class CounterSource(Protocol):
    """Reads the counters of one device. `sample` is called by a thread of its own, never on the path of a step.

    Attributes:
        name: The name that stands in `CounterReading.source`.
    """

    name: str

    def sample(self) -> CounterReading:
        """Read the counters now. Raises `CountersUnavailableError` or any other exception if it cannot."""

    def close(self) -> None:
        """Release what the source holds; never raises."""


class CountersUnavailableError(Exception):
    """A source is not there; the message says in one line why, and what would bring it."""
