"""The clock at which a product's peak is stated, with which a counted share of busy cycles becomes FLOP/s."""

from functools import cache

from flopwatch.hardware.peaks import DeviceFacts, Unknown, derive_peak, find_accelerator, read_table

TENSOR_TYPES = ("fp16", "bf16", "tf32", "fp8", "fp6", "fp4", "int8", "int4", "fp16_fp16acc", "fp8_fp16acc")
"""Compute types of products on NVIDIA's tensor cores. Plain fp32 is none; fp64 runs there on some, at another clock."""


def peak_clock_mhz(facts: DeviceFacts) -> float | None:
    """The clock that the peaks of the tensor cores are stated at; None if it is unknown.

    It is the stated peak divided by multiprocessors and FLOP per clock, because it is not always the highest clock: an
    H100's peak is that at 1,830 MHz, and its driver reports 1,980 MHz.

    >>> peak_clock_mhz(DeviceFacts("NVIDIA H100 80GB HBM3", "cuda", 132, clock_mhz=1980.0))
    1829.9
    >>> peak_clock_mhz(DeviceFacts("NVIDIA RTX A1000", "cuda", 18, compute_capability=(8, 6), clock_mhz=1462.5))
    1462.5
    >>> peak_clock_mhz(DeviceFacts("AMD Instinct MI300X", "cuda", 304)) is None
    True
    """
    record = find_accelerator(facts)
    if isinstance(record, Unknown):  # a peak that is derived is derived from this clock
        return facts.clock_mhz if derive_peak(facts, "bf16") is not None else None
    rate, tflops = _tensor_rates().get(record.id), record.peak_tflops.get("bf16") or record.peak_tflops.get("fp16")
    if rate is None or tflops is None or not record.sm_count:
        return None
    return round(tflops * 1e6 / (record.sm_count * rate), 1)


@cache
def _tensor_rates() -> dict[str, int]:
    """FLOP per clock and multiprocessor in fp16 by product: dense, with 32-bit accumulation."""
    return {product: int(rate) for rate, products in read_table("tensor_rates.json").items() for product in products}
