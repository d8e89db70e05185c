"""Exact solution of small linear systems, in rational numbers: a law that is off by one FLOP is no law."""

from collections.abc import Sequence
from fractions import Fraction


def solve(matrix: Sequence[Sequence[int]], values: Sequence[int]) -> list[Fraction] | None:
    """Gaussian elimination of a square system; None when it has no single solution.

    >>> solve([[1, 1], [1, 2]], [3, 5])
    [Fraction(1, 1), Fraction(2, 1)]
    """
    rows = [[Fraction(x) for x in (*row, value)] for row, value in zip(matrix, values, strict=True)]
    size = len(rows)
    for column in range(size):
        pivot = next((index for index in range(column, size) if rows[index][column]), None)
        if pivot is None:
            return None
        rows[column], rows[pivot] = rows[pivot], rows[column]
        head = rows[column][column]
        rows[column] = [x / head for x in rows[column]]
        for index, row in enumerate(rows):
            if index != column and row[column]:
                factor = row[column]
                rows[index] = [x - factor * y for x, y in zip(row, rows[column], strict=True)]
    return [row[-1] for row in rows]
