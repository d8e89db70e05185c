"""MFU of one step, by functions with the names and arguments that docs/requirements.md prescribes."""

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

__all__ = ["calculate_mfu", "calculate_mfu_with_profiler", "calculate_precise_mfu", "profile_model_flops"]


def calculate_mfu(flops: float, seconds: float, peak_flops_per_s: float) -> float:
    """FLOPs per second as a fraction of the peak: MFU if `flops` are model FLOPs, HFU if they are hardware FLOPs.

    The result is never clamped to 1, because a value above 1 shows that the peak or the count is wrong.

    Args:
        flops: FLOPs of one step, or of several.
        seconds: How long these steps took.
        peak_flops_per_s: Sum of the peaks of all devices that were used.

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
    """MFU of a training step that took `step_time` seconds; its FLOPs are counted op by op on a dummy batch.

    Arguments and result are those of `calculate_precise_mfu`. The model's mode, gradients and random states do not
    change.
    """
    return _mfu(model, _flops(model, batch_size, seq_length, "profiler"), step_time, peak_flops_per_s)


def calculate_precise_mfu(
    model: nn.Module,
    batch_size: int,
    seq_length: int,
    step_time: float,
    measurement_mode: str = "smart",
    actual_flops: float | None = None,
    *,
    peak_flops_per_s: float | None = None,
) -> float | None:
    """MFU of a training step that took `step_time` seconds, with FLOPs counted in one of the monitor's four modes.

    Args:
        model: A model that takes `input_ids` (or `pixel_values`), on the device it trains on.
        batch_size: Samples per step on this device.
        seq_length: Positions of each sample.
        step_time: Seconds of the whole step: forward, backward, optimizer.
        measurement_mode: `smart` fits a polynomial in the batch shape once and evaluates it in later calls; `profiler`
            counts op by op in every call; `hybrid` does the same, because hardware counters see a training that runs,
            and this function runs nothing (a `TrainingMonitor` in mode `hybrid` reads them); `estimate` computes FLOPs
            from the modules' shapes.
        actual_flops: Model FLOPs of the step, if you know them; nothing is counted then.
        peak_flops_per_s: The device's peak; None looks it up.

    Returns:
        A fraction, or None with a warning if the device's peak is unknown.
    """
    modes = get_args(ModeName)
    if measurement_mode not in modes:
        choices = ", ".join(map(repr, modes))
        raise InputError(f"measurement_mode must be one of {choices}, got {measurement_mode!r}")
    flops = actual_flops if actual_flops is not None else _flops(model, batch_size, seq_length, measurement_mode)
    return _mfu(model, flops, step_time, peak_flops_per_s)


def profile_model_flops(model: nn.Module, batch_example: Mapping[str, Any]) -> float:
    """FLOPs of one training step on this batch, estimated from the modules' shapes without running the model.

    Padding, images (`image_grid_thw`), frozen weights and idle experts are taken into account. `count_flops` gives the
    exact number; docs/accuracy.md shows the difference between the two.
    """
    return float(count_flops(model, dict(batch_example), method="estimate").model_flops)


def _mfu(model: nn.Module, flops: float, seconds: float, peak_flops_per_s: float | None) -> float | None:
    if peak_flops_per_s is not None:
        return calculate_mfu(flops, seconds, peak_flops_per_s)
    parameter = next((p for p in model.parameters() if p.is_floating_point()), None)
    if parameter is None or parameter.device.type == "meta":
        raise InputError("the model has no float parameters on a real device; pass peak_flops_per_s")
    dtype = matmul_dtype(parameter.device.type, parameter.dtype)
    peak = peak_flops(parameter.device, dtype)
    if peak is None:
        warnings.warn(explain_unknown(parameter.device, dtype), stacklevel=3)
        return None
    return calculate_mfu(flops, seconds, peak.flops_per_s)


_laws: weakref.WeakKeyDictionary[nn.Module, tuple[int, FlopLaw]] = weakref.WeakKeyDictionary()
"""For each model: a hash of its structure, and the FLOP polynomial that was fitted for this structure."""


def _flops(model: nn.Module, batch_size: int, seq_length: int, mode: str) -> int:
    batch = dummy_batch(model, batch_size, seq_length)
    if mode == "estimate":
        return count_flops(model, batch, method="estimate").model_flops
    if mode == "smart":
        known, now = _laws.get(model), _fingerprint(model)
        if known is None or known[0] != now:
            known = _laws[model] = (now, fit_flops_law(model, batch))
        law = known[1]
        has_length = law.seq_lens is not None
        if law.coefficients and (not has_length or law.covers(seq_length)):
            return law.model_flops(batch_size, seq_length if has_length else None)
    return count_flops(model, batch).model_flops


def _fingerprint(model: nn.Module) -> int:
    parameters = tuple((name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in model.named_parameters())
    plain = (bool, int, float, str)
    settings = [
        (path, name, value)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if type(value) in plain
    ]
    return hash((parameters, tuple(settings)))
