"""The flat table of trials as CSV and as Parquet."""

import csv
import io
import re
from collections.abc import Mapping
from typing import Any

from flopwatch.optional import require_package
from flopwatch.plain_text import plain
from flopwatch.report.table import Table
from flopwatch.report.table_columns import Kind

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
