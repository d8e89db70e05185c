"""Read the results of a sweep: `load(DIR)` returns a table of trials, `summarise(DIR)` the content of the report."""

from pathlib import Path
from typing import TYPE_CHECKING

from flopwatch.optional import lazy_exports
from flopwatch.report.table import COLUMNS, Column, Table, load

if TYPE_CHECKING:
    from flopwatch.report.comparison import compare_sweeps
    from flopwatch.report.records import SweepSummary

__all__ = ["COLUMNS", "Column", "SweepSummary", "Table", "compare_sweeps", "load", "summarise"]


def summarise(sweep: str | Path) -> "SweepSummary":
    """What the command `flopwatch report` shows, as a frozen record: choices, costs, failures, warnings.

    Args:
        sweep: The folder that `flopwatch sweep` or `flopwatch.sweep.run` wrote.

    Raises:
        InputError: It is not the folder of a sweep.

    `summarise("flopwatch-sweep").totals.by_outcome` is, for example, `{'ok': 14, 'oom_host': 2}`.
    """
    from flopwatch.report.capture import capture_sweep
    from flopwatch.report.summary import summarise as summarise_capture

    return summarise_capture(capture_sweep(Path(sweep).expanduser()))


__getattr__ = lazy_exports(
    "flopwatch.report",
    {"SweepSummary": "flopwatch.report.records", "compare_sweeps": "flopwatch.report.comparison"},
)
