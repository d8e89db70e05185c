"""Chooses the peak of a device: the user's figure, the table's, or a derived one. Loads torch only to read a device."""

import math
import os
from typing import TYPE_CHECKING

from flopwatch.errors import InputError
from flopwatch.hardware.peaks import (
    DTYPES,
    DeviceFacts,
    Unknown,
    advice_to_measure,
    canonical_dtype,
    derive_peak,
    fastest_measured,
    find_accelerator,
    peak_of_record,
    similar_products,
)
from flopwatch.records.flops import Peak

if TYPE_CHECKING:
    import torch

ENVIRONMENT_VARIABLE = "FLOPWATCH_PEAK_TFLOPS"
_MOST_TERAFLOPS = 1e6


def peak_flops(
    device: "torch.device | DeviceFacts | str | None" = None,
    dtype: "torch.dtype | str | None" = None,
    *,
    name: str | None = None,
    override_flops_per_s: float | None = None,
) -> Peak | None:
    """The peak FLOP/s of a device for a compute type, or None if it is unknown.

    The first of these sources that has a figure is used: `override_flops_per_s`; the environment variable
    FLOPWATCH_PEAK_TFLOPS; the product table, scaled to the visible part of the device on MIG slices and AMD partitions;
    the architecture, with `kind="derived"` and low confidence; what `flopwatch peak --measure` has measured on such a
    device, with `kind="measured"`. No peak is guessed: if there is no source, the result is None, and
    `flopwatch.hardware.explain_unknown` says why and what to do.

    >>> peak_flops(name="NVIDIA A100-SXM4-80GB", dtype="bf16").flops_per_s
    312000000000000.0
    >>> print(peak_flops(name="NVIDIA RTX A1000"))
    None

    Args:
        device: `cuda:1`, a `torch.device` or `DeviceFacts`; None is the accelerator, or the CPU if there is none.
        dtype: Compute type, as a `torch.dtype` or a name such as `bf16`. None is the type in which a matmul would run
            now (autocast, TF32); with `name`, the first of bf16, fp16 and fp32 that the product has.
        name: A product that this machine need not have. Torch is not loaded, and the environment variable is ignored.
        override_flops_per_s: The peak in FLOP/s, which replaces all other sources.

    Raises:
        InputError: This machine has no such device, the dtype is unknown, or a figure is not a positive number.
    """
    answer = _resolve(_facts(device, name), dtype, override_flops_per_s)
    return answer if isinstance(answer, Peak) else None


def list_peaks(device: "torch.device | DeviceFacts | str | None" = None, *, name: str | None = None) -> list[Peak]:
    """The peaks of a device or product for every compute type; empty if none is known.

    >>> [peak.dtype for peak in list_peaks(name="Tesla T4")]
    ['fp64', 'fp32', 'fp16', 'int8', 'int4']
    """
    facts = _facts(device, name)
    dtypes: tuple[str | None, ...] = (None,) if _environment_flops_per_s(facts) is not None else DTYPES
    answers = [_resolve(facts, dtype) for dtype in dtypes]
    return [answer for answer in answers if isinstance(answer, Peak)]


def product_notes(device: "torch.device | DeviceFacts | str | None" = None, *, name: str | None = None) -> str:
    """The remarks on a product in the product table; empty if there are none.

    >>> product_notes(name="Tesla V100-SXM2-16GB")
    'No BF16 and no TF32 tensor path: bf16 matmul runs at about fp32 speed.'
    """
    record = find_accelerator(_facts(device, name))
    return "" if isinstance(record, Unknown) else record.notes


def explain_unknown(
    device: "torch.device | DeviceFacts | str | None" = None,
    dtype: "torch.dtype | str | None" = None,
    *,
    name: str | None = None,
) -> str:
    """Why `peak_flops` returns None for these arguments, and what to do about it.

    >>> print(explain_unknown(name="NVIDIA A100"))
    The peak is not known: no product in the table reports the name 'NVIDIA A100'.
    Similar products: A100 SXM4 80GB, A100 SXM4 40GB, A100 PCIe 80GB, A100 PCIe 40GB.
    Give the name as `torch.cuda.get_device_name()` prints it, or the figure itself: override_flops_per_s=...
    """
    facts = _facts(device, name)
    answer = _resolve(facts, dtype)
    if isinstance(answer, Peak):
        return f"The peak is known: {answer.flops_per_s:.4g} FLOP/s ({answer.source})."
    lines = [f"The peak is not known: {answer.reason}."]
    if name is None:
        kind = canonical_dtype(dtype) if dtype is not None else _dtype_now(facts)
        command = advice_to_measure([kind] if kind else [])
        measure = f", or measure what this device reaches: `{command}`" if command else ""
        lines.append(
            f"Set {ENVIRONMENT_VARIABLE} to the dense figure of the datasheet in TFLOP/s, pass "
            f"override_flops_per_s=...{measure}"
        )
        return "\n".join(lines)
    if isinstance(find_accelerator(facts), Unknown):
        similar = similar_products(name)
        lines += [f"Similar products: {', '.join(similar)}."] if similar else []
        lines.append(
            "Give the name as `torch.cuda.get_device_name()` prints it, or the figure itself: override_flops_per_s=..."
        )
    return "\n".join(lines)


def _resolve(
    facts: DeviceFacts, dtype: "torch.dtype | str | None", override_flops_per_s: float | None = None
) -> Peak | Unknown:
    compute_dtype = _dtype_now(facts) if dtype is None else canonical_dtype(dtype)
    answer = _known(facts, compute_dtype, override_flops_per_s)
    if isinstance(answer, Unknown) and facts.kind and compute_dtype is not None:
        return fastest_measured(facts.name, facts.unit_count, compute_dtype) or answer
    return answer


def _known(facts: DeviceFacts, compute_dtype: str | None, override_flops_per_s: float | None) -> Peak | Unknown:
    figure: float | None
    if override_flops_per_s is not None:
        what = f"override_flops_per_s={override_flops_per_s!r}"
        figure, source = _positive(override_flops_per_s, what, "in FLOP/s, such as 989.4e12"), "given by you"
    else:
        figure, source = _environment_flops_per_s(facts), f"the variable {ENVIRONMENT_VARIABLE}"
    if figure is not None:
        return Peak(figure, facts.name, compute_dtype or "any", source, kind="override", confidence="high")
    if facts.kind == "cpu":
        from flopwatch.hardware.cpu import peak_of_cpu, read_cpu

        return peak_of_cpu(read_cpu(), compute_dtype or "fp32")
    record = find_accelerator(facts)
    if isinstance(record, Unknown):
        return (derive_peak(facts, compute_dtype) if compute_dtype else None) or record
    return peak_of_record(record, facts, compute_dtype)


def _facts(device: "torch.device | DeviceFacts | str | None", name: str | None) -> DeviceFacts:
    if name is not None:
        if device is not None:
            raise InputError(f"device={device!r} and name={name!r} cannot be combined; pass one of them")
        return DeviceFacts(name)
    if isinstance(device, DeviceFacts):
        return device
    from flopwatch.hardware.device import read_device  # loads torch

    return read_device(device)


def _dtype_now(facts: DeviceFacts) -> str | None:
    if not facts.kind:  # a product that is looked up by name has no current compute type
        return None
    from flopwatch.hardware.device import matmul_dtype  # loads torch

    return matmul_dtype(facts.kind, compute_capability=facts.compute_capability)


def _environment_flops_per_s(facts: DeviceFacts) -> float | None:
    """The peak in FLOPWATCH_PEAK_TFLOPS; None if it is not set, or if a product is looked up by name only."""
    text = os.environ.get(ENVIRONMENT_VARIABLE, "").strip()
    if not text or not facts.kind:
        return None
    what = f"the environment variable {ENVIRONMENT_VARIABLE}={text!r}"
    figure = _positive(text, what, "in teraFLOP/s, such as 989.4")
    if figure > _MOST_TERAFLOPS:
        raise InputError(f"{what} is more than any device reaches; give teraFLOP/s, such as 989.4, not FLOP/s")
    return figure * 1e12


def _positive(value: float | str, what: str, example: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not (math.isfinite(number) and number > 0):
        raise InputError(f"{what} is not a positive number; give the device's dense peak {example}")
    return number
