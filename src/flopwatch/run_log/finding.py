"""Which file is a run's log."""

from pathlib import Path

from flopwatch.errors import InputError
from flopwatch.run_log.lines import TornLineError, parse_object

DEFAULT_NAME = "training_log.jsonl"

_LONGEST_FIRST_LINE = 1 << 20


class NoLogError(InputError):
    """There is no log, or not yet."""


def find_log(run_dir: str | Path) -> Path:
    """The log of a run: the file itself, `training_log.jsonl` in a folder, or else the only log in it.

    Raises:
        NoLogError: There is none.
        InputError: There are several, and none of them has the usual name.
    """
    folder = Path(run_dir).expanduser()
    if folder.is_file():
        return folder
    if not folder.is_dir():
        raise NoLogError(f"{str(run_dir)!r} is not there: pass the output_dir of a TrainingMonitor, or its log file")
    if (folder / DEFAULT_NAME).is_file():
        return folder / DEFAULT_NAME
    logs = [path for path in sorted(folder.glob("*.jsonl")) if _starts_a_run(path)]
    if not logs:
        raise NoLogError(
            f"{str(run_dir)!r} has no {DEFAULT_NAME} and no other log of a run: "
            "pass the output_dir of a TrainingMonitor, or its log file"
        )
    if len(logs) > 1:
        names = ", ".join(path.name for path in logs)
        raise InputError(f"{str(run_dir)!r} has several logs ({names}): pass the file you mean")
    return logs[0]


def _starts_a_run(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return parse_object(file.readline(_LONGEST_FIRST_LINE)).get("type") == "run"
    except (OSError, TornLineError):
        return False
