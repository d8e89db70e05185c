"""One step out of the columns of its window."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flopwatch.errors import InputError
from flopwatch.run_log.reading import RunLog
from flopwatch.run_records import Provenance, Row


@dataclass(frozen=True, slots=True)
class StepCells:
    """What the log says of one step.

    Attributes:
        step: Its number.
        cells: Column to value, such as `seconds` and `model_flops`; what is not known has no key.
        row: Its window.
        provenance: Where its numbers come from; None when the log does not say.
    """

    step: int
    cells: Mapping[str, Any]
    row: Row
    provenance: Provenance | None


def step_cells(log: RunLog, step: int) -> StepCells:
    """Find a step in a log.

    Raises:
        InputError: The step is not in the log; the message says which are.
    """
    for row in log.rows:
        numbers = row.steps.get("step", ())
        if step in numbers:
            return StepCells(step, _cells(row.steps, numbers.index(step)), row, provenance_at(log, step))
    raise InputError(f"step {step} is not in {str(log.path)!r}: {_which_are(log, step)}")


def provenance_at(log: RunLog, step: int) -> Provenance | None:
    """What holds for a step: the last provenance that begins at it or before."""
    holding = [provenance for provenance in log.provenances if provenance.step <= step]
    return holding[-1] if holding else None


def _cells(columns: Mapping[str, Sequence[Any]], index: int) -> dict[str, Any]:
    cells = {name: column[index] for name, column in columns.items() if index < len(column)}
    return {name: cell for name, cell in cells.items() if cell is not None}


def _which_are(log: RunLog, step: int) -> str:
    spans = [(numbers[0], numbers[-1]) for row in log.rows if (numbers := row.steps.get("step"))]
    if not spans:
        return "it has no steps" + (" yet" if log.summary is None else "")
    first, last = spans[0][0], spans[-1][1]
    text = f"it has steps {first} to {last}"
    if first < step < last:
        before = max((span for span in spans if span[1] < step), default=None)
        after = min((span for span in spans if span[0] > step), default=None)
        nearest = " and ".join(f"{span[0]} to {span[1]}" for span in (before, after) if span)
        text += f", but not this one; the windows next to it are {nearest}"
    return text
