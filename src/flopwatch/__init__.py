"""flopwatch: know what every training step costs, to the FLOP.

The public names stand in `__all__`. Most of them need torch, so each is loaded on first use: `import flopwatch`
costs nothing, and `flopwatch.peak_flops(name=...)` answers on a laptop without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from flopwatch.version import __version__

if TYPE_CHECKING:
    from flopwatch.errors import (
        FlopwatchError,
        InputError,
        MeasurementError,
        MissingDependencyError,
        UntraceableError,
    )
    from flopwatch.flops.count import count_flops
    from flopwatch.flops.fit import fit_flops_law
    from flopwatch.flops.formulas import register_formula
    from flopwatch.flops.law import FlopLaw
    from flopwatch.hardware import measure_peak, peak_flops
    from flopwatch.mfu import calculate_mfu, calculate_mfu_with_profiler, calculate_precise_mfu, profile_model_flops
    from flopwatch.models.load import load_model
    from flopwatch.monitor.training_monitor import TrainingMonitor
    from flopwatch.records.flops import FlopCount, Peak, PhaseFlops, UncountedOp

_HOME = {
    "FlopCount": "flopwatch.records.flops",
    "FlopLaw": "flopwatch.flops.law",
    "FlopwatchError": "flopwatch.errors",
    "InputError": "flopwatch.errors",
    "MeasurementError": "flopwatch.errors",
    "MissingDependencyError": "flopwatch.errors",
    "Peak": "flopwatch.records.flops",
    "PhaseFlops": "flopwatch.records.flops",
    "TrainingMonitor": "flopwatch.monitor.training_monitor",
    "UncountedOp": "flopwatch.records.flops",
    "UntraceableError": "flopwatch.errors",
    "calculate_mfu": "flopwatch.mfu",
    "calculate_mfu_with_profiler": "flopwatch.mfu",
    "calculate_precise_mfu": "flopwatch.mfu",
    "count_flops": "flopwatch.flops.count",
    "fit_flops_law": "flopwatch.flops.fit",
    "load_model": "flopwatch.models.load",
    "measure_peak": "flopwatch.hardware",
    "peak_flops": "flopwatch.hardware",
    "profile_model_flops": "flopwatch.mfu",
    "register_formula": "flopwatch.flops.formulas",
}

__all__ = [
    "FlopCount",
    "FlopLaw",
    "FlopwatchError",
    "InputError",
    "MeasurementError",
    "MissingDependencyError",
    "Peak",
    "PhaseFlops",
    "TrainingMonitor",
    "UncountedOp",
    "UntraceableError",
    "__version__",
    "calculate_mfu",
    "calculate_mfu_with_profiler",
    "calculate_precise_mfu",
    "count_flops",
    "fit_flops_law",
    "load_model",
    "measure_peak",
    "peak_flops",
    "profile_model_flops",
    "register_formula",
]


def __getattr__(name: str) -> Any:
    if name == "report":  # the module: `flopwatch.report.load(DIR)` after `import flopwatch`
        return import_module("flopwatch.report")
    if name not in _HOME:
        raise AttributeError(f"module 'flopwatch' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
