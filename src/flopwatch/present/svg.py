"""Helpers for SVG and HTML: escaping, scales, ticks and markers."""

import html
from collections.abc import Callable, Sequence
from math import ceil, floor, log10
from typing import NamedTuple

from flopwatch.language import _
from flopwatch.present.document import Bar
from flopwatch.text import one_line, plain

COLOURS = 8
_LONGEST_NAME = 50


def verbatim(text: object) -> str:
    """Escape text for HTML. All text that comes from trials enters the page through this function.

    >>> verbatim("<script>'")
    '&lt;script&gt;&#x27;'
    """
    return html.escape(plain(str(text)), quote=True)


def esc(text: object) -> str:
    """Escape text for HTML, in the reader's language."""
    return verbatim(_(text) if isinstance(text, str) else text)


def tipped(tip: str) -> str:
    return f' data-t="{esc(tip)}"' if tip else ""


def text(x: float, y: float, words: str, *, anchor: str = "start", style: str = "") -> str:
    extra = f' class="{style}"' if style else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{extra}>{esc(words)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
    return f'<line class="{style}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


class LinearScale(NamedTuple):
    """A linear axis that maps values from `low` to `high` to pixels from `start` to `end`; values beyond it are cut."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        if self.high <= self.low:
            return (self.start + self.end) / 2
        share = (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)


def linear_ticks(low: float, high: float, at_most: int = 5) -> list[float]:
    """Return round values from `low` to `high`.

    >>> linear_ticks(0, 42), linear_ticks(1.93, 2.02)
    ([0.0, 10.0, 20.0, 30.0, 40.0], [1.94, 1.96, 1.98, 2.0, 2.02])
    """
    if high <= low:
        return [low]
    power = 10.0 ** floor(log10((high - low) / at_most))
    size = next(size for size in (power, 2 * power, 5 * power, 10 * power) if (high - low) / size <= at_most)
    first, last = ceil(low / size - 1e-9), floor(high / size + 1e-9)
    return [float(f"{place * size:.12g}") for place in range(first, last + 1)]


def axes(left: float, right: float, y: LinearScale, ticks: Sequence[float], tick_text: Callable[[float], str]) -> str:
    parts = [line(left, y(tick), right, y(tick), "axis") for tick in ticks]
    parts += [text(left - 6, y(tick) + 3.5, tick_text(tick), anchor="end") for tick in ticks]
    return "".join(parts)


def bars_svg(bars: Sequence[Bar]) -> tuple[str, float, float]:
    """Draw bars below each other, each below its name. Returns the drawing, its width and its height."""
    parts, row, width = [], 33.0, 460.0
    for place, bar in enumerate(bars):
        top = 2 + row * place
        low, high = (4 + 452 * min(max(share, 0.0), 1.0) for share in (bar.low, bar.high))
        box = f'y="{top + 17:.1f}" height="10"'
        tone = bar.tone.rpartition(" ")[2]
        parts.append(f'<rect class="track" x="4" width="452" {box} rx="2"/>')
        parts.append(f'<rect class="fill {tone}" x="{low:.1f}" width="{max(high - low, 1.5):.1f}" {box} rx="2"/>')
        parts.append(text(4, top + 11, one_line(_(bar.name), _LONGEST_NAME), style="val"))
        parts.append(text(456, top + 11, bar.text, anchor="end", style="val"))
        parts.append(f'<rect class="tip" x="0" y="{top:.1f}" width="460" height="{row - 2:.0f}"{tipped(bar.tip)}/>')
    return "".join(parts), width, 4 + row * len(bars)
