"""Matrices of a group: rows sequence length x batch size, columns trainers, one per quantity."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from flopwatch.report.analysis.verdicts import is_told_apart
from flopwatch.report.figures import UNKNOWN, digits, memory, outcome_word, share, step_seconds
from flopwatch.report.records import Cell, Choice, Group, Quantity


class Metric(NamedTuple):
    """A quantity of a matrix.

    Attributes:
        key: On the command line.
        title: With its unit.
        value: Of a cell; None when unknown.
        text: As it is written.
        better: Which end is better for marking the best of a row; a higher HFU alone is no merit.
        quantity: What decides whether two differ.
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
        return f"{unstable}{step_seconds(cell.seconds)}"
    half_width = (cell.high_seconds - cell.low_seconds) / 2 / cell.seconds
    return f"{unstable}{step_seconds(cell.seconds)} ±{_percent(100 * half_width)}"


def _percent(value: float) -> str:
    return f"{value:.0f}%" if value >= 2 else f"{value:.1f}%"


def _flops_share(cell: Cell, value: float | None) -> str:
    return (">" if cell.is_lower_bound and value is not None else "") + share(value)


METRICS: Mapping[str, Metric] = {
    metric.key: metric
    for metric in (
        Metric("memory", "Peak memory", lambda c: c.peak_bytes, lambda c: memory(c.peak_bytes), min, "memory"),
        Metric("time", "Median step time", lambda c: c.seconds, _time_text, min),
        Metric("tokens", "Tokens per second", lambda c: c.tokens_per_s, lambda c: digits(c.tokens_per_s), max),
        Metric("samples", "Samples per second", lambda c: c.samples_per_s, lambda c: digits(c.samples_per_s), max),
        Metric("mfu", "MFU", lambda c: c.mfu, lambda c: _flops_share(c, c.mfu), max),
        Metric("hfu", "HFU", lambda c: c.hfu, lambda c: _flops_share(c, c.hfu), None),
    )
}


class MatrixRow(NamedTuple):
    """One sequence length and batch size; cells in the order of the group's trainers, None where not asked for."""

    seq_len: int
    batch_size: int
    cells: tuple[Cell | None, ...]


def matrix_rows(group: Group) -> list[MatrixRow]:
    by_place = {(cell.seq_len, cell.batch_size, cell.trainer): cell for cell in group.cells}
    places = sorted({(cell.seq_len, cell.batch_size) for cell in group.cells})
    return [MatrixRow(*place, tuple(by_place.get((*place, name)) for name in group.trainers)) for place in places]


def known_metrics(group: Group) -> list[Metric]:
    """Those that any cell has; samples per second only where there are no tokens."""
    known = [m for m in METRICS.values() if any(m.value(cell) is not None for cell in group.cells)]
    has_tokens = any(metric.key == "tokens" for metric in known)
    return [metric for metric in known if not (metric.key == "samples" and has_tokens)]


def cell_text(cell: Cell | None, metric: Metric) -> str:
    """The figure, or how the trial ended."""
    if cell is None:
        return ""
    return metric.text(cell) if cell.outcome == "ok" else outcome_word(cell.outcome)


def best_trials(cells: Sequence[Cell | None], metric: Metric) -> set[str]:
    """The best of a row in each privacy class, if the measurement tells it from the others of its class."""
    best: set[str] = set()
    known = [cell for cell in cells if cell is not None and metric.value(cell) is not None]
    for privacy in {cell.privacy for cell in known}:
        rivals = [cell for cell in known if cell.privacy == privacy]
        if len(rivals) < 2 or metric.better is None:
            continue
        first: Cell = metric.better(rivals, key=metric.value)
        if all(is_told_apart(first, other, metric.quantity) for other in rivals if other is not first):
            best.add(first.trial)
    return best


# Show some of many, and say so.


Item = TypeVar("Item")
MOST_COLUMNS = 16
"""More trainers, options or seeds side by side than this nobody reads."""


def evenly(items: Sequence[Item], at_most: int) -> list[Item]:
    """First, last, and evenly between.

    >>> evenly([1, 2, 3, 4, 5, 6, 7], 3), evenly([1, 2], 3)
    ([1, 4, 7], [1, 2])
    """
    if len(items) <= at_most:
        return list(items)
    if at_most == 1:
        return [items[-1]]
    return [items[round(place * (len(items) - 1) / (at_most - 1))] for place in range(at_most)]


def some_choices(choices: Sequence[Choice], at_most: int) -> list[Choice]:
    """Those of evenly chosen sequence lengths, every class of each."""
    per_length = max(len({choice.privacy for choice in choices}), 1)
    lengths = sorted({choice.seq_len for choice in choices})
    kept = set(evenly(lengths, max(at_most // per_length, 2)))
    return [choice for choice in choices if choice.seq_len in kept]


def narrowed(group: Group, at_most: int = MOST_COLUMNS) -> Group:
    """The group with its first columns only."""
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
    """The group in pieces that fit side by side; one piece when it is narrow."""
    if len(group.trainers) <= at_most:
        return [group]
    starts = range(0, len(group.trainers), at_most)
    return [with_columns(group, group.trainers[start : start + at_most]) for start in starts]
