"""flopwatch: know what every training step costs, to the FLOP.

The public names are listed in `__all__`, and each sub-package lists its own. Most of them need torch, so every name is
imported on first use: `import flopwatch` costs nothing, and `flopwatch.peak_flops(name=...)` answers without torch.
"""

from typing import TYPE_CHECKING

from flopwatch.compat import install_old_modules
from flopwatch.optional import lazy_exports
from flopwatch.version import __version__

if TYPE_CHECKING:
    from flopwatch import errors, flops, hardware, models, monitor, records, report, runs, sinks, sweep
    from flopwatch.compat import (
        calculate_mfu,
        calculate_mfu_with_profiler,
        calculate_precise_mfu,
        profile_model_flops,
    )
    from flopwatch.errors import (
        FlopwatchError,
        InputError,
        MeasurementError,
        MissingDependencyError,
        UntraceableError,
    )
    from flopwatch.flops import FlopLaw, count_flops, fit_flops_law, register_formula
    from flopwatch.hardware import measure_peak, peak_flops
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
]

_HOMES = {
    **{name: f"flopwatch.{name}" for name in ("errors", "flops", "hardware", "models", "monitor", "records", "report")},
    **{name: f"flopwatch.{name}" for name in ("runs", "sinks", "sweep")},
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
    "calculate_mfu": "flopwatch.compat",
    "calculate_mfu_with_profiler": "flopwatch.compat",
    "calculate_precise_mfu": "flopwatch.compat",
    "count_flops": "flopwatch.flops.count",
    "fit_flops_law": "flopwatch.flops.fit",
    "load_model": "flopwatch.models.load",
    "measure_peak": "flopwatch.hardware",
    "peak_flops": "flopwatch.hardware",
    "profile_model_flops": "flopwatch.compat",
    "register_formula": "flopwatch.flops.formulas",
}

__getattr__ = lazy_exports("flopwatch", _HOMES)


def __dir__() -> list[str]:
    return __all__


install_old_modules()
