"""Counters of NVIDIA GPUs through NVML: activity of Hopper and newer (GPM); clock, power and energy of all.

Never run on a GPU; the tests drive nvidia-ml-py with a stand-in for the driver's library.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from flopwatch.clock import Clock, monotonic_seconds
from flopwatch.guard import caught
from flopwatch.hardware.counters.nvml_device import NvmlDevice, explain, find_device, open_nvml
from flopwatch.hardware.counters.protocol import CountersUnavailableError, DeviceIdentity
from flopwatch.records.counters import CounterReading

_SHORTEST_GPM_SECONDS = 0.1
"""NVIDIA asks for at least this time between two GPM samples."""
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


def open_nvml_counters(device: DeviceIdentity, clock: Clock = monotonic_seconds) -> "NvmlCounters":
    """Open NVML for a device, with the activity of the GPU if its driver shows that."""
    if device.kind != "cuda":
        raise CountersUnavailableError("flopwatch reads the hardware counters of NVIDIA GPUs only")
    nvml = open_nvml()
    try:
        found = find_device(nvml, device)
        try:
            gpm: Gpm | None = Gpm(nvml, found, clock)
        except (nvml.NVMLError, CountersUnavailableError) as error:
            caught("activity of the GPU", error)
            gpm = None
        return NvmlCounters(nvml, found, gpm, clock)
    except nvml.NVMLError as error:
        nvml.nvmlShutdown()
        raise CountersUnavailableError(explain(nvml, error)) from error
    except BaseException:
        nvml.nvmlShutdown()
        raise


class NvmlCounters:
    """Reads one device. What the driver, the GPU or a permission does not provide is asked once, and then left out."""

    def __init__(self, nvml: Any, found: NvmlDevice, gpm: Gpm | None, clock: Clock) -> None:
        self.name = "nvml" if gpm is None else "nvml-gpm"
        self._nvml, self._gpm, self._clock = nvml, gpm, clock
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
        self._reads = self._what_to_read(found)

    def sample(self) -> CounterReading:
        now = self._clock()
        values: _Values = {}
        for read in tuple(self._reads):
            try:
                values.update(read(now))
            except self._nvml.NVMLError as error:
                if error.value in self._fatal:
                    raise CountersUnavailableError(explain(self._nvml, error)) from error
                if error.value in self._never:
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
        reads: list[Callable[[float], _Values]] = [] if self._gpm is None else [self._gpm.read]
        reads.append(lambda _: {"sm_clock_mhz": float(nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM))})
        if found.gpu_instance is None:  # the driver knows power and energy only of the GPU with all its instances
            reads += [
                lambda _: {"power_watts": nvml.nvmlDeviceGetPowerUsage(gpu) / 1e3},
                lambda _: {"energy_joules": nvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1e3},
            ]
        return reads
