"""Find the log of a run, parse its lines into records, and read its lines from the end."""

import json
import os
import re
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

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
        return _checked(folder)
    if not folder.is_dir():
        raise NoLogError(f"{str(run_dir)!r} does not exist: pass the output_dir of a TrainingMonitor, or its log file")
    for place in (folder, folder / _OF_INTEGRATIONS):
        if (place / DEFAULT_NAME).is_file():
            return place / DEFAULT_NAME
    logs = [path for path in sorted(folder.glob("*.jsonl")) if path.is_file() and _starts_a_run(path)]
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


def _checked(path: Path) -> Path:
    """Raise InputError if none of the first lines is a record. An empty file passes: its run may have just begun."""
    with path.open("rb") as file:
        lines = list(islice(_whole_lines(file), _LINES_LOOKED_AT))
    if lines and not any(map(_is_record, lines)):
        raise InputError(
            f"{str(path)!r} is not a log of a run: "
            f"pass the output_dir of a TrainingMonitor, or the {DEFAULT_NAME} in it"
        )
    return path


def _whole_lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a file, except for a last line that is still being written."""
    while line := file.readline(_LONGEST_FIRST_LINE):
        if not line.endswith(b"\n") and (line[:1] == b"{" or not line.strip()):
            return
        yield line


def _is_record(line: bytes) -> bool:
    try:
        return "type" in parse_object(line)
    except TornLineError:
        return row_step(line) is not None


def runs_below(folder: str | Path) -> list[Path]:
    """Return the runs in the subfolders of a folder, those whose log was written last at the end."""
    patterns = (f"*/{DEFAULT_NAME}", f"*/{_OF_INTEGRATIONS}/{DEFAULT_NAME}")
    logs = [path for pattern in patterns for path in Path(folder).expanduser().glob(pattern) if path.is_file()]
    return [path.parent for path in sorted(logs, key=lambda path: path.stat().st_mtime)]


def _starts_a_run(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return parse_object(file.readline(_LONGEST_FIRST_LINE)).get("type") == "run"
    except (OSError, TornLineError):
        return False
