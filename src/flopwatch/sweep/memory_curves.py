"""Curves through peaks of memory over the batch, and the largest batch at which each stays within a capacity."""

import math
from collections.abc import Sequence
from typing import TypeAlias

Point: TypeAlias = tuple[int, int]
"""Batch size and bytes; points are sorted by batch size."""


def edge_of_line(points: Sequence[Point], capacity: int) -> int | None:
    """Of the straight line; None while it does not rise.

    Least squares, each batch with its own size squared as weight: the large ones are nearest the edge.

    >>> edge_of_line([(1, 310), (8, 380)], 1000)
    70
    """
    if len(points) < 2:
        return None
    total = sum(size**2 for size, _ in points)
    mean_size = sum(size**3 for size, _ in points) / total
    mean_peak = sum(size**2 * peak for size, peak in points) / total
    spread = sum(size**2 * (size - mean_size) ** 2 for size, _ in points)
    slope = sum(size**2 * (size - mean_size) * (peak - mean_peak) for size, peak in points) / spread
    if slope <= 0:
        return None
    return max(0, math.floor(mean_size + (capacity - mean_peak) / slope + 1e-9))


def edge_of_parabola(points: Sequence[Point], capacity: int) -> int | None:
    """Of the parabola through the three largest; None unless it bends upwards.

    >>> edge_of_parabola([(size, 100 + 3 * size + size**2) for size in (1, 8, 20)], 100 + 3 * 50 + 50**2)
    50
    """
    if len(points) < 3:
        return None
    (x0, y0), (x1, y1), (x2, y2) = points[-3:]
    slope01, slope12 = (y1 - y0) / (x1 - x0), (y2 - y1) / (x2 - x1)
    bend = (slope12 - slope01) / (x2 - x0)
    if bend <= 0:
        return None
    # y = y2 + slope (x - x2) + bend (x - x2)^2, solved for the capacity above x2
    slope = slope12 + bend * (x2 - x1)
    root = slope**2 + 4 * bend * (capacity - y2)
    return math.floor(x2 + (math.sqrt(root) - slope) / (2 * bend) + 1e-9) if root >= 0 else None
