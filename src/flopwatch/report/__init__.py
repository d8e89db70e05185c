"""Read the results of a sweep: `load(DIR)` returns a table of trials, `summarise(DIR)` the content of the report."""

from pathlib import Path

from flopwatch.report.capture import capture_sweep
from flopwatch.report.records import SweepSummary
from flopwatch.report.summary import summarise as summarise_capture
from flopwatch.report.table import COLUMNS, Column, Table, load

__all__ = ["COLUMNS", "Column", "SweepSummary", "Table", "load", "summarise"]


def summarise(sweep: str | Path) -> SweepSummary:
    """Return the content of `flopwatch report` as a record: what to run, costs, failures and warnings.

    Args:
        sweep: The folder that `flopwatch sweep` or `flopwatch.sweep.run` wrote.

    Raises:
        InputError: The folder is not the folder of a sweep.

    Example:
        >>> spec = '{"trainer": "standard", "model": "tiny", "batch_size": 4, "seq_len": 128}'
        >>> _ = Path("results.jsonl").write_text(f'{{"name": "a", "key": "k", "spec": {spec}, "outcome": "hang"}}')
        >>> summarise(".").totals.by_outcome
        {'hang': 1}
    """
    return summarise_capture(capture_sweep(Path(sweep).expanduser()))
