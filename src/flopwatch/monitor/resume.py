"""Where an earlier session of the same run left off."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from flopwatch.monitor.ledger import Ledger
from flopwatch.monitor.meter import MeasuredStep
from flopwatch.run_log import rows_from_end


class ResumePoint(NamedTuple):
    """The last step that counts, and the totals up to it."""

    step: int
    ledger: Ledger


def find_resume_point(log: Path, first_step: int) -> ResumePoint | None:
    """What was logged before `first_step`; None when the run starts afresh.

    A training that goes back to a checkpoint runs steps again: what was logged of them does not count twice. Where the
    checkpoint lies inside a window, its first steps are taken from the window's columns.
    """
    if first_step <= 1 or not log.is_file():
        return None
    later: Mapping[str, Any] | None = None
    for row in rows_from_end(log):
        if row["step"] < first_step and row.get("ledger"):
            ledger = Ledger.from_json(row["ledger"])
            rest = [step for step in _steps(later) if row["step"] < step.step < first_step]
            ledger.add_steps(rest)
            return ResumePoint(rest[-1].step if rest else row["step"], ledger)
        later = row
    return None


def _steps(row: Mapping[str, Any] | None) -> list[MeasuredStep]:
    columns = dict(row["steps"]) if row is not None else {}
    columns["is_warm_up"] = columns.pop("warm_up", [False] * len(columns.get("step", ())))
    names = [name for name in columns if name in MeasuredStep._fields]
    return [
        MeasuredStep(**dict(zip(names, cells, strict=True)))
        for cells in zip(*(columns[name] for name in names), strict=True)
    ]
