"""Which rows of a log a notice doubts. Standard library only."""

from collections.abc import Sequence
from dataclasses import replace

from flopwatch.records.run import Notice, Row


def is_doubted(steps: Sequence[int], ranges: Sequence[tuple[int, int]]) -> bool:
    """Whether one of the steps is in one of the ranges, whose first and last steps belong to them."""
    return any(first <= step <= last for first, last in ranges for step in steps)


def marked(row: Row, notice: Notice) -> Row:
    """Return the row; as not exact, with the notice's message as the reason, if it has a step that the notice doubts.

    >>> marked(Row(9, 0.0, {}, exact=True), Notice(20, "warning", "rows_in_doubt", "a count differs", ((5, 10),))).notes
    ('a count differs',)
    """
    if row.exact is None or not is_doubted(row.steps.get("step") or (row.step,), notice.doubted):
        return row
    values = {**row.values, **({"perf/exact": 0} if "perf/exact" in row.values else {})}
    return replace(row, exact=False, values=values, notes=tuple(dict.fromkeys([*row.notes, notice.message])))
