"""The peak rate of a device: from the product table, derived from its architecture, or measured.

Torch is loaded only when a device of this machine is read or measured.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from flopwatch.hardware.peaks import DeviceFacts
from flopwatch.hardware.resolve import explain_unknown, list_peaks, peak_flops, product_notes

if TYPE_CHECKING:
    from flopwatch.hardware.device import matmul_dtype, read_device
    from flopwatch.hardware.measure import measure_peak

__all__ = [
    "DeviceFacts",
    "explain_unknown",
    "list_peaks",
    "matmul_dtype",
    "measure_peak",
    "peak_flops",
    "product_notes",
    "read_device",
]

_NEEDS_TORCH = {
    "matmul_dtype": "flopwatch.hardware.device",
    "measure_peak": "flopwatch.hardware.measure",
    "read_device": "flopwatch.hardware.device",
}


def __getattr__(name: str) -> Any:
    if name not in _NEEDS_TORCH:
        raise AttributeError(f"module 'flopwatch.hardware' has no attribute {name!r}")
    return getattr(import_module(_NEEDS_TORCH[name]), name)
