"""`calculate_precise_mfu`: the MFU of one step, with the documents' name, arguments and modes."""

import warnings
import weakref
from typing import get_args

from torch import nn

from flopwatch.errors import InputError
from flopwatch.flops.count import count_flops
from flopwatch.flops.fit import fit_flops_law
from flopwatch.flops.law import FlopLaw
from flopwatch.mfu import calculate_mfu, peak_of
from flopwatch.models.dummy import dummy_batch
from flopwatch.monitor.config import ModeName
from flopwatch.monitor.fingerprint import fingerprint

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
