"""The cost tables as an SVG, on a background of its own: it reads on light and dark pages."""

import math
from html import escape
from typing import Any

from overhead.contenders.tools import MONITORS, WAYS, Tool
from overhead.intervals import Interval
from overhead.overhead_page import Results
from overhead.results import bare_step_seconds, overheads

MARGIN = 20
LABEL_WIDTH = 232
PLOT_WIDTH = 250
VALUE_WIDTH = 84
PLOT_GAP = 16
ROW_HEIGHT = 30
WIDTH = 2 * MARGIN + LABEL_WIDTH + 2 * (PLOT_WIDTH + VALUE_WIDTH) + PLOT_GAP
CELL_WIDTH = (WIDTH - 2 * MARGIN - LABEL_WIDTH) // 5
TICK_COUNT = 4

STYLE = """
  text { font-family: -apple-system, "Segoe UI", "Helvetica Neue", Arial, "DejaVu Sans", sans-serif; fill: #1f2328 }
  .card { fill: #ffffff; stroke: #d1d9e0 }
  .title { font-size: 20px; font-weight: 600 }
  .group { font-size: 15px; font-weight: 600 }
  .small { font-size: 13px; fill: #59636e }
  .tick { font-size: 13px; fill: #59636e; text-anchor: middle }
  .label { font-size: 14px; text-anchor: end }
  .ours { font-weight: 600 }
  .value { font-size: 13px }
  .cell { font-size: 13px; text-anchor: middle }
  .grid { stroke: #d1d9e0 }
  .zero { stroke: #59636e }
  @media (prefers-color-scheme: dark) {
    text { fill: #f0f6fc }
    .card { fill: #0d1117; stroke: #3d444d }
    .small, .tick { fill: #9198a1 }
    .grid { stroke: #3d444d }
    .zero { stroke: #9198a1 }
  }
"""
OURS, THEIRS = "#2a8548", "#8250df"
GRADES = [(0.01, "#2a8548", "#ffffff"), (0.05, "#f7dc6f", "#222222"), (0.2, "#f0a04b", "#222222")]
WORST = ("#c9403b", "#ffffff")


def picture(results: Results) -> str:
    top = 132
    raws = list(results["rivals"].values())
    tools = [tool for tool in MONITORS if tool.name in {**raws[0]["pairs"], **raws[0]["failures"]}]
    first_bottom = top + ROW_HEIGHT * len(tools)
    ways, bottom = _ways(results["frequency"], first_bottom + 86)
    height = bottom + 46
    subtitle = (
        "How much longer a step takes than in the bare loop run in turns with it, in one process. Less is better."
    )
    source = f"{results['date']}, on a CPU that others use too; lines are 95 % bootstrap intervals"
    parts = [
        f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>',
        _text(MARGIN, 32, "title", "What watching a training costs"),
        _text(MARGIN, 54, "small", subtitle),
        _text(MARGIN, 90, "group", "Monitors as people use them"),
        *_labels(tools, top),
        *(part for index, raw in enumerate(raws) for part in _plot(raw, tools, _plot_left(index), top)),
        *ways,
        _text(MARGIN, height - 18, "small", f"{source}. python benchmarks/overhead/monitor_overhead.py"),
    ]
    size = f'width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
    body = "\n".join(parts)
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">\n<style>{STYLE}</style>\n{body}\n</svg>\n'


def _plot_left(index: int) -> int:
    return MARGIN + LABEL_WIDTH + index * (PLOT_WIDTH + VALUE_WIDTH + PLOT_GAP)


def _labels(tools: list[Tool], top: int) -> list[str]:
    return [
        _text(
            MARGIN + LABEL_WIDTH - 12,
            top + ROW_HEIGHT * (row + 0.5) + 5,
            "label ours" if tool.name == "flopwatch" else "label",
            tool.title,
        )
        for row, tool in enumerate(tools)
    ]


def _plot(raw: Any, tools: list[Tool], left: int, top: int) -> list[str]:
    """A dot and its interval per monitor, on one linear axis."""
    found = overheads(raw)
    bottom = top + ROW_HEIGHT * len(tools)
    ticks = _ticks(min(f.low for f in found.values()), max(f.high for f in found.values()))

    def x(share: float) -> float:
        return left + PLOT_WIDTH * (share - ticks[0]) / (ticks[-1] - ticks[0])

    parts = [_text(left, top - 14, "small", f"steps of {bare_step_seconds(raw) * 1e3:.0f} ms")]
    for tick in ticks:
        css_class = "zero" if tick == 0 else "grid"
        parts.append(f'<line class="{css_class}" x1="{x(tick):g}" x2="{x(tick):g}" y1="{top}" y2="{bottom}"/>')
        parts.append(_text(x(tick), bottom + 18, "tick", f"{100 * tick:+g} %" if tick else "0"))
    for row, tool in enumerate(tools):
        y = top + ROW_HEIGHT * (row + 0.5)
        if tool.name in found:
            parts += _dot(x, y, found[tool.name], OURS if tool.name == "flopwatch" else THEIRS)
            parts.append(_text(left + PLOT_WIDTH + 14, y + 5, "value", _percent(found[tool.name].value)))
        else:
            parts.append(_text(x(0) + 8, y + 5, "small", "does not run without CUDA"))
    return parts


def _dot(x: Any, y: float, interval: Interval, colour: str) -> list[str]:
    left, right = x(interval.low), x(interval.high)
    return [
        f'<line x1="{left:g}" x2="{right:g}" y1="{y:g}" y2="{y:g}" stroke="{colour}" stroke-width="3"/>',
        f'<circle cx="{x(interval.value):g}" cy="{y:g}" r="5.5" fill="{colour}"/>',
    ]


def _ways(by_frequency: Any, top: int) -> tuple[list[str], int]:
    """A coloured cell per way to measure and frequency."""
    found = {int(every): overheads(raw) for every, raw in by_frequency.items()}
    seconds = min(bare_step_seconds(raw) for raw in by_frequency.values())
    parts = [_text(MARGIN, top - 14, "group", f"By measuring frequency, on steps of {seconds * 1e3:.0f} ms")]
    left = MARGIN + LABEL_WIDTH
    for column, every in enumerate(found):
        heading = f"every {every} steps" if every > 1 else "every step"
        parts.append(_text(left + CELL_WIDTH * (column + 0.5), top + 14, "tick", heading))
    tools = [way for way in WAYS if any(way.name in values for values in found.values())]
    for row, tool in enumerate(tools):
        y = top + 26 + ROW_HEIGHT * row
        css_class = "label ours" if tool.title.startswith("flopwatch") else "label"
        parts.append(_text(left - 12, y + 19, css_class, tool.title))
        for column, values in enumerate(found.values()):
            if tool.name in values:
                parts += _cell(left + CELL_WIDTH * column, y, values[tool.name])
    return parts, top + 26 + ROW_HEIGHT * len(tools)


def _cell(left: float, y: float, interval: Interval) -> list[str]:
    fill, ink = next(((fill, ink) for limit, fill, ink in GRADES if interval.value <= limit), WORST)
    box = f'x="{left + 1:g}" y="{y + 1:g}" width="{CELL_WIDTH - 2}" height="{ROW_HEIGHT - 2}" rx="3"'
    spread = 100 * (interval.high - interval.low) / 2
    text = f"{_percent(interval.value)} ± {spread:.{1 if spread < 10 else 0}f}"
    middle = left + CELL_WIDTH / 2
    return [f'<rect {box} fill="{fill}"/>', _text(middle, y + 19, "cell", text, f' style="fill: {ink}"')]


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers around the values, 0 among them."""
    low, high = min(low, 0.0), max(high, 0.0)
    steps = [digit * 10.0**power for power in range(-3, 2) for digit in (1, 2, 5)]
    step = next(step for step in steps if step * TICK_COUNT >= high - low)
    return [round(number * step, 6) for number in range(math.floor(low / step), math.ceil(high / step) + 1)]


def _percent(share: float) -> str:
    value = 100 * share
    return f"{value:+.{0 if abs(value) >= 100 else 1}f} %"


def _text(x: float, y: float, css_class: str, text: str, extra: str = "") -> str:
    return f'<text class="{css_class}" x="{x:g}" y="{y:g}"{extra}>{escape(text)}</text>'
