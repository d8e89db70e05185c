"""A sweep's trials as runs of a tracking service: settings, figures, facts. Pure."""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

from flopwatch.plain_text import one_line
from flopwatch.report.capture import Capture
from flopwatch.report.cells import MOST_FINITE
from flopwatch.report.table import result_row, whole_text
from flopwatch.report.table_columns import COLUMNS
from flopwatch.sinks.trial_runs import TrialRun
from flopwatch.trial_records import FAILED, TrialResult

_FIRST_RESULT = [column.name for column in COLUMNS].index("outcome")
_FACTS = {column.name for column in COLUMNS[_FIRST_RESULT:] if column.kind == "text"}
_FIGURES = {column.name for column in COLUMNS[_FIRST_RESULT:] if column.kind != "text"}


def trial_runs(capture: Capture) -> Iterator[TrialRun]:
    """Every trial that has ended, one way or another."""
    for result in capture.results.values():
        yield trial_run(result, capture.folder.resolve().name, capture.created)


def trial_run(result: TrialResult, sweep: str, created: float | None) -> TrialRun:
    """One trial.

    Args:
        result: How it ended.
        sweep: Name of the sweep.
        created: When the sweep was planned: tells two sweeps with the same trials apart, and stays as it is when a
            folder is moved or a sweep resumed.
    """
    row = result_row(result)
    sweep_id = _hashed(sweep if created is None else repr(created))
    end = None if row["start_unix_seconds"] is None else row["start_unix_seconds"] + (row["total_seconds"] or 0)
    return TrialRun(
        id=_hashed(sweep_id, result.key or result.name),
        name=one_line(result.name),
        sweep=one_line(sweep),
        sweep_id=sweep_id,
        config=_clean(result.spec.to_json()),
        figures={name: value for name, value in row.items() if name in _FIGURES or name.startswith("extra.")},
        facts={name: value for name, value in row.items() if name in _FACTS and value is not None},
        state="killed" if result.outcome == "cancelled" else "failed" if result.outcome in FAILED else "finished",
        start_unix_seconds=row["start_unix_seconds"],
        end_unix_seconds=end,
    )


def _hashed(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode("utf-8", "backslashreplace")).hexdigest()[:20]


def _clean(value: Any) -> Any:
    """As JSON that every service takes: whole characters, finite numbers."""
    if isinstance(value, Mapping):
        return {whole_text(str(name)): _clean(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(item) for item in value]
    if isinstance(value, str):
        return whole_text(value)
    is_number = isinstance(value, int | float)
    return None if is_number and not abs(value) <= MOST_FINITE else value
