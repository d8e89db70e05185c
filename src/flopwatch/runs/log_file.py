"""Find the log of a run, parse its lines into records, and read its lines from the end."""

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from flopwatch.decode import BrokenRecordError, read_record
from flopwatch.errors import InputError
from flopwatch.records.run import FORMAT, Notice, Provenance, Record, Row, RunStart, Summary
from flopwatch.text import listed

BLOCK_BYTES = 1 << 18

_KINDS: Mapping[str, type[Any]] = {
    "run": RunStart,
    "provenance": Provenance,
    "row": Row,
    "notice": Notice,
    "summary": Summary,
}
_NON_FINITE = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}
_ROW_START = re.compile(rb'\{"type": ?"row", ?"step": ?(\d{1,18})[,}]')


class TornLineError(ValueError):
    """A line is no complete record: the training was killed while it wrote the line, or still writes it."""


def row_step(line: bytes) -> int | None:
    """Return the step of a line of type `row` without parsing its JSON; None for other types.

    Parsing a line takes twenty times as long as reading it, and nearly all lines of a long log are rows.

    >>> row_step(b'{"type": "row", "step": 40, "values": {')
    40
    """
    start = _ROW_START.match(line)
    return int(start[1]) if start else None


def parse_object(line: bytes) -> dict[str, Any]:
    """Parse the JSON object on a line. NaN and infinity, which the log stores as strings, become floats."""
    try:
        content = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TornLineError(str(error)) from error
    if not isinstance(content, dict):
        raise TornLineError(f"the line is not a JSON object but {type(content).__name__}")
    # Looking at every number of a line takes longer than parsing it, and nearly no line has such a string.
    for group in ("values", "steps") if b'nan"' in line or b'inf"' in line else ():
        if isinstance(content.get(group), dict):
            content[group] = {key: _number(value) for key, value in content[group].items()}
    return content


def _number(value: Any) -> Any:
    if isinstance(value, list):
        return [_NON_FINITE.get(item, item) if isinstance(item, str) else item for item in value]
    return _NON_FINITE.get(value, value) if isinstance(value, str) else value


def to_record(content: Mapping[str, Any]) -> Record | None:
    """Build the record from a parsed line; None if this version of flopwatch does not know its type.

    Raises TornLineError if a field is missing or wrong, and InputError if the log has a newer format.
    """
    kind = _KINDS.get(str(content.get("type")))
    if kind is None:
        if "type" not in content:
            raise TornLineError("the record has no type")
        return None
    written_in = content.get("format", FORMAT)
    if kind is RunStart and isinstance(written_in, int) and written_in > FORMAT:
        raise InputError(
            f"this log is in format {written_in}, and this flopwatch reads up to format {FORMAT}: "
            "upgrade flopwatch to the version that wrote it"
        )
    try:
        record: Record = read_record(kind, content)
    except BrokenRecordError as error:
        raise TornLineError(str(error)) from error
    return record


def lines_from_end(path: Path, block_bytes: int = BLOCK_BYTES) -> Iterator[bytes]:
    """Yield the lines of a file from the last to the first, without line breaks and without empty lines."""
    with path.open("rb") as file:
        position = file.seek(0, os.SEEK_END)
        begun = b""  # The end of a line whose beginning is in a block that was not read yet.
        while position > 0:
            size = min(block_bytes, position)
            position -= size
            file.seek(position)
            begun, *lines = (file.read(size) + begun).split(b"\n")
            yield from (line for line in reversed(lines) if line)
        if begun:
            yield begun


DEFAULT_NAME = "training_log.jsonl"

_OF_INTEGRATIONS = "flopwatch"
_LONGEST_FIRST_LINE = 1 << 20
_LINES_LOOKED_AT = 5


class NoLogError(InputError):
    """The folder has no log of a run; the run may not have written it yet."""


def find_log(run_dir: str | Path) -> Path:
    """Return the path of a run's log, given that path or the folder of the run.

    In a folder the log is `training_log.jsonl`, or that file in the subfolder `flopwatch`, where the integrations for
    Hugging Face and Lightning write it, or else the only `.jsonl` file that is the log of a run.

    Raises:
        NoLogError: The folder does not exist or has no log.
        InputError: The folder has several logs, none of them `training_log.jsonl`; or the file is not a log.
    """
    folder = Path(run_dir).expanduser()
    if folder.is_file():
        types = list(_first_types(folder))  # none yet, if its run has just begun
        if types and not any(types):
            raise InputError(
                f"{str(folder)!r} is not a log of a run: "
                f"pass the output_dir of a TrainingMonitor, or the {DEFAULT_NAME} in it"
            )
        return folder
    if not folder.is_dir():
        raise NoLogError(f"{str(run_dir)!r} does not exist: pass the output_dir of a TrainingMonitor, or its log file")
    for place in (folder, folder / _OF_INTEGRATIONS):
        if (place / DEFAULT_NAME).is_file():
            return place / DEFAULT_NAME
    logs = []
    for path in sorted(folder.glob("*.jsonl")):
        with suppress(OSError):  # somebody else's file may not be readable
            logs += [path] if path.is_file() and next(_first_types(path), "") == "run" else []
    if not logs:
        below = sorted(map(str, runs_below(folder)))
        raise NoLogError(
            f"the folder {str(run_dir)!r} has no {DEFAULT_NAME} and no other log of a run: pass the output_dir of a "
            f"TrainingMonitor, or its log file{f'; there are logs in {listed(below)}' if below else ''}"
        )
    if len(logs) > 1:
        names = ", ".join(path.name for path in logs)
        raise InputError(f"the folder {str(run_dir)!r} has several logs ({names}): pass one of these files")
    return logs[0]


def _first_types(path: Path) -> Iterator[str]:
    """The types of the first lines that are written to their end; empty for a line that is no record."""
    with path.open("rb") as file:
        for line in islice(iter(partial(file.readline, _LONGEST_FIRST_LINE), b""), _LINES_LOOKED_AT):
            if not line.endswith(b"\n") and (line[:1] == b"{" or not line.strip()):
                return
            try:
                yield str(parse_object(line).get("type", ""))
            except TornLineError:
                yield "" if row_step(line) is None else "row"


def runs_below(folder: str | Path) -> list[Path]:
    """Return the runs in the subfolders of a folder, those whose log was written last at the end."""
    patterns = (f"*/{DEFAULT_NAME}", f"*/{_OF_INTEGRATIONS}/{DEFAULT_NAME}")
    logs = [path for pattern in patterns for path in Path(folder).expanduser().glob(pattern) if path.is_file()]
    return [path.parent for path in sorted(logs, key=lambda path: path.stat().st_mtime)]
