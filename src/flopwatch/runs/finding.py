"""Which file is a run's log."""

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from flopwatch.errors import InputError
from flopwatch.runs.lines import TornLineError, parse_object, row_step

DEFAULT_NAME = "training_log.jsonl"

_OF_INTEGRATIONS = "flopwatch"
_LONGEST_FIRST_LINE = 1 << 20
_LINES_LOOKED_AT = 5
_MOST_NAMED = 5


class NoLogError(InputError):
    """There is no log, or not yet."""


def find_log(run_dir: str | Path) -> Path:
    """The log of a run: the file itself, `training_log.jsonl` in a folder, or else the only log in it.

    In the folder of a Hugging Face or Lightning `Trainer`, the log lies in its folder `flopwatch`.

    Raises:
        NoLogError: There is none.
        InputError: There are several, and none of them has the usual name; or the file is no log.
    """
    folder = Path(run_dir).expanduser()
    if folder.is_file():
        return _checked(folder)
    if not folder.is_dir():
        raise NoLogError(f"{str(run_dir)!r} is not there: pass the output_dir of a TrainingMonitor, or its log file")
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
        raise InputError(f"{str(run_dir)!r} has several logs ({names}): pass the file you mean")
    return logs[0]


def _checked(path: Path) -> Path:
    """A file that is empty may become a log; one that begins with something else will not."""
    with path.open("rb") as file:
        lines = [line for _, line in zip(range(_LINES_LOOKED_AT), _whole_lines(file), strict=False)]
    if lines and not any(_is_record(line) for line in lines):
        raise InputError(
            f"{str(path)!r} is not a log of a run: "
            f"pass the output_dir of a TrainingMonitor, or the {DEFAULT_NAME} in it"
        )
    return path


def _whole_lines(file: BinaryIO) -> Iterator[bytes]:
    """A first line that is still being written is no line yet, unless it is too long for any record's beginning."""
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
    """Where the folder is one above the runs."""
    patterns = (f"*/{DEFAULT_NAME}", f"*/{_OF_INTEGRATIONS}/{DEFAULT_NAME}")
    found = sorted(str(path.parent) for pattern in patterns for path in folder.glob(pattern))
    more = f" and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
    return f"; there are logs in {', '.join(found[:_MOST_NAMED])}{more}" if found else ""


def _starts_a_run(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return parse_object(file.readline(_LONGEST_FIRST_LINE)).get("type") == "run"
    except (OSError, TornLineError):
        return False
