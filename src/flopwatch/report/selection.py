"""Show some of many, and say so."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from flopwatch.report.records import Choice, Group

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
