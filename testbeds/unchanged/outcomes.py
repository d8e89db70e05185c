"""Runs a script of this folder in three ways, and reads what it printed and what flopwatch logged."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from testbeds.unchanged.scripts import Script

Way = Literal["python", "flopwatch run", "written in"]
WAYS: tuple[Way, ...] = ("python", "flopwatch run", "written in")

Start = Callable[[Sequence[str], int], str]
"""Runs `python` with these arguments in this number of ranks; returns what they printed to stdout. Raises if one
fails."""


@dataclass(frozen=True)
class Outcome:
    """What one run printed and logged.

    Attributes:
        printed: What it wrote to stdout; lines of several ranks in the order of their text.
        steps: Values of each logged step by the step's number; None if there is no log.
        notices: Messages by their code.
        is_exact: Whether all logged rows are exact; None if that is not known.
        why_not_exact: The reasons in the last row that is not exact.
    """

    printed: str
    steps: dict[int, dict[str, Any]] | None = None
    notices: dict[str, str] = field(default_factory=dict)
    is_exact: bool | None = None
    why_not_exact: str = ""


def run(script: Script, way: Way, folder: Path, start: Start) -> Outcome:
    """Run the script with output and log in this folder."""
    log = folder / "log"
    command = [str(script.file)]
    if way == "written in":
        command = [str(folder / script.file.name)]
        Path(command[0]).write_text(script.with_monitor(log), "utf-8")
    if way == "flopwatch run":
        command = ["-m", "flopwatch", "run", "--output-dir", str(log), *command]
    printed = start([*command, str(folder / "own")], script.ranks)
    if script.ranks > 1:
        printed = "".join(sorted(printed.splitlines(keepends=True)))
    return read_log(printed, log / "training_log.jsonl")


def read_log(printed: str, log: Path) -> Outcome:
    if not log.exists():
        return Outcome(printed)
    records = [json.loads(line) for line in log.read_text("utf-8").splitlines()]
    rows = [record for record in records if record["type"] == "row"]
    steps: dict[int, dict[str, Any]] = {}
    for row in rows:
        columns = {name: values for name, values in row["steps"].items() if _is_the_same_every_time(name)}
        for position, number in enumerate(row["steps"]["step"]):
            steps[number] = {name: values[position] for name, values in columns.items()}
    notices = {record["code"]: record["message"] for record in records if record["type"] == "notice"}
    known = [row.get("exact") for row in rows]
    reasons = [", ".join(row.get("notes", ())) for row in rows if row.get("exact") is False]
    return Outcome(printed, steps, notices, None if None in known else all(known), reasons[-1] if reasons else "")


def _is_the_same_every_time(name: str) -> bool:
    """Times are not, nor is the end of the warm-up, which is found from times."""
    return name not in ("step", "warm_up") and not name.endswith("seconds")
