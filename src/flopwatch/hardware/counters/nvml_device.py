"""Opens NVML through nvidia-ml-py, and finds torch's device among NVML's."""

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from flopwatch.errors import MissingDependencyError
from flopwatch.hardware.counters.protocol import CountersUnavailableError, DeviceIdentity
from flopwatch.optional import require


@dataclass(frozen=True, slots=True)
class NvmlDevice:
    """A device of NVML: a GPU, or a MIG instance of one.

    Attributes:
        handle: Handle of the GPU or of the instance.
        gpu: Handle of the GPU, also for an instance.
        gpu_instance: Id of the GPU instance; None for a whole GPU.
    """

    handle: Any
    gpu: Any
    gpu_instance: int | None = None


def open_nvml() -> Any:
    """Import and initialise NVML; whoever opens it calls `nvmlShutdown`."""
    try:
        nvml: Any = require("pynvml", "nvml")
    except MissingDependencyError as error:
        raise CountersUnavailableError(str(error)) from error
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise CountersUnavailableError(explain(nvml, error)) from error
    return nvml


def explain(nvml: Any, error: Any) -> str:
    """What an error of NVML means, and what to do about it."""
    known = {
        nvml.NVML_ERROR_LIBRARY_NOT_FOUND: "libnvidia-ml.so.1 is not found: install the NVIDIA driver, or start the "
        "container with GPUs (docker run --gpus all)",
        nvml.NVML_ERROR_DRIVER_NOT_LOADED: "the NVIDIA driver is not loaded; run nvidia-smi to see why",
        nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "the NVIDIA driver was updated while it was loaded; restart the "
        "machine or load it again",
        nvml.NVML_ERROR_NO_PERMISSION: "the NVIDIA driver permits these counters to administrators only; load it with "
        "NVreg_RestrictProfilingToAdminUsers=0, or run as root",
        nvml.NVML_ERROR_GPU_IS_LOST: "the GPU is lost (it fell off the bus); run nvidia-smi and dmesg to see why",
        nvml.NVML_ERROR_RESET_REQUIRED: "the GPU needs a reset: nvidia-smi --gpu-reset",
    }
    return known.get(error.value, f"NVML says: {error}")


def find_device(nvml: Any, device: DeviceIdentity) -> NvmlDevice:
    """Torch's device in NVML, by UUID or PCI address; never by its index, because CUDA may number otherwise."""
    handle = _by_uuid(nvml, device)
    if handle is None and device.pci_bus_id is not None:
        with suppress(nvml.NVMLError):
            handle = nvml.nvmlDeviceGetHandleByPciBusId(device.pci_bus_id)
    if handle is None:
        raise CountersUnavailableError(
            f"NVML has no device with the UUID {device.uuid or 'unknown'} or the PCI address "
            f"{device.pci_bus_id or 'unknown'}, which torch reports for {device.name}"
        )
    return _instance(nvml, handle)


def _by_uuid(nvml: Any, device: DeviceIdentity) -> Any:
    """The handle of the first UUID that NVML knows.

    A MIG instance in CUDA_VISIBLE_DEVICES comes first, because torch may report the UUID of its GPU. A GPU there comes
    last, because the variable may have been set after torch had begun to use another one.
    """
    visible, names = device.visible_as or "", []
    if device.uuid is not None:
        bare = device.uuid.removeprefix("GPU-").removeprefix("MIG-")
        names = [f"GPU-{bare}", f"MIG-{bare}"]
    if visible.startswith("MIG-"):
        names.insert(0, visible)
    elif visible.startswith("GPU-"):
        names.append(visible)
    for name in names:
        with suppress(nvml.NVMLError):
            return nvml.nvmlDeviceGetHandleByUUID(name)
    return None


def _instance(nvml: Any, handle: Any) -> NvmlDevice:
    """The GPU or the MIG instance of a handle; a GPU that is divided stands for its instance if it has only one."""
    with suppress(nvml.NVMLError):  # drivers and GPUs before MIG do not know these functions
        if bool(getattr(nvml.nvmlDeviceIsMigDeviceHandle(handle), "value", False)):
            gpu = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
            return NvmlDevice(handle, gpu, nvml.nvmlDeviceGetGpuInstanceId(handle))
    if not _is_divided(nvml, handle):
        return NvmlDevice(handle, handle)
    instances = _instances(nvml, handle)
    if len(instances) != 1:
        raise CountersUnavailableError(
            f"the GPU is divided into {len(instances)} MIG instances, and torch does not tell which one it uses; set "
            "CUDA_VISIBLE_DEVICES to the instance's UUID (nvidia-smi -L)"
        )
    return NvmlDevice(instances[0], handle, nvml.nvmlDeviceGetGpuInstanceId(instances[0]))


def _is_divided(nvml: Any, handle: Any) -> bool:
    with suppress(nvml.NVMLError):
        return bool(nvml.nvmlDeviceGetMigMode(handle)[0] == nvml.NVML_DEVICE_MIG_ENABLE)
    return False


def _instances(nvml: Any, handle: Any) -> list[Any]:
    found = []
    for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        with suppress(nvml.NVMLError):  # an index without an instance
            found.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index))
    return found
