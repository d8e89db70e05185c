"""`flopwatch report --csv FILE --parquet FILE`: the flat table of trials; `-` is standard output."""

from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from flopwatch.report.capture import Capture

STANDARD_OUTPUT = "-"


def write_tables(capture: "Capture", csv: str | None, parquet: str | None) -> list[str]:
    """Write what was asked for; the files that were written, without standard output."""
    from flopwatch.plain_text import one_line
    from flopwatch.report.table import make_table
    from flopwatch.report.table_files import table_csv, table_parquet

    if csv is None and parquet is None:
        return []
    table = make_table(capture)
    for trouble in table.troubles:
        typer.echo(one_line(trouble), err=True)
    written = []
    if csv is not None:
        written.append(write_file(csv, table_csv(table).encode("utf-8")))
    if parquet is not None:
        written.append(write_file(parquet, table_parquet(table)))
    return [path for path in written if path != STANDARD_OUTPUT]


def refuse_two_on_standard_output(csv: str | None, parquet: str | None, *, as_json: bool) -> None:
    """Two formats in one stream could not be told apart by who reads it."""
    from flopwatch.errors import InputError

    asked = [f"--{name} -" for name, path in (("csv", csv), ("parquet", parquet)) if path == STANDARD_OUTPUT]
    asked += ["--json"] if as_json else []
    if len(asked) > 1:
        raise InputError(f"{' and '.join(asked)} would both write to standard output; name a file for one of them")


def write_file(path: str, content: bytes) -> str:
    """To the file, or to standard output for `-`; the path."""
    from flopwatch.errors import InputError

    if path == STANDARD_OUTPUT:
        typer.echo(content, nl=False)
        return path
    try:
        Path(path).expanduser().write_bytes(content)
    except OSError as error:
        raise InputError(f"cannot write {path!r}: {error.strerror}; name a file in a folder that exists") from error
    return path
