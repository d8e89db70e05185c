"""The dataclasses that packages exchange and store in files. All are frozen. Standard library only."""

from typing import TYPE_CHECKING

from flopwatch.optional import lazy_exports

if TYPE_CHECKING:
    from flopwatch.records.flops import ConventionFlops, FlopCount, Peak, PhaseFlops, UncountedOp
    from flopwatch.records.metrics import METRICS, Goodput, Metric, find_metric
    from flopwatch.records.run import Notice, Provenance, Row, RunStart, Summary
    from flopwatch.records.sweep_results import read_results
    from flopwatch.records.trial import Limits, Measured, TrialResult, TrialSpec

__all__ = [
    "METRICS",
    "ConventionFlops",
    "FlopCount",
    "Goodput",
    "Limits",
    "Measured",
    "Metric",
    "Notice",
    "Peak",
    "PhaseFlops",
    "Provenance",
    "Row",
    "RunStart",
    "Summary",
    "TrialResult",
    "TrialSpec",
    "UncountedOp",
    "find_metric",
    "read_results",
]

# Names are imported on first use: a trial's supervisor process starts faster if it loads `records.trial` only.
__getattr__ = lazy_exports(
    "flopwatch.records",
    {
        **dict.fromkeys(
            ("ConventionFlops", "FlopCount", "Peak", "PhaseFlops", "UncountedOp"), "flopwatch.records.flops"
        ),
        **dict.fromkeys(("METRICS", "Goodput", "Metric", "find_metric"), "flopwatch.records.metrics"),
        **dict.fromkeys(("Notice", "Provenance", "Row", "RunStart", "Summary"), "flopwatch.records.run"),
        **dict.fromkeys(("Limits", "Measured", "TrialResult", "TrialSpec"), "flopwatch.records.trial"),
        "read_results": "flopwatch.records.sweep_results",
    },
)
