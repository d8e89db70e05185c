"""Counters of NVIDIA GPUs through NVML: activity of Hopper and newer (GPM); clock, energy and throttling of all.

Never run on a GPU; the tests drive nvidia-ml-py with a stand-in for the driver's library.
"""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from flopwatch.clock import Clock, monotonic_seconds
from flopwatch.hardware.counters.nvml_device import NvmlDevice, explain, find_device, open_nvml
from flopwatch.hardware.counters.protocol import CounterSource, CountersUnavailableError, DeviceIdentity
from flopwatch.process import read_stat
from flopwatch.records.counters import CounterReading

THROTTLE_REASONS: Final = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
"""The bits of NVML's clock event reasons (nvml.h) that hold the clock down.

An idle GPU, clocks that the user has set, and a sync boost group are not among them.
"""

_SHORTEST_GPM_SECONDS = 0.1
"""NVIDIA asks for at least this time between two GPM samples."""
_SECONDS_BETWEEN_PROCESSES = 5.0
"""The list of processes costs as much as all other values together."""

_Values = dict[str, Any]


class Gpm:
    """Activity between two samples of a GPU's performance monitor (GPM), of Hopper and newer."""

    def __init__(self, nvml: Any, found: NvmlDevice, clock: Clock) -> None:
        """Take two samples, to see that the driver permits them."""
        support = nvml.nvmlGpmQueryDeviceSupport(found.gpu)
        if not support.isSupportedDevice:
            raise CountersUnavailableError("this GPU has no performance monitor (GPM); Hopper and newer have one")
        self._nvml, self._found = nvml, found
        fields = {
            "tensor_active": nvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL,
            "sm_active": nvml.NVML_GPM_METRIC_SM_UTIL,
            "dram_active": nvml.NVML_GPM_METRIC_DRAM_BW_UTIL,
        }
        self._fields = tuple(fields)
        self._ask = nvml.c_nvmlGpmMetricsGet_t()
        self._ask.version = nvml.NVML_GPM_METRICS_GET_VERSION
        self._ask.numMetrics = len(fields)
        for place, metric in enumerate(fields.values()):
            self._ask.metrics[place].metricId = metric
        self._before = self._take(nvml.nvmlGpmSampleAlloc())
        self._now = nvml.nvmlGpmSampleAlloc()
        self._before_at = clock()
        time.sleep(_SHORTEST_GPM_SECONDS)
        if "tensor_active" not in self._activity(clock()):
            raise CountersUnavailableError("the GPU's performance monitor does not report the tensor cores")

    def read(self, now: float) -> _Values:
        """The activity since the last reading; nothing if that was less than 100 ms ago."""
        return self._activity(now) if now - self._before_at >= _SHORTEST_GPM_SECONDS else {}

    def _activity(self, now: float) -> _Values:
        self._take(self._now)
        self._ask.sample1, self._ask.sample2 = self._before, self._now
        self._before, self._now, self._before_at = self._now, self._before, now
        self._nvml.nvmlGpmMetricsGet(self._ask)
        metrics = self._ask.metrics
        return {
            field: metrics[place].value / 100
            for place, field in enumerate(self._fields)
            if metrics[place].nvmlReturn == self._nvml.NVML_SUCCESS
        }

    def close(self) -> None:
        self._nvml.nvmlGpmSampleFree(self._before)
        self._nvml.nvmlGpmSampleFree(self._now)

    def _take(self, sample: Any) -> Any:
        if self._found.gpu_instance is None:
            return self._nvml.nvmlGpmSampleGet(self._found.gpu, sample)
        return self._nvml.nvmlGpmMigSampleGet(self._found.gpu, self._found.gpu_instance, sample)


class NvmlProbe:
    """Opens NVML for a device; with `gpm`, only if the GPU counts the activity of its tensor cores."""

    def __init__(self, *, gpm: bool, clock: Clock = monotonic_seconds) -> None:
        self.name = "nvml-gpm" if gpm else "nvml"
        self._clock = clock

    def open(self, device: DeviceIdentity) -> CounterSource:
        nvml = open_nvml()
        try:
            found = find_device(nvml, device)
            gpm = Gpm(nvml, found, self._clock) if self.name == "nvml-gpm" else None
            return NvmlCounters(nvml, found, gpm, self._clock)
        except nvml.NVMLError as error:
            nvml.nvmlShutdown()
            raise CountersUnavailableError(explain(nvml, error)) from error
        except BaseException:
            nvml.nvmlShutdown()
            raise


class NvmlCounters:
    """Reads one device. What the driver, the GPU or a permission does not provide is asked once, and then left out."""

    interval_seconds = 0.0

    def __init__(self, nvml: Any, found: NvmlDevice, gpm: Gpm | None, clock: Clock) -> None:
        self.name = "nvml" if gpm is None else "nvml-gpm"
        self._nvml, self._gpm, self._clock = nvml, gpm, clock
        self._processes_at = -_SECONDS_BETWEEN_PROCESSES
        self._never = {
            nvml.NVML_ERROR_NOT_SUPPORTED,
            nvml.NVML_ERROR_FUNCTION_NOT_FOUND,
            nvml.NVML_ERROR_NO_PERMISSION,
            nvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
            nvml.NVML_ERROR_INVALID_ARGUMENT,
            nvml.NVML_ERROR_DEPRECATED,
        }
        self._fatal = {
            nvml.NVML_ERROR_GPU_IS_LOST,
            nvml.NVML_ERROR_RESET_REQUIRED,
            nvml.NVML_ERROR_UNINITIALIZED,
            nvml.NVML_ERROR_DRIVER_NOT_LOADED,
            nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
        }
        self._essential = None if gpm is None else gpm.read
        self._reads = self._what_to_read(found)

    def sample(self) -> CounterReading:
        now = self._clock()
        values: _Values = {}
        for read in tuple(self._reads):
            try:
                values.update(read(now))
            except self._nvml.NVMLError as error:
                is_final = error.value in self._never
                if error.value in self._fatal or (is_final and read is self._essential):
                    raise CountersUnavailableError(explain(self._nvml, error)) from error
                if is_final:
                    self._reads.remove(read)
        if not self._reads:
            raise CountersUnavailableError("NVML gives none of the values for this device")
        return CounterReading(self.name, now, **values)

    def close(self) -> None:
        with suppress(self._nvml.NVMLError):
            if self._gpm is not None:
                self._gpm.close()
        with suppress(self._nvml.NVMLError):
            self._nvml.nvmlShutdown()

    def _what_to_read(self, found: NvmlDevice) -> list[Callable[[float], _Values]]:
        nvml, gpu = self._nvml, found.gpu
        reasons = _reasons_function(nvml, gpu)
        reads: list[Callable[[float], _Values]] = [
            lambda _: {"sm_clock_mhz": float(nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM))},
            lambda _: {"throttled": throttle_reasons(reasons(gpu))},
        ]
        if found.gpu_instance is None:  # the driver knows power and energy only of the GPU with all its instances
            reads += [
                lambda _: {"power_watts": nvml.nvmlDeviceGetPowerUsage(gpu) / 1e3},
                lambda _: {"energy_joules": nvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1e3},
            ]
        reads.append(lambda now: self._processes(found.handle, now))
        return reads if self._essential is None else [self._essential, *reads]

    def _processes(self, handle: Any, now: float) -> _Values:
        if now - self._processes_at < _SECONDS_BETWEEN_PROCESSES:
            return {}
        self._processes_at = now
        # By its version, because without it nvidia-ml-py raises an error of another class on drivers before 510.
        running = self._nvml.nvmlDeviceGetComputeRunningProcesses_v3(handle)
        return {"other_memory_bytes": memory_of_others({process.pid: process.usedGpuMemory for process in running})}


def _reasons_function(nvml: Any, gpu: Any) -> Any:
    """The function for the reasons of the clock; before driver 535 it has another name, which CUDA 14 will drop."""
    with suppress(nvml.NVMLError):
        nvml.nvmlDeviceGetCurrentClocksEventReasons(gpu)
        return nvml.nvmlDeviceGetCurrentClocksEventReasons
    return nvml.nvmlDeviceGetCurrentClocksThrottleReasons


def throttle_reasons(bits: int) -> tuple[str, ...]:
    """The reasons that hold the clock down, of NVML's bits.

    >>> throttle_reasons(0x01), throttle_reasons(0x44)
    ((), ('power cap', 'hardware thermal slowdown'))
    """
    return tuple(reason for bit, reason in THROTTLE_REASONS.items() if bits & bit)


def memory_of_others(bytes_by_pid: dict[int, int | None]) -> int | None:
    """Memory of the processes that neither are this one nor were started by it.

    None if the driver does not list this process, because in a container it may report the host's pids, and this
    process would then be taken for another one. None also if the memory of another process is unknown.
    """
    own = os.getpid()
    if own not in bytes_by_pid:
        return None
    others = [held for pid, held in bytes_by_pid.items() if not _belongs_to(own, pid)]
    return None if None in others else sum(held for held in others if held is not None)


def _belongs_to(own: int, pid: int) -> bool:
    for _ in range(20):  # generations
        if pid == own:
            return True
        stat = read_stat(pid)
        if stat is None or stat.parent <= 1:
            return False
        pid = stat.parent
    return False
