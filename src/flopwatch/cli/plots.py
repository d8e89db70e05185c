"""Pictures made of characters: a curve, a divided bar, large digits. Pure text, no colours, no rich."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import floor

Points = Sequence[tuple[float, float]]

_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""Bits of a braille character: two columns of four dots, from the top."""
_BRAILLE = 0x2800

_DIGITS = {
    "0": ("█▀█", "█ █", "▀▀▀"),
    "1": ("▀█ ", " █ ", "▀▀▀"),
    "2": ("▀▀█", "█▀▀", "▀▀▀"),
    "3": ("▀▀█", " ▀█", "▀▀▀"),
    "4": ("█ █", "▀▀█", "  ▀"),
    "5": ("█▀▀", "▀▀█", "▀▀▀"),
    "6": ("█▀▀", "█▀█", "▀▀▀"),
    "7": ("▀▀█", "  █", "  ▀"),
    "8": ("█▀█", "█▀█", "▀▀▀"),
    "9": ("█▀█", "▀▀█", "▀▀▀"),
    ".": (" ", " ", "▀"),
    ",": (" ", " ", "█"),
    "-": ("   ", "▀▀▀", "   "),
}


def draw_curve(points: Points, width: int, height: int, low: float, high: float) -> list[str]:
    """A curve as lines of braille, two by four dots to a character.

    What lies outside `low` to `high` runs along the edge.

    >>> draw_curve([(0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0)], width=2, height=1, low=0.0, high=3.0)
    ['⡠⠊']
    """
    columns = _column_means(points, 2 * width)
    dots = 4 * height
    cells = [[0] * width for _ in range(height)]
    before: int | None = None
    for column, value in enumerate(columns):
        if value is None:
            continue
        level = _level(value, low, high, dots)
        # Joined to the point before, so that a steep curve has no holes.
        reach = level if before is None else before + (1 if level > before else -1 if level < before else 0)
        for dot in range(min(level, reach), max(level, reach) + 1):
            from_top = dots - 1 - dot
            cells[from_top // 4][column // 2] |= _DOTS[column % 2][from_top % 4]
        before = level
    return ["".join(chr(_BRAILLE | cell) if cell else " " for cell in line) for line in cells]


def _column_means(points: Points, columns: int) -> list[float | None]:
    if not points:
        return [None] * columns
    first, last = points[0][0], points[-1][0]
    sums, counts = [0.0] * columns, [0] * columns
    for x, value in points:
        column = min(floor((x - first) / (last - first) * columns), columns - 1) if last > first else 0
        sums[column] += value
        counts[column] += 1
    means = [total / count if count else None for total, count in zip(sums, counts, strict=True)]
    return _filled(means)


def _filled(means: list[float | None]) -> list[float | None]:
    """Columns between two known ones lie on the line between them."""
    known = [index for index, value in enumerate(means) if value is not None]
    for left, right in pairwise(known):
        start, end = means[left], means[right]
        for index in range(left + 1, right):
            if start is not None and end is not None:
                means[index] = start + (end - start) * (index - left) / (right - left)
    return means


def _level(value: float, low: float, high: float, dots: int) -> int:
    share = (value - low) / (high - low) if high > low else 0.5
    return min(max(floor(share * dots), 0), dots - 1)


def shown_range(values: Sequence[float], least_share: float = 0.0) -> tuple[float, float]:
    """The range of an axis. A steep beginning may leave the picture, so that what comes after can be seen.

    Args:
        values: What is drawn.
        least_share: The range is at least this share of the values, so that noise looks as small as it is.

    >>> shown_range([10.0, 3.0] + [2.0] * 50 + [1.5] * 50)
    (1.5, 2.0)
    >>> shown_range([9.75, 10.25], least_share=0.2)
    (9.0, 11.0)
    """
    low, high = min(values), max(values)
    later = values[len(values) // 10 :]
    if high - low > 2 * (max(later) - min(later)) > 0:
        low, high = min(later), max(later)
    missing = least_share * abs(low + high) / 2 - (high - low)
    return (low - missing / 2, high + missing / 2) if missing > 0 else (low, high)


def divide_bar(shares: Mapping[str, float], width: int) -> dict[str, int]:
    """How many characters of a bar each share gets: `width` in all, by largest remainder.

    >>> divide_bar({"a": 2.0, "b": 1.0}, width=10)
    {'a': 7, 'b': 3}
    """
    whole = sum(shares.values())
    if whole <= 0:
        return dict.fromkeys(shares, 0)
    exact = {name: share / whole * width for name, share in shares.items()}
    cells = {name: floor(size) for name, size in exact.items()}
    left = width - sum(cells.values())
    for name in sorted(exact, key=lambda name: cells[name] - exact[name])[:left]:
        cells[name] += 1
    return cells


def large(number: str) -> list[str] | None:
    r"""Three lines that show a number in large digits; None for what has other characters.

    >>> print(*large("41.5"), sep="\n")
    █ █ ▀█    █▀▀
    ▀▀█  █    ▀▀█
      ▀ ▀▀▀ ▀ ▀▀▀
    """
    if not number or any(character not in _DIGITS for character in number):
        return None
    return [" ".join(_DIGITS[character][line] for character in number) for line in range(3)]
