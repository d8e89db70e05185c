"""What torch reports about a device of this machine, and the type that its matmuls are computed in now."""

import math
from typing import Any

import torch

from flopwatch.errors import InputError
from flopwatch.hardware.cpu import read_cpu
from flopwatch.hardware.peaks import DeviceFacts, canonical_dtype
from flopwatch.records.reading import first_line

_GIB = 2**30
_EUS_PER_XE_CORE = 8


def read_device(device: torch.device | str | None = None, torch_module: Any = torch) -> DeviceFacts:
    """The facts that torch reports about a device.

    >>> read_device("cpu").kind
    'cpu'

    Args:
        device: A device or its name, such as `cuda:1`; None is the current accelerator, or the CPU without one.
        torch_module: The torch to read from; tests pass `flopwatch.testing.fake_torch(...)`.

    Raises:
        InputError: There is no such device here.
    """
    wanted = find_device(device, torch_module)
    if wanted.type == "cpu":
        cpu = read_cpu()
        return DeviceFacts(cpu.name, "cpu", None if cpu.core_count is None else math.ceil(cpu.core_count))
    read = {"cuda": _read_cuda, "xpu": _read_xpu, "mps": _read_mps}.get(wanted.type, _read_other)
    try:
        return read(wanted, torch_module)
    except (AssertionError, AttributeError, RuntimeError, ValueError) as error:
        raise InputError(
            f"device {str(wanted)!r} cannot be used here: {first_line(error)}; "
            f"pass a device that exists, such as 'cpu', or look a product up by name"
        ) from error


def find_device(device: torch.device | str | None = None, torch_module: Any = torch) -> torch.device:
    """A device by name; None is the current accelerator, or the CPU without one.

    >>> find_device("cuda:1")
    device(type='cuda', index=1)
    """
    if device is None:
        # Without the check, a CUDA build of torch names CUDA on a machine that has no GPU.
        current: torch.device | None = torch_module.accelerator.current_accelerator(check_available=True)
        return current or torch.device("cpu")
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InputError(f"{device!r} is not a device: {first_line(error)}; use one like 'cuda:0' or 'cpu'") from error


def _read_cuda(device: torch.device, torch_module: Any) -> DeviceFacts:
    properties = torch_module.cuda.get_device_properties(device)
    is_rocm = torch_module.version.hip is not None
    return DeviceFacts(
        name=properties.name,
        kind="cuda",
        unit_count=properties.multi_processor_count,
        memory_gib=properties.total_memory / _GIB,
        # CUDA builds of torch have gcnArchName too, but it holds the product's name.
        gcn_arch=properties.gcnArchName if is_rocm else None,
        compute_capability=None if is_rocm else (properties.major, properties.minor),
        clock_mhz=properties.clock_rate / 1e3,  # in kHz
    )


def _read_xpu(device: torch.device, torch_module: Any) -> DeviceFacts:
    properties = torch_module.xpu.get_device_properties(device)
    return DeviceFacts(
        name=properties.name,
        kind="xpu",
        unit_count=properties.gpu_eu_count // _EUS_PER_XE_CORE,
        memory_gib=properties.total_memory / _GIB,
    )


def _read_mps(device: torch.device, torch_module: Any) -> DeviceFacts:
    if not torch_module.backends.mps.is_available():
        raise RuntimeError("this torch has no Metal device")
    return DeviceFacts(torch_module.backends.mps.get_name(), "mps", torch_module.backends.mps.get_core_count())


def _read_other(device: torch.device, torch_module: Any) -> DeviceFacts:
    """Ascend (`torch.npu`, present once torch_npu is imported) and others that follow torch's naming."""
    return DeviceFacts(getattr(torch_module, device.type).get_device_name(device), device.type)


_FIRST_WITH_TF32 = (8, 0)


def matmul_dtype(
    device_type: str,
    parameter_dtype: torch.dtype | None = None,
    compute_capability: tuple[int, int] | None = None,
) -> str | None:
    """The compute type of a matmul in the current context: that of autocast, else TF32, else the parameters' type.

    >>> with torch.autocast("cpu", dtype=torch.bfloat16):
    ...     matmul_dtype("cpu", torch.float32)
    'bf16'

    Args:
        device_type: torch's device type, such as `cuda`.
        parameter_dtype: Type of the weights; None takes torch's default type.
        compute_capability: That of an NVIDIA device, if known: devices before 8.0 have no TF32.

    Returns:
        `bf16`, `fp16`, `tf32`, `fp32`, ..., or None if the weights are stored as integers and autocast is off: the
        model converts such weights before it multiplies them, to a type that is not known here.
    """
    dtype = _autocast_dtype(device_type) or parameter_dtype or torch.get_default_dtype()
    if not dtype.is_floating_point:
        return None
    if dtype is torch.float32 and device_type == "cuda" and _tf32_is_allowed(compute_capability):
        return "tf32"
    return canonical_dtype(dtype)


def _autocast_dtype(device_type: str) -> torch.dtype | None:
    try:
        is_on = torch.is_autocast_enabled(device_type)
    except RuntimeError:  # a device type this torch has no plug-in for
        return None
    return torch.get_autocast_dtype(device_type) if is_on else None


def _tf32_is_allowed(compute_capability: tuple[int, int] | None) -> bool:
    if compute_capability is not None and compute_capability < _FIRST_WITH_TF32:
        return False
    # `fp32_precision` reflects all three switches (allow_tf32, set_float32_matmul_precision and itself); the getters of
    # the older two raise once it has been set.
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")
