"""Reads what torch reports about a device of this machine, and in which type its matmuls are computed now."""

import math
from contextlib import suppress
from typing import Any

import torch

from flopwatch.errors import InputError
from flopwatch.hardware.cpu import read_cpu
from flopwatch.hardware.peaks import DeviceFacts, canonical_dtype
from flopwatch.text import first_line

_GIB = 2**30
_EUS_PER_XE_CORE = 8


def read_device(device: torch.device | str | None = None, torch_module: Any = torch) -> DeviceFacts:
    """Read what torch reports about a device, such as its name and memory.

    >>> read_device("cpu").kind
    'cpu'

    Args:
        device: A device or its name, such as `cuda:1`; None is the current accelerator, or the CPU if there is none.
        torch_module: The `torch` module to use; tests pass a fake one.

    Raises:
        InputError: This machine has no such device.
    """
    wanted = find_device(device, torch_module)
    if wanted.type == "cpu":
        cpu = read_cpu()
        return DeviceFacts(cpu.name, "cpu", None if cpu.core_count is None else math.ceil(cpu.core_count))
    try:
        return _read(wanted, torch_module)
    except (AssertionError, AttributeError, RuntimeError, ValueError) as error:
        raise InputError(
            f"device {str(wanted)!r} cannot be used on this machine: {first_line(error)}; "
            f"pass a device that this machine has, such as 'cpu', or look a product up by its name"
        ) from error


def find_device(device: torch.device | str | None = None, torch_module: Any = torch) -> torch.device:
    """The `torch.device` of a name; for None, the current accelerator, or the CPU if there is none.

    >>> find_device("cuda:1")
    device(type='cuda', index=1)
    """
    if device is None:
        # Without the check, a CUDA build of torch returns CUDA, or raises an error, on a machine that has no GPU. The
        # argument `check_available` of `current_accelerator` does the same, but torch 2.6 does not have it.
        accelerator = torch_module.accelerator
        return (accelerator.current_accelerator() if accelerator.is_available() else None) or torch.device("cpu")
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InputError(
            f"{device!r} is not a device: {first_line(error)}; pass a name such as 'cuda:0' or 'cpu'"
        ) from error


def _read(device: torch.device, torch_module: Any) -> DeviceFacts:
    if device.type == "mps":
        if not torch_module.backends.mps.is_available():
            raise RuntimeError("torch reports no Metal device")
        return DeviceFacts(torch_module.backends.mps.get_name(), "mps", torch_module.backends.mps.get_core_count())
    if device.type not in ("cuda", "xpu"):  # the function that torch's plug-ins share, such as Ascend's torch_npu
        return DeviceFacts(getattr(torch_module, device.type).get_device_name(device), device.type)
    properties = getattr(torch_module, device.type).get_device_properties(device)
    memory_gib = properties.total_memory / _GIB
    if device.type == "xpu":
        return DeviceFacts(properties.name, "xpu", properties.gpu_eu_count // _EUS_PER_XE_CORE, memory_gib)
    is_rocm = torch_module.version.hip is not None
    return DeviceFacts(
        name=properties.name,
        kind="cuda",
        unit_count=properties.multi_processor_count,
        memory_gib=memory_gib,
        # CUDA builds of torch have the attribute gcnArchName too, but its value is the product's name.
        gcn_arch=properties.gcnArchName if is_rocm else None,
        compute_capability=None if is_rocm else (properties.major, properties.minor),
        clock_mhz=properties.clock_rate / 1e3,  # clock_rate is in kHz
    )


_FIRST_WITH_TF32 = (8, 0)


def matmul_dtype(
    device_type: str,
    parameter_dtype: torch.dtype | None = None,
    compute_capability: tuple[int, int] | None = None,
) -> str | None:
    """The type in which a matmul would be computed now: autocast's type, TF32 if it is allowed, or the weights' type.

    >>> with torch.autocast("cpu", dtype=torch.bfloat16):
    ...     matmul_dtype("cpu", torch.float32)
    'bf16'

    Args:
        device_type: torch's device type, such as `cuda`.
        parameter_dtype: Type of the weights; None is torch's default type.
        compute_capability: Compute capability of an NVIDIA device, if known; devices before 8.0 have no TF32.

    Returns:
        `bf16`, `fp16`, `tf32`, `fp32`, ..., or None if the weights are stored as integers and autocast is off, because
        the model converts quantised weights to a type that torch does not report.
    """
    dtype = parameter_dtype or torch.get_default_dtype()
    with suppress(RuntimeError):  # torch has no plug-in for this device type
        dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else dtype
    if not dtype.is_floating_point:
        return None
    has_tf32 = device_type == "cuda" and (compute_capability is None or compute_capability >= _FIRST_WITH_TF32)
    return "tf32" if dtype is torch.float32 and has_tf32 and _tf32_is_allowed() else canonical_dtype(dtype)


def _tf32_is_allowed() -> bool:
    # `fp32_precision` also reflects the older switches, `allow_tf32` and `set_float32_matmul_precision`. Reading those
    # raises an error after a user has set `fp32_precision`. Torch releases before 2.9 have only the older switches.
    precision = getattr(torch.backends.cuda.matmul, "fp32_precision", None)
    return torch.get_float32_matmul_precision() != "highest" if precision is None else precision == "tf32"
