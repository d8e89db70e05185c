"""Counters of NVIDIA GPUs from the page that dcgm-exporter serves for Prometheus. Never run on a GPU."""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from typing import Any, Final
from urllib.parse import urlsplit

from flopwatch.clock import Clock, monotonic_seconds
from flopwatch.hardware.counters.nvml import throttle_reasons
from flopwatch.hardware.counters.nvml_device import find_device, open_nvml
from flopwatch.hardware.counters.protocol import CounterSource, CountersUnavailableError, DeviceIdentity
from flopwatch.records.counters import CounterReading

DEFAULT_ADDRESS = "http://localhost:9400/metrics"
_TIMEOUT_SECONDS = 1.0
_MOST_BYTES = 1 << 20
"""A page of eight GPUs has some 70 KB; one of 1 MiB takes some 60 ms of a core."""
_TENSOR: Final = "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE"
_SCALES: Final = {
    _TENSOR: ("tensor_active", 1.0),
    "DCGM_FI_PROF_SM_ACTIVE": ("sm_active", 1.0),
    "DCGM_FI_PROF_DRAM_ACTIVE": ("dram_active", 1.0),
    "DCGM_FI_DEV_SM_CLOCK": ("sm_clock_mhz", 1.0),
    "DCGM_FI_DEV_POWER_USAGE": ("power_watts", 1.0),
    "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION": ("energy_joules", 1e-3),
}
_OF_A_WHOLE_GPU = ("power_watts", "energy_joules")
"""Fields that DCGM knows of a GPU only, although the exporter shows them for each of its MIG instances."""
_REASONS: Final = ("DCGM_FI_DEV_CLOCK_THROTTLE_REASONS", "DCGM_FI_DEV_CLOCKS_EVENT_REASONS")
"""The names before and since DCGM 4."""
_OF_AN_INTERVAL = ("tensor_active", "sm_active", "dram_active")
_UNKNOWN_FROM: Final = 2**47
"""From here on, numbers are those that DCGM writes for unknown values (DCGM_FP64_BLANK and larger ones)."""
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class _Wanted:
    uuid: str | None
    pci_bus_id: str | None
    instance: str | None

    def is_of(self, labels: Mapping[str, str]) -> bool:
        uuid, pci = labels.get("UUID", labels.get("uuid", "")), labels.get("pci_bus_id", "")
        if self.uuid is not None:
            return uuid.lower() == self.uuid.lower()
        return self.pci_bus_id is not None and _pci_numbers(pci) == _pci_numbers(self.pci_bus_id)


class DcgmProbe:
    """Opens the exporter's page at `address`, or at the one in the environment variable FLOPWATCH_DCGM."""

    name = "dcgm"

    def __init__(self, address: str | None = None, clock: Clock = monotonic_seconds) -> None:
        self._address, self._clock = address, clock

    def open(self, device: DeviceIdentity) -> CounterSource:
        address = self._address or os.environ.get("FLOPWATCH_DCGM") or DEFAULT_ADDRESS
        page = _fetch(address)
        counters = DcgmCounters(address, _choose_instance(page, _wanted(device)), self._clock)
        if counters.values_in(page).get("tensor_active") is None:
            raise CountersUnavailableError(
                f"{address} has no {_TENSOR} of this GPU; add it to the exporter's counters, and let the exporter "
                "profile (it needs the capability SYS_ADMIN)"
            )
        return counters


class DcgmCounters:
    """Reads the exporter's page, whose values are as old as the exporter's own interval, 30 s by default."""

    name = "dcgm"
    interval_seconds = 5.0  # a page costs more processor time than a reading of NVML

    def __init__(self, address: str, wanted: _Wanted, clock: Clock) -> None:
        self._address, self._wanted, self._clock = address, wanted, clock
        self._before: dict[str, float] = {}

    def sample(self) -> CounterReading:
        seen = self.values_in(_fetch(self._address))
        if not seen:
            raise CountersUnavailableError(f"{self._address} has no value of this GPU any more")
        values: dict[str, Any] = dict(seen)
        if seen == self._before:  # the exporter has not read again: what the device did since then is unknown
            values |= dict.fromkeys(_OF_AN_INTERVAL)
        self._before = seen
        # Energy only shows that a page is new: it ends when the exporter has read it, up to 30 s before a window ends.
        values.pop("energy_joules", None)
        bits = values.pop("throttled", None)
        throttled = None if bits is None else throttle_reasons(int(bits))
        return CounterReading(self.name, self._clock(), **values, throttled=throttled)

    def values_in(self, page: str) -> dict[str, float]:
        """The values of this device, by the field of `CounterReading`; the reasons of the clock as bits."""
        found: dict[str, float] = {}
        for metric, labels, value in _rows(page):
            # Activity is that of the instance alone; an exporter may show that of the GPU with all instances too.
            of = (self._wanted.instance,) if metric.startswith("DCGM_FI_PROF") else (None, self._wanted.instance)
            if self._wanted.is_of(labels) and labels.get("GPU_I_ID") in of:
                field, scale = _SCALES.get(metric, ("throttled", 1.0))
                found.setdefault(field, value * scale)
        if self._wanted.instance is not None:
            for field in _OF_A_WHOLE_GPU:
                found.pop(field, None)
        return found

    def close(self) -> None:
        pass


def _fetch(address: str) -> str:
    """The page. Without the proxies of the environment, because the exporter runs on this machine."""
    parts = urlsplit(address if "//" in address else f"//{address}")
    if parts.scheme not in ("", "http") or parts.hostname is None:
        raise CountersUnavailableError(f"{address} is not an address that begins with http://; correct FLOPWATCH_DCGM")
    try:
        connection = HTTPConnection(parts.hostname, parts.port or 9400, timeout=_TIMEOUT_SECONDS)
        with closing(connection):
            connection.request("GET", parts.path or "/metrics")
            with connection.getresponse() as answer:
                if answer.status != 200:
                    raise CountersUnavailableError(f"{address} answers with HTTP {answer.status}")
                page = answer.read(_MOST_BYTES + 1)
    except (OSError, HTTPException, ValueError) as error:
        raise CountersUnavailableError(
            f"no dcgm-exporter answers at {address} ({type(error).__name__}); start it, or set FLOPWATCH_DCGM to its "
            "address"
        ) from error
    if len(page) > _MOST_BYTES:
        raise CountersUnavailableError(
            f"{address} serves more than 1 MiB, more than that of one machine; set FLOPWATCH_DCGM to the exporter of "
            "this machine"
        )
    return page.decode("utf-8", "replace")


def _rows(page: str) -> Iterator[tuple[str, dict[str, str], float]]:
    whole_lines, _, _ = page.rpartition("\n")  # the exporter may have ended within the last one
    for line in whole_lines.splitlines():
        metric, brace, rest = line.partition("{")
        if not brace or (metric not in _SCALES and metric not in _REASONS):
            continue
        labels, _, value = rest.rpartition("} ")
        with suppress(ValueError, IndexError):
            number = float(value.split()[0])
            if 0 <= number < _UNKNOWN_FROM:
                yield metric, dict(_LABEL.findall(labels)), number


def _wanted(device: DeviceIdentity) -> _Wanted:
    """What the exporter calls the device. It names a MIG instance by its GPU and a number, which NVML knows."""
    if (device.visible_as or "").startswith("MIG-"):
        nvml = open_nvml()
        try:
            found = find_device(nvml, device)
            return _Wanted(str(nvml.nvmlDeviceGetUUID(found.gpu)), None, str(found.gpu_instance))
        finally:
            nvml.nvmlShutdown()
    if device.uuid is None and device.pci_bus_id is None:
        raise CountersUnavailableError(f"torch does not tell the UUID or the PCI address of {device.name}")
    uuid = None if device.uuid is None else "GPU-" + device.uuid.removeprefix("GPU-")
    return _Wanted(uuid, device.pci_bus_id, None)


def _choose_instance(page: str, wanted: _Wanted) -> _Wanted:
    """The only MIG instance of a GPU stands for it; one of several is not guessed."""
    labels = [labels for metric, labels, _ in _rows(page) if metric == _TENSOR and wanted.is_of(labels)]
    instances = {label["GPU_I_ID"] for label in labels if "GPU_I_ID" in label}
    if wanted.instance is not None or not instances:
        return wanted
    if len(instances) > 1:
        raise CountersUnavailableError(
            f"the GPU is divided into {len(instances)} MIG instances; set CUDA_VISIBLE_DEVICES to the UUID of one"
        )
    return _Wanted(wanted.uuid, wanted.pci_bus_id, instances.pop())


def _pci_numbers(address: str) -> list[int]:
    with suppress(ValueError):
        return [int(part, 16) for part in re.split("[:.]", address)]
    return []
