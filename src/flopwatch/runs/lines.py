"""Parse a line of a log into its record, and read the lines of a file from its end."""

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from flopwatch.errors import InputError
from flopwatch.records.run import FORMAT, Notice, Provenance, Record, Row, RunStart, Summary

BLOCK_BYTES = 1 << 18

_KINDS: Mapping[str, type[Any]] = {
    "run": RunStart,
    "provenance": Provenance,
    "row": Row,
    "notice": Notice,
    "summary": Summary,
}
_NON_FINITE = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}
_ROW_START = re.compile(rb'\{"type": ?"row", ?"step": ?(\d+)[,}]')


class TornLineError(ValueError):
    """A line that is not a complete record: its writer was killed, or is still writing."""


def row_step(line: bytes) -> int | None:
    """The last step of a row without parsing it; None for other lines.

    Parsing a line takes twenty times as long as reading it, and nearly all lines of a long log are rows.

    >>> row_step(b'{"type": "row", "step": 40, "values": {')
    40
    """
    start = _ROW_START.match(line)
    return int(start[1]) if start else None


def parse_object(line: bytes) -> dict[str, Any]:
    """The line's JSON object, with nan and inf, which are logged as text, converted to numbers."""
    try:
        content = json.loads(line)
    except ValueError as error:
        raise TornLineError(str(error)) from error
    if not isinstance(content, dict):
        raise TornLineError(f"not an object but {type(content).__name__}")
    for group in ("values", "steps"):
        if isinstance(content.get(group), dict):
            content[group] = {key: _numbers(value) for key, value in content[group].items()}
    return content


def _numbers(value: Any) -> Any:
    if isinstance(value, str):
        return _NON_FINITE.get(value, value)
    if isinstance(value, list):
        return [_NON_FINITE.get(item, item) if isinstance(item, str) else item for item in value]
    return value


def to_record(content: Mapping[str, Any]) -> Record | None:
    """The record of a parsed line; None for a type of record that this version does not know.

    Raises:
        TornLineError: Fields are missing.
        InputError: A session in a newer format.
    """
    kind = _KINDS.get(str(content.get("type")))
    if kind is None:
        if "type" not in content:
            raise TornLineError("no type")
        return None
    if kind is RunStart:
        _refuse_newer(content)
    # Ignore fields that a later version added within the same format.
    known = {field.name for field in fields(kind)}
    given = {name: value for name, value in content.items() if name in known}
    try:
        for name in ("notes", "skip"):
            if name in given:
                given[name] = tuple(given[name])
        record: Record = kind(**given)
    except TypeError as error:
        raise TornLineError(str(error)) from error
    return record


def _refuse_newer(content: Mapping[str, Any]) -> None:
    written_in = content.get("format", FORMAT)
    if isinstance(written_in, int) and written_in > FORMAT:
        raise InputError(
            f"this log is in format {written_in}, and this flopwatch reads up to format {FORMAT}: "
            "upgrade flopwatch to the version that wrote it"
        )


def lines_from_end(path: Path, block_bytes: int = BLOCK_BYTES) -> Iterator[bytes]:
    """The lines of a file without their line breaks, the last one first; empty lines are skipped."""
    with path.open("rb") as file:
        position = file.seek(0, os.SEEK_END)
        begun = b""  # the end of a line that begins in a block not read yet
        while position > 0:
            size = min(block_bytes, position)
            position -= size
            file.seek(position)
            begun, *lines = (file.read(size) + begun).split(b"\n")
            yield from (line for line in reversed(lines) if line)
        if begun:
            yield begun
