"""The type matmuls are computed in, which is often not the type of the parameters."""

import torch

from flopwatch.hardware.dtypes import canonical_dtype

_FIRST_WITH_TF32 = (8, 0)


def matmul_dtype(
    device_type: str,
    parameter_dtype: torch.dtype | None = None,
    compute_capability: tuple[int, int] | None = None,
) -> str | None:
    """The compute type of a matmul issued here and now: autocast first, the parameters' type last.

    >>> with torch.autocast("cpu", dtype=torch.bfloat16):
    ...     matmul_dtype("cpu", torch.float32)
    'bf16'

    Args:
        device_type: torch's device type, such as `cuda`.
        parameter_dtype: Type of the weights; None takes torch's default type.
        compute_capability: Of an NVIDIA device, if known: before 8.0 there is no TF32 to allow.

    Returns:
        `bf16`, `fp16`, `tf32`, `fp32`, ..., or None if the weights are stored as integers and autocast is off: such
        weights are converted before they are multiplied, into a type only the model knows.
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
    # Follows all three switches (allow_tf32, set_float32_matmul_precision, fp32_precision); the getters of the older
    # two raise once the newest has been set.
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")
