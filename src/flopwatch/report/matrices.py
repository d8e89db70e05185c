"""The matrices of a group, one per quantity, and which rows and columns of a large sweep are shown.

Rows are sequence length x batch size, columns are trainers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from flopwatch.number_format import UNKNOWN, byte_size, number, percent, step_time
from flopwatch.report.analysis.summarise import MOST_COLUMNS
from flopwatch.report.analysis.verdicts import differ_measurably
from flopwatch.report.records import Cell, Choice, Group, Quantity
from flopwatch.report.sentences import outcome_word


class Metric(NamedTuple):
    """A quantity of a matrix.

    Attributes:
        key: Its name for `--metric`.
        title: Its heading.
        value: Reads it from a cell; None when unknown.
        text: The figure as it is shown.
        better: `min` or `max`, to mark the best of a row; None for HFU, which recomputation alone raises.
        quantity: Whose measurement decides whether two cells differ.
    """

    key: str
    title: str
    value: Callable[[Cell], float | None]
    text: Callable[[Cell], str]
    better: Callable[..., Any] | None
    quantity: Quantity = "time"


def _time_text(cell: Cell) -> str:
    if cell.seconds is None:
        return UNKNOWN
    unstable = "~" if cell.is_unstable else ""
    if cell.low_seconds is None or cell.high_seconds is None:
        return f"{unstable}{step_time(cell.seconds)}"
    half_width = (cell.high_seconds - cell.low_seconds) / 2 / cell.seconds
    return f"{unstable}{step_time(cell.seconds)} ±{_narrow_percent(100 * half_width)}"


def _narrow_percent(value: float) -> str:
    """Without a space: the matrix has a column of 15 characters for each trainer."""
    return f"{value:.0f}%" if value >= 2 else f"{value:.1f}%"


def _flops_share(cell: Cell, value: float | None) -> str:
    return (">" if cell.is_lower_bound and value is not None else "") + percent(value)


METRICS: Mapping[str, Metric] = {
    metric.key: metric
    for metric in (
        Metric("memory", "Peak memory", lambda c: c.peak_bytes, lambda c: byte_size(c.peak_bytes), min, "memory"),
        Metric("time", "Median step time", lambda c: c.seconds, _time_text, min),
        Metric("tokens", "Tokens per second", lambda c: c.tokens_per_s, lambda c: number(c.tokens_per_s), max),
        Metric("samples", "Samples per second", lambda c: c.samples_per_s, lambda c: number(c.samples_per_s), max),
        Metric("mfu", "MFU", lambda c: c.mfu, lambda c: _flops_share(c, c.mfu), max),
        Metric("hfu", "HFU", lambda c: c.hfu, lambda c: _flops_share(c, c.hfu), None),
    )
}


class MatrixRow(NamedTuple):
    """One sequence length and batch size. Cells are in the order of the trainers, None where no trial was planned."""

    seq_len: int
    batch_size: int
    cells: tuple[Cell | None, ...]


def matrix_rows(group: Group) -> list[MatrixRow]:
    by_place = {(cell.seq_len, cell.batch_size, cell.trainer): cell for cell in group.cells}
    places = sorted({(cell.seq_len, cell.batch_size) for cell in group.cells})
    return [MatrixRow(*place, tuple(by_place.get((*place, name)) for name in group.trainers)) for place in places]


def known_metrics(group: Group) -> list[Metric]:
    """Metrics that at least one cell has; samples per second only where tokens per second are unknown."""
    known = [m for m in METRICS.values() if any(m.value(cell) is not None for cell in group.cells)]
    has_tokens = any(metric.key == "tokens" for metric in known)
    return [metric for metric in known if not (metric.key == "samples" and has_tokens)]


def cell_text(cell: Cell | None, metric: Metric) -> str:
    """The figure, or how the trial ended."""
    if cell is None:
        return ""
    return metric.text(cell) if cell.outcome == "ok" else outcome_word(cell.outcome)


def best_trials(cells: Sequence[Cell | None], metric: Metric) -> set[str]:
    """The best of a row in each privacy class, where it differs measurably from all others of its class."""
    best: set[str] = set()
    known = [cell for cell in cells if cell is not None and metric.value(cell) is not None]
    for privacy in {cell.privacy for cell in known}:
        rivals = [cell for cell in known if cell.privacy == privacy]
        if len(rivals) < 2 or metric.better is None:
            continue
        first: Cell = metric.better(rivals, key=metric.value)
        if all(differ_measurably(first, other, metric.quantity) for other in rivals if other is not first):
            best.add(first.trial)
    return best


Item = TypeVar("Item")


def evenly(items: Sequence[Item], at_most: int) -> list[Item]:
    """At most so many items: the first, the last, and evenly spaced ones between.

    >>> evenly([1, 2, 3, 4, 5, 6, 7], 3), evenly([1, 2], 3)
    ([1, 4, 7], [1, 2])
    """
    if len(items) <= at_most:
        return list(items)
    if at_most == 1:
        return [items[-1]]
    return [items[round(place * (len(items) - 1) / (at_most - 1))] for place in range(at_most)]


def some_choices(choices: Sequence[Choice], at_most: int) -> list[Choice]:
    """The choices at evenly spaced sequence lengths, with every privacy class of each."""
    per_length = max(len({choice.privacy for choice in choices}), 1)
    lengths = sorted({choice.seq_len for choice in choices})
    kept = set(evenly(lengths, max(at_most // per_length, 2)))
    return [choice for choice in choices if choice.seq_len in kept]


def narrowed(group: Group, at_most: int = MOST_COLUMNS) -> Group:
    """The group with only its first columns."""
    if len(group.trainers) <= at_most:
        return group
    return with_columns(group, group.trainers[:at_most])


def with_columns(group: Group, trainers: Sequence[str]) -> Group:
    kept = set(trainers)
    return replace(
        group,
        trainers=tuple(trainers),
        cells=tuple(cell for cell in group.cells if cell.trainer in kept),
        cost_factors=tuple(one for one in group.cost_factors if one.trainer in kept),
        frontier=tuple(point for point in group.frontier if point.trainer in kept),
    )


def column_chunks(group: Group, at_most: int) -> list[Group]:
    """The group cut into pieces that are narrow enough for a terminal."""
    if len(group.trainers) <= at_most:
        return [group]
    starts = range(0, len(group.trainers), at_most)
    return [with_columns(group, group.trainers[start : start + at_most]) for start in starts]
