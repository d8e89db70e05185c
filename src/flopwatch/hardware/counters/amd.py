"""Counters of AMD GPUs through ROCm's amdsmi. Never run on a GPU; the tests use a stand-in for the module.

AMD's library has no counter of the matrix cores, so `tensor_active` is unknown.
"""

import os
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import Any, Final

from flopwatch.clock import Clock, monotonic_seconds
from flopwatch.hardware.counters.nvml import memory_of_others
from flopwatch.hardware.counters.protocol import CounterSource, CountersUnavailableError, DeviceIdentity
from flopwatch.records.counters import CounterReading
from flopwatch.text import first_line

_VIOLATIONS: Final = {
    "active_ppt_pwr": "power cap",
    "active_socket_thrm": "hardware thermal slowdown",
    "active_hbm_thrm": "memory thermal slowdown",
    "active_vr_thrm": "voltage regulator thermal slowdown",
    "active_prochot_thrm": "external thermal slowdown",
}

_Values = dict[str, Any]


class AmdProbe:
    """Opens amdsmi for a device."""

    name = "amdsmi"

    def __init__(self, clock: Clock = monotonic_seconds) -> None:
        self._clock = clock

    def open(self, device: DeviceIdentity) -> CounterSource:
        try:
            smi: Any = import_module("amdsmi")
        except (ImportError, OSError, KeyError) as error:  # it raises KeyError without its library and ROCM_HOME
            raise CountersUnavailableError(
                f"the package 'amdsmi' cannot be imported ({first_line(error)}); install the one of your ROCm, in "
                "/opt/rocm/share/amd_smi"
            ) from error
        try:
            smi.amdsmi_init()
        except smi.AmdSmiException as error:
            raise CountersUnavailableError(f"amdsmi says: {first_line(error)}") from error
        try:
            return AmdCounters(smi, _find(smi, device), self._clock)
        except BaseException as error:
            smi.amdsmi_shut_down()
            if isinstance(error, smi.AmdSmiException):
                raise CountersUnavailableError(f"amdsmi says: {first_line(error)}") from error
            raise


class AmdCounters:
    """Reads one device. A value that amdsmi refuses is asked once, and then left out."""

    name = "amdsmi"
    interval_seconds = 1.0  # amdsmi reads files of the driver, and for violations it waits between two readings

    def __init__(self, smi: Any, handle: Any, clock: Clock) -> None:
        self._smi, self._clock = smi, clock
        self._reads: list[Callable[[], _Values]] = [
            lambda: _activity(smi.amdsmi_get_gpu_activity(handle)),
            lambda: _power(smi.amdsmi_get_power_info(handle)),
            lambda: _energy(smi.amdsmi_get_energy_count(handle)),
            lambda: _clock_mhz(smi.amdsmi_get_clock_info(handle, smi.AmdSmiClkType.GFX)),
            lambda: _throttled(smi.amdsmi_get_violation_status(handle)),
            lambda: _memory(smi.amdsmi_get_gpu_process_list(handle)),
        ]

    def sample(self) -> CounterReading:
        values: _Values = {}
        refused: BaseException | None = None
        for read in tuple(self._reads):
            try:
                values.update(read())
            except (self._smi.AmdSmiException, AttributeError, LookupError, TypeError, ValueError) as error:
                refused = error
                self._reads.remove(read)
        if not self._reads:
            raise CountersUnavailableError(f"amdsmi gives none of the values: {first_line(refused or '')}")
        return CounterReading(self.name, self._clock(), **values)

    def close(self) -> None:
        with suppress(self._smi.AmdSmiException):
            self._smi.amdsmi_shut_down()


def _find(smi: Any, device: DeviceIdentity) -> Any:
    """The device of a PCI address, or of a serial number, which HIP gives as the text of a UUID's 16 bytes."""
    serial = None
    with suppress(ValueError, TypeError):
        serial = bytes.fromhex((device.uuid or "").replace("-", "")).decode("ascii").lower()
    slot = None if device.pci_bus_id is None else device.pci_bus_id.lower().rpartition(".")[0]
    found = []
    for handle in smi.amdsmi_get_processor_handles():
        asic = smi.amdsmi_get_gpu_asic_info(handle).get("asic_serial", "") if serial else ""
        is_named = bool(serial) and str(asic).lower().removeprefix("0x") == serial
        if is_named or (slot and smi.amdsmi_get_gpu_device_bdf(handle).lower().rpartition(".")[0] == slot):
            found.append(handle)
    if len(found) > 1:  # they differ in the PCI function, which torch does not tell
        raise CountersUnavailableError(
            f"the GPU is divided into {len(found)} partitions, and torch does not tell which one it uses"
        )
    if found:
        return found[0]
    raise CountersUnavailableError(
        f"amdsmi has no device with the PCI address {device.pci_bus_id or 'unknown'} or the UUID "
        f"{device.uuid or 'unknown'}, which torch reports for {device.name}"
    )


def _number(value: object) -> float | None:
    """A number; amdsmi writes N/A for what the device does not report."""
    return float(value) if isinstance(value, int | float) else None


def _activity(activity: _Values) -> _Values:
    shares = {"sm_active": _number(activity["gfx_activity"]), "dram_active": _number(activity["umc_activity"])}
    return {field: None if percent is None else percent / 100 for field, percent in shares.items()}


def _power(power: _Values) -> _Values:
    """Power now, which only newer devices report, or the mean of a short time."""
    now, mean = _number(power.get("current_socket_power")), _number(power.get("average_socket_power"))
    return {"power_watts": now or mean}


def _energy(energy: _Values) -> _Values:
    count = energy.get("energy_accumulator", energy.get("power"))  # `power` before ROCm 6
    return {"energy_joules": count * energy["counter_resolution"] / 1e6 if count else None}


def _clock_mhz(clock: _Values) -> _Values:
    return {"sm_clock_mhz": _number(clock.get("clk", clock.get("cur_clk")))}  # `cur_clk` before ROCm 6.1


def _throttled(violations: _Values) -> _Values:
    known = {reason: violations.get(name) for name, reason in _VIOLATIONS.items()}
    if not any(isinstance(active, bool) for active in known.values()):
        return {}
    return {"throttled": tuple(reason for reason, active in known.items() if active is True)}


def _memory(processes: list[_Values]) -> _Values:
    held: dict[int, int | None] = {}
    for process in processes:
        memory = process["memory_usage"]["vram_mem"]
        held[process["pid"]] = memory if isinstance(memory, int) else None
    return {"other_memory_bytes": memory_of_others(held)} if held.get(os.getpid()) is not None else {}
