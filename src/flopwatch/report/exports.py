"""Write a report as JSON, CSV, Parquet or Markdown, or as runs of a tracking service such as MLflow.

Numbers are rounded only in Markdown, which is for people.
"""

import csv
import hashlib
import io
import re
from collections.abc import Iterator, Mapping
from typing import Any

from flopwatch.optional import require_package
from flopwatch.present.json_form import record_fields, to_json
from flopwatch.records.trial import FAILED, TrialResult
from flopwatch.report.capture import Capture
from flopwatch.report.cells import MOST_FINITE
from flopwatch.report.records import SweepSummary
from flopwatch.report.table import COLUMNS, Kind, Table, result_row, whole_text
from flopwatch.sinks.protocol import TrialRun
from flopwatch.text import one_line, plain


def report_json(summary: SweepSummary) -> str:
    """Write the whole summary as JSON, one trial or group per line."""
    content = record_fields(summary)
    content["trials"] = content.pop("rows")
    return to_json(content)


# A formula may also start after a semicolon, tab or newline, because some spreadsheets begin a new cell there.
_BEGINS_A_FORMULA = re.compile(r"(?:^|(?<=[;\t\n]))(?=\s*[=+\-@＝＋－＠])")


def table_csv(table: Table) -> str:
    """Write the table as CSV with a header. Flags are `true` or `false`, and unknown values are empty.

    Text that a spreadsheet would run as a formula gets an apostrophe in front, because text such as an
    exception's message may come from anywhere (CSV injection, see OWASP). Control characters are removed.
    """
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow([_harmless(name) for name in table.columns])
    for row in table.rows:
        known = ("" if value is None else value for value in row.values())
        writer.writerow([_harmless(value) if isinstance(value, str) else _text(value) for value in known])
    return stream.getvalue()


def table_parquet(table: Table) -> bytes:
    """Write the table as Parquet with typed columns. Unlike in CSV, text is not changed.

    Raises:
        MissingDependencyError: pyarrow is not installed.
    """
    pyarrow = require_package("pyarrow", "Parquet", "; CSV needs nothing")
    parquet = require_package("pyarrow.parquet", "Parquet", "; CSV needs nothing")
    types = {"text": pyarrow.string(), "integer": pyarrow.int64(), "number": pyarrow.float64(), "flag": pyarrow.bool_()}
    columns = {
        name: pyarrow.array([_typed(row[name], kind) for row in table.rows], types[kind])
        for name, kind in table.kinds.items()
    }
    written = io.BytesIO()
    parquet.write_table(pyarrow.table(columns), written)
    return written.getvalue()


def _typed(value: Any, kind: Kind) -> Any:
    if value is None:
        return None
    return float(value) if kind == "number" else _text(value) if kind == "text" else value


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return value if isinstance(value, str) else repr(value)


def _harmless(text: str) -> str:
    return _BEGINS_A_FORMULA.sub("'", plain(text))


_RESULTS = COLUMNS[[column.name for column in COLUMNS].index("outcome") :]
_FACTS = {column.name for column in _RESULTS if column.kind == "text"}
_FIGURES = {column.name for column in _RESULTS if column.kind != "text"}


def trial_runs(capture: Capture) -> Iterator[TrialRun]:
    for result in capture.results.values():
        yield trial_run(result, capture.folder.resolve().name, capture.created)


def trial_run(result: TrialResult, sweep: str, created: float | None) -> TrialRun:
    """Convert the result of a trial to a run of a tracking service.

    Args:
        result: The result.
        sweep: Name of the sweep.
        created: Unix time at which the sweep was planned. The ID of the run depends on this time, which
            differs between sweeps with the same trials and stays the same if a sweep is resumed or its folder moved.
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
    """Make a value acceptable to every service: escape lone surrogates, and replace NaN and infinity by None."""
    if isinstance(value, Mapping):
        return {whole_text(str(name)): _clean(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(item) for item in value]
    if isinstance(value, str):
        return whole_text(value)
    return None if isinstance(value, int | float) and not abs(value) <= MOST_FINITE else value
