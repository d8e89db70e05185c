"""The report as JSON: everything of the summary, unrounded, with one row per trial."""

import csv
import hashlib
import io
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from math import isfinite
from typing import Any

from flopwatch.optional import require_package
from flopwatch.records.reading import one_line, plain
from flopwatch.records.trial import FAILED, TrialResult
from flopwatch.report.analysis.cells import MOST_FINITE
from flopwatch.report.capture import Capture
from flopwatch.report.records import SweepSummary
from flopwatch.report.table import COLUMNS, Kind, Table, result_row, whole_text
from flopwatch.sinks.protocol import TrialRun

FORMAT = 1


def report_json(summary: SweepSummary) -> str:
    """Strict JSON, one trial or group to a line: what is not finite is null."""
    content = {"format": FORMAT, **_fields(summary)}
    content["trials"] = content.pop("rows")
    return "{\n" + ",\n".join(f" {json.dumps(name)}: {_written(value)}" for name, value in content.items()) + "\n}"


def _written(value: Any) -> str:
    # Not by `indent`: that leaves json's fast encoder, and 10,000 trials would take three times as long.
    if isinstance(value, tuple) and value:
        return "[\n  " + ",\n  ".join(map(_strict, value)) + "\n ]"
    return _strict(value)


def _strict(value: Any) -> str:
    try:
        return json.dumps(value, default=_fields, allow_nan=False)
    except ValueError:  # rare, and walking through all values takes longer than writing them
        return json.dumps(_finite(value), allow_nan=False)


def _fields(record: Any) -> dict[str, Any]:
    if not is_dataclass(record):
        raise TypeError(f"{type(record).__name__} has no JSON form")
    return {field.name: getattr(record, field.name) for field in fields(record)}


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if isfinite(value) else None
    if is_dataclass(value):
        return _finite(_fields(value))
    if isinstance(value, Mapping):
        return {str(name): _finite(item) for name, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


# The flat table of trials as CSV and as Parquet.


# Also after what some spreadsheets take for the end of a cell: those that expect semicolons do not see our quotes.
_BEGINS_A_FORMULA = re.compile(r"(?:^|(?<=[;\t\n]))(?=\s*[=+\-@＝＋－＠])")


def table_csv(table: Table) -> str:
    """UTF-8 with a header; numbers unrounded, flags as true and false, nothing where nothing is known.

    What a spreadsheet would run as a formula gets an apostrophe in front, the way OWASP advises: what a training raises
    reaches a reader's machine by this file. Escape sequences and control codes are taken out.
    """
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow([_harmless(name) for name in table.columns])
    # By the tables' own columns: every row has them all, in this order.
    writer.writerows([_cell(value) for value in row.values()] for row in table.rows)
    return stream.getvalue()


def table_parquet(table: Table) -> bytes:
    """Parquet with typed columns; text as it is.

    Raises:
        MissingDependencyError: pyarrow is not installed.
    """
    pyarrow = require_package("pyarrow", "Parquet", "; CSV needs nothing")
    parquet = require_package("pyarrow.parquet", "Parquet", "; CSV needs nothing")
    types = _arrow_types(pyarrow)
    columns = {
        name: pyarrow.array([_typed(row[name], kind) for row in table.rows], types[kind])
        for name, kind in table.kinds.items()
    }
    written = io.BytesIO()
    parquet.write_table(pyarrow.table(columns), written)
    return written.getvalue()


def _arrow_types(pyarrow: Any) -> Mapping[Kind, Any]:
    return {
        "text": pyarrow.string(),
        "integer": pyarrow.int64(),
        "number": pyarrow.float64(),
        "flag": pyarrow.bool_(),
    }


def _typed(value: Any, kind: Kind) -> Any:
    """Options of several types share a column of text."""
    if value is None:
        return None
    if kind == "number":
        return float(value)
    return _cell_text(value) if kind == "text" else value


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return _harmless(value) if isinstance(value, str) else _cell_text(value)


def _cell_text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return value if isinstance(value, str) else repr(value)


def _harmless(text: str) -> str:
    return _BEGINS_A_FORMULA.sub("'", plain(text))


# A sweep's trials as runs of a tracking service: settings, figures, facts. Pure.


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
