"""The peak FLOP/s of a device: from the product table, derived from its architecture, or measured.

Torch is loaded only to read or measure a device of this machine.
"""

from typing import TYPE_CHECKING

from flopwatch.hardware.peaks import DeviceFacts
from flopwatch.hardware.resolve import explain_unknown, list_peaks, peak_flops, product_notes
from flopwatch.optional import lazy_exports

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

__getattr__ = lazy_exports(
    "flopwatch.hardware",
    {
        "matmul_dtype": "flopwatch.hardware.device",
        "measure_peak": "flopwatch.hardware.measure",
        "read_device": "flopwatch.hardware.device",
    },
)
