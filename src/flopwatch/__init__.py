"""flopwatch: know what every training step costs, to the FLOP.

The public names are in `__all__` of this package and of its sub-packages. They are imported on first use, because most
of them need torch: `import flopwatch` is fast, and `flopwatch.peak_flops(name=...)` works without torch.
"""

from typing import TYPE_CHECKING

from flopwatch.optional import lazy_exports
from flopwatch.version import __version__

if TYPE_CHECKING:
    from flopwatch import errors, flops, hardware, models, monitor, records, report, runs, sinks, sweep
    from flopwatch.automatic import watch
    from flopwatch.errors import (
        FlopwatchError,
        InputError,
        MeasurementError,
        MissingDependencyError,
        UntraceableError,
    )
    from flopwatch.flops import FlopLaw, count_flops, fit_flops_law, formula, register_formula
    from flopwatch.hardware import measure_peak, peak_flops
    from flopwatch.mfu import calculate_mfu, calculate_mfu_with_profiler, calculate_precise_mfu, profile_model_flops
    from flopwatch.models import load_model
    from flopwatch.monitor import TrainingMonitor
    from flopwatch.records import FlopCount, Peak, PhaseFlops, UncountedOp

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
    "errors",
    "fit_flops_law",
    "flops",
    "formula",
    "hardware",
    "load_model",
    "measure_peak",
    "models",
    "monitor",
    "peak_flops",
    "profile_model_flops",
    "records",
    "register_formula",
    "report",
    "runs",
    "sinks",
    "sweep",
    "watch",
]

_NAMES_BY_PACKAGE = {
    "automatic": ("watch",),
    "errors": ("FlopwatchError", "InputError", "MeasurementError", "MissingDependencyError", "UntraceableError"),
    "mfu": ("calculate_mfu", "calculate_mfu_with_profiler", "calculate_precise_mfu", "profile_model_flops"),
    "flops": ("FlopLaw", "count_flops", "fit_flops_law", "formula", "register_formula"),
    "hardware": ("measure_peak", "peak_flops"),
    "models": ("load_model",),
    "monitor": ("TrainingMonitor",),
    "records": ("FlopCount", "Peak", "PhaseFlops", "UncountedOp"),
}
"""All other names are packages."""
_HOMES = {name: f"flopwatch.{name}" for name in __all__}
_HOMES |= {name: f"flopwatch.{package}" for package, names in _NAMES_BY_PACKAGE.items() for name in names}

__getattr__ = lazy_exports("flopwatch", _HOMES)


def __dir__() -> list[str]:
    return __all__
