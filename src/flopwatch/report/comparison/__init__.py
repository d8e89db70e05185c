"""Compare two sweeps trial by trial. Nothing here imports torch.

>>> from pathlib import Path
>>> from flopwatch.report.capture import capture_sweep
>>> from flopwatch.report.comparison import compare_sweeps
>>> found = compare_sweeps(capture_sweep(Path("before")), capture_sweep(Path("after")))  # doctest: +SKIP
>>> found.overall["time"].mean_ratio  # doctest: +SKIP
0.93
"""

from flopwatch.report.comparison.compare import compare_sweeps
from flopwatch.report.comparison.ratios import SweepComparison

__all__ = ["SweepComparison", "compare_sweeps"]
