"""What flopwatch keeps for code that exists: the functions of docs/requirements.md, and old names that still work.

Imported by `import flopwatch`, so it must not load torch: the functions import what they need when they are called.
"""

import math
import sys
import warnings
import weakref
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any, get_args

from flopwatch.errors import InputError

if TYPE_CHECKING:
    from torch import nn

    from flopwatch.flops.law import FlopLaw
    from flopwatch.monitor.config import ModeName

__all__ = ["calculate_mfu", "calculate_mfu_with_profiler", "calculate_precise_mfu", "profile_model_flops"]

# Functions that docs/requirements.md prescribes with these names and arguments.


def calculate_mfu(flops: float, seconds: float, peak_flops_per_s: float) -> float:
    """The share of a device's peak that `flops` in `seconds` amount to: MFU for model FLOPs, HFU for hardware FLOPs.

    The result is never clamped: a value above 1 shows that the peak or the count is wrong.

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
    model: "nn.Module",
    batch_size: int,
    seq_length: int,
    step_time: float,
    *,
    peak_flops_per_s: float | None = None,
) -> float | None:
    """MFU of a training step that took `step_time` seconds, counted on a dummy batch.

    Forward and backward are counted op by op. The model's mode, gradients and random states do not change.

    Args:
        model: A model that takes `input_ids` (or `pixel_values`), on the device it trains on.
        batch_size: Samples per step on this device.
        seq_length: Positions of each sample.
        step_time: Seconds of the whole step: forward, backward, optimizer.
        peak_flops_per_s: The device's peak; None looks it up.

    Returns:
        A fraction, or None with a warning if the device's peak is unknown.
    """
    from flopwatch.flops.count import count_flops
    from flopwatch.models.load import dummy_batch

    flops = count_flops(model, dummy_batch(model, batch_size, seq_length)).model_flops
    return _mfu(model, flops, step_time, peak_flops_per_s)


def calculate_precise_mfu(
    model: "nn.Module",
    batch_size: int,
    seq_length: int,
    step_time: float,
    measurement_mode: "ModeName" = "smart",
    actual_flops: float | None = None,
    *,
    peak_flops_per_s: float | None = None,
) -> float | None:
    """MFU of a training step that took `step_time` seconds, in one of the monitor's four modes.

    Args:
        model: A model that takes `input_ids` (or `pixel_values`), on the device it trains on.
        batch_size: Samples per step on this device.
        seq_length: Positions of each sample.
        step_time: Seconds of the whole step: forward, backward, optimizer.
        measurement_mode: `smart` fits the FLOP law once and evaluates it afterwards; `profiler` counts op by op every
            time; `estimate` reads the modules' shapes; `hybrid` reads no hardware counters yet and counts instead.
        actual_flops: Model FLOPs of the step, if you know them.
        peak_flops_per_s: The device's peak; None looks it up.

    Returns:
        A fraction, or None with a warning if the device's peak is unknown.
    """
    from flopwatch.monitor.config import ModeName

    if measurement_mode not in get_args(ModeName):
        choices = ", ".join(map(repr, get_args(ModeName)))
        raise InputError(f"measurement_mode is one of {choices}, got {measurement_mode!r}")
    flops = actual_flops if actual_flops is not None else _flops(model, batch_size, seq_length, measurement_mode)
    return _mfu(model, flops, step_time, peak_flops_per_s)


def profile_model_flops(model: "nn.Module", batch_example: Mapping[str, Any]) -> float:
    """FLOPs of one training step on this batch, estimated from the modules' shapes; nothing is run.

    Padding, images (`image_grid_thw`), frozen weights and idle experts are taken into account. `count_flops` gives the
    exact number; docs/accuracy.md shows the difference between the two.
    """
    from flopwatch.flops.count import count_flops

    return float(count_flops(model, dict(batch_example), method="estimate").model_flops)


def _mfu(model: "nn.Module", flops: float, seconds: float, peak_flops_per_s: float | None) -> float | None:
    peak = _peak_of(model) if peak_flops_per_s is None else peak_flops_per_s
    return None if peak is None else calculate_mfu(flops, seconds, peak)


def _peak_of(model: "nn.Module") -> float | None:
    from flopwatch.hardware import explain_unknown, matmul_dtype, peak_flops

    parameter = next((p for p in model.parameters() if p.is_floating_point()), None)
    if parameter is None or parameter.device.type == "meta":
        raise InputError("the model is on no device whose peak could be looked up; pass peak_flops_per_s")
    dtype = matmul_dtype(parameter.device.type, parameter.dtype)
    peak = peak_flops(parameter.device, dtype)
    if peak is None:
        warnings.warn(explain_unknown(parameter.device, dtype), stacklevel=4)
        return None
    return peak.flops_per_s


_laws: "weakref.WeakKeyDictionary[nn.Module, tuple[int, FlopLaw]]" = weakref.WeakKeyDictionary()
"""The law of each living model, with the fingerprint the model had when it was fitted."""


def _flops(model: "nn.Module", batch_size: int, seq_length: int, mode: str) -> int:
    from flopwatch.flops.count import count_flops
    from flopwatch.models.load import dummy_batch

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
            "mode hybrid: this version of flopwatch reads no hardware counters; FLOPs are counted as in mode profiler",
            stacklevel=4,
        )
    return count_flops(model, batch).model_flops


def _law(model: "nn.Module", batch: object) -> "FlopLaw":
    """The model's law, fitted again after the model has changed."""
    from flopwatch.flops.fit import fit_flops_law
    from flopwatch.monitor.pricing.call_costs import fingerprint

    known = _laws.get(model)
    now = fingerprint(model)
    if known is None or known[0] != now:
        known = _laws[model] = (now, fit_flops_law(model, batch))
    return known[1]


# Modules that were documented under another name.

MOVED_MODULES: Mapping[str, str] = {
    "flopwatch.metrics": "flopwatch.records.metrics",
    "flopwatch.mfu": "flopwatch.compat",
    "flopwatch.monitor.precise": "flopwatch.compat",
    "flopwatch.monitor.step_context": "flopwatch.monitor.training_monitor",
    "flopwatch.run_log": "flopwatch.runs",
    "flopwatch.run_records": "flopwatch.records.run",
    "flopwatch.trial_records": "flopwatch.records.trial",
}
"""Old name to the module that has its content now."""


class OldModules:
    """A finder that imports a moved module under its old name, with a warning.

    It is the last on `sys.meta_path`, so Python asks it only for modules that do not exist. Python keeps what it has
    imported in `sys.modules`, so each old name warns once.
    """

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        # The import system needs a loader's two methods, not the base class that its type asks for.
        loader: Any = _MovedModule(MOVED_MODULES[name]) if name in MOVED_MODULES else None
        return ModuleSpec(name, loader) if loader is not None else None


class _MovedModule:
    """Loads a module that forwards every name to its new home.

    The new module itself cannot stand in `sys.modules` under both names: the import system would overwrite its
    `__spec__` with that of the old name.
    """

    def __init__(self, home: str) -> None:
        self._home = home

    def create_module(self, spec: ModuleSpec) -> None:
        return None  # an ordinary empty module

    def exec_module(self, module: ModuleType) -> None:
        # The warnings module skips importlib's own frames, so level 2 is the line that imports the old name.
        warnings.warn(f"{module.__name__} is now {self._home}; import it from there", DeprecationWarning, stacklevel=2)
        home = import_module(self._home)
        module.__dict__.update((name, value) for name, value in vars(home).items() if not name.startswith("__"))
        module.__doc__ = home.__doc__


def install_old_modules() -> None:
    if OldModules not in sys.meta_path:
        sys.meta_path.append(OldModules)


# Flags of the command line that had another name.

RENAMED_FLAGS: Mapping[str, Mapping[str, str]] = {
    "peak": {"--refresh": "--measure-again"},
    "sweep": {"--gpus": "--gpu-ids", "--seed": "--order-seed"},
}
"""By command: the old flag and its name now. docs/reference.md says why."""


def with_new_flags(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments of a command with old flags replaced, and a note for each that was.

    >>> with_new_flags(["sweep", "--gpus=0,1", "--jobs", "2"])
    (['sweep', '--gpu-ids=0,1', '--jobs', '2'], ['--gpus is now --gpu-ids; the old name still works'])
    """
    renamed = RENAMED_FLAGS.get(arguments[0], {}) if arguments else {}
    found, notes = [], []
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        if flag in renamed:
            notes.append(f"{flag} is now {renamed[flag]}; the old name still works")
        found.append(f"{renamed.get(flag, flag)}{equals}{value}")
    return found, list(dict.fromkeys(notes))
