"""Compare two sweeps trial by trial. Nothing here imports torch."""

from flopwatch.report.comparison.compare import compare_sweeps
from flopwatch.report.comparison.ratios import SweepComparison

__all__ = ["SweepComparison", "compare_sweeps"]
