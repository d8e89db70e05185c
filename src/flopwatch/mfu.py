"""FLOPs over time over peak. The functions the user's documents name live here, with the right numbers in them."""

import math
import warnings
import weakref
from collections.abc import Mapping
from typing import Any, get_args

from torch import nn

from flopwatch.errors import InputError
from flopwatch.flops.count import count_flops
from flopwatch.flops.fit import fit_flops_law
from flopwatch.flops.law import FlopLaw
from flopwatch.hardware import explain_unknown, matmul_dtype, peak_flops
from flopwatch.models.load import dummy_batch
from flopwatch.monitor.config import ModeName
from flopwatch.monitor.pricing.call_costs import fingerprint


def calculate_mfu(flops: float, seconds: float, peak_flops_per_s: float) -> float:
    """The share of a device's peak that `flops` in `seconds` amount to: MFU for model FLOPs, HFU for hardware FLOPs.

    Never clamped: above 1 the peak or the count is wrong, and hiding that helps nobody.

    Args:
        flops: FLOPs of one step (or any window).
        seconds: How long it took.
        peak_flops_per_s: Sum of the peaks of all devices that took part.

    Example:
        >>> calculate_mfu(flops=500e12, seconds=1.0, peak_flops_per_s=1000e12)
        0.5
    """
    for name, value in (("flops", flops), ("seconds", seconds), ("peak_flops_per_s", peak_flops_per_s)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise InputError(f"{name} must be a positive finite number, got {value!r}")
    return flops / seconds / peak_flops_per_s


def calculate_mfu_with_profiler(
    model: nn.Module,
    batch_size: int,
    seq_length: int,
    step_time: float,
    *,
    peak_flops_per_s: float | None = None,
) -> float | None:
    """MFU of a training step that took `step_time` seconds, counted on a batch made up for the model.

    Forward and backward are counted op by op. The model stays as it is: mode, gradients, random states.

    Args:
        model: A model that takes `input_ids` (or `pixel_values`), on the device it trains on.
        batch_size: Samples per step on this device.
        seq_length: Positions of each sample.
        step_time: Seconds of the whole step: forward, backward, optimizer.
        peak_flops_per_s: The device's peak; None looks it up.

    Returns:
        A fraction, or None with a warning when nobody knows the device's peak.
    """
    flops = count_flops(model, dummy_batch(model, batch_size, seq_length)).model_flops
    peak = peak_of(model) if peak_flops_per_s is None else peak_flops_per_s
    return None if peak is None else calculate_mfu(flops, step_time, peak)


def profile_model_flops(model: nn.Module, batch_example: Mapping[str, Any]) -> float:
    """FLOPs of one training step on this batch, estimated from the modules' shapes; nothing is run.

    Padding, images (`image_grid_thw`), frozen weights and idle experts are taken into account. `count_flops` gives the
    exact number; docs/accuracy.md says how far the two are apart.
    """
    return float(count_flops(model, dict(batch_example), method="estimate").model_flops)


def peak_of(model: nn.Module) -> float | None:
    parameter = next((p for p in model.parameters() if p.is_floating_point()), None)
    if parameter is None or parameter.device.type == "meta":
        raise InputError("the model is on no device whose peak could be looked up; pass peak_flops_per_s")
    dtype = matmul_dtype(parameter.device.type, parameter.dtype)
    peak = peak_flops(parameter.device, dtype)
    if peak is None:
        warnings.warn(explain_unknown(parameter.device, dtype), stacklevel=3)
        return None
    return peak.flops_per_s


# `calculate_precise_mfu`: the MFU of one step, with the documents' name, arguments and modes.


_laws: "weakref.WeakKeyDictionary[nn.Module, tuple[int, FlopLaw]]" = weakref.WeakKeyDictionary()


def calculate_precise_mfu(
    model: nn.Module,
    batch_size: int,
    seq_length: int,
    step_time: float,
    measurement_mode: ModeName = "smart",
    actual_flops: float | None = None,
    *,
    peak_flops_per_s: float | None = None,
) -> float | None:
    """MFU of a training step that took `step_time` seconds.

    Args:
        model: A model that takes `input_ids` (or `pixel_values`), on the device it trains on.
        batch_size: Samples per step on this device.
        seq_length: Positions of each sample.
        step_time: Seconds of the whole step: forward, backward, optimizer.
        measurement_mode: `smart` fits the FLOP law once and evaluates it afterwards; `profiler` counts op by op every
            time; `estimate` reads the modules' shapes; `hybrid` reads no hardware counters yet and counts instead.
        actual_flops: Model FLOPs of the step, where you have them.
        peak_flops_per_s: The device's peak; None looks it up.

    Returns:
        A fraction, or None with a warning when nobody knows the device's peak.
    """
    if measurement_mode not in get_args(ModeName):
        choices = ", ".join(map(repr, get_args(ModeName)))
        raise InputError(f"measurement_mode is one of {choices}, got {measurement_mode!r}")
    flops = actual_flops if actual_flops is not None else _flops(model, batch_size, seq_length, measurement_mode)
    peak = peak_of(model) if peak_flops_per_s is None else peak_flops_per_s
    return None if peak is None else calculate_mfu(flops, step_time, peak)


def _flops(model: nn.Module, batch_size: int, seq_length: int, mode: str) -> int:
    batch = dummy_batch(model, batch_size, seq_length)
    if mode == "estimate":
        return count_flops(model, batch, method="estimate").model_flops
    if mode == "smart":
        law = _law(model, batch)
        has_length = law.seq_lens is not None
        if law.coefficients and (not has_length or law.covers(seq_length)):
            return law.model_flops(batch_size, seq_length if has_length else None)
    if mode == "hybrid":
        warnings.warn(
            "mode hybrid: this version reads no hardware counters; FLOPs are counted as in mode profiler", stacklevel=4
        )
    return count_flops(model, batch).model_flops


def _law(model: nn.Module, batch: object) -> FlopLaw:
    """Kept as long as the model is alive and does not change."""
    known = _laws.get(model)
    now = fingerprint(model)
    if known is None or known[0] != now:
        known = _laws[model] = (now, fit_flops_law(model, batch))
    return known[1]
