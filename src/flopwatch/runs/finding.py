"""Find the log of a run."""

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from flopwatch.errors import InputError
from flopwatch.records.reading import listed
from flopwatch.runs.lines import TornLineError, parse_object, row_step

DEFAULT_NAME = "training_log.jsonl"

_OF_INTEGRATIONS = "flopwatch"
_LONGEST_FIRST_LINE = 1 << 20
_LINES_LOOKED_AT = 5


class NoLogError(InputError):
    """There is no log, or not yet."""


def find_log(run_dir: str | Path) -> Path:
    """The log of a run: the file itself, `training_log.jsonl` in a folder, or else the only log in it.

    Hugging Face and Lightning `Trainer`s have the log in the folder `flopwatch` of their output folder.

    Raises:
        NoLogError: There is none.
        InputError: There are several, and none of them has the usual name; or the file is no log.
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
        raise NoLogError(
            f"{str(run_dir)!r} has no {DEFAULT_NAME} and no other log of a run: "
            f"pass the output_dir of a TrainingMonitor, or its log file{_logs_below(folder)}"
        )
    if len(logs) > 1:
        names = ", ".join(path.name for path in logs)
        raise InputError(f"{str(run_dir)!r} has several logs ({names}): pass one of these files")
    return logs[0]


def _checked(path: Path) -> Path:
    """The path, unless the file begins with something other than a record; an empty file may become a log."""
    with path.open("rb") as file:
        lines = [line for _, line in zip(range(_LINES_LOOKED_AT), _whole_lines(file), strict=False)]
    if lines and not any(_is_record(line) for line in lines):
        raise InputError(
            f"{str(path)!r} is not a log of a run: "
            f"pass the output_dir of a TrainingMonitor, or the {DEFAULT_NAME} in it"
        )
    return path


def _whole_lines(file: BinaryIO) -> Iterator[bytes]:
    """Complete lines, without a last one that is still being written."""
    while line := file.readline(_LONGEST_FIRST_LINE):
        if not line.endswith(b"\n") and (line[:1] == b"{" or not line.strip()):
            return
        yield line


def _is_record(line: bytes) -> bool:
    try:
        return "type" in parse_object(line)
    except TornLineError:
        return row_step(line) is not None


def _logs_below(folder: Path) -> str:
    """A hint for a folder that contains the folders of runs."""
    patterns = (f"*/{DEFAULT_NAME}", f"*/{_OF_INTEGRATIONS}/{DEFAULT_NAME}")
    found = sorted(str(path.parent) for pattern in patterns for path in folder.glob(pattern))
    return f"; there are logs in {listed(found)}" if found else ""


def _starts_a_run(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return parse_object(file.readline(_LONGEST_FIRST_LINE)).get("type") == "run"
    except (OSError, TornLineError):
        return False
