"""The accuracy table as an SVG for the README, on a background of its own: it reads on light and dark pages."""

from html import escape
from itertools import groupby

from accuracy.accuracy_page import shown_columns
from accuracy.columns import Column
from accuracy.counters import BATCH_SIZE, SEQ_LEN
from accuracy.outcomes import NEAR, OFF, Grade, Results, cell_text, grade

MARGIN = 20
LABEL_WIDTH = 112
CELL_WIDTH = 68
CELL_HEIGHT = 25
GROUP_GAP = 10
TITLE_HEIGHT = 76
HEADER_HEIGHT = 66
FOOTER_HEIGHT = 66

FILLS: dict[Grade, str] = {
    "exact": "#2a8548",
    "near": "#f7dc6f",
    "off": "#f0a04b",
    "wrong": "#c9403b",
    "none": "#b8bec6",
}
INKS: dict[Grade, str] = {
    "exact": "#ffffff",
    "near": "#222222",
    "off": "#222222",
    "wrong": "#ffffff",
    "none": "#222222",
}
LEGEND: list[tuple[Grade, str]] = [
    ("exact", "equal to the FLOP"),
    ("near", f"within {NEAR:.0%}"),
    ("off", f"within {OFF:.0%}"),
    ("wrong", "further off"),
    ("none", "no number"),
]

STYLE = """
  text { font-family: -apple-system, "Segoe UI", "Helvetica Neue", Arial, "DejaVu Sans", sans-serif; fill: #1f2328 }
  .card { fill: #ffffff; stroke: #d1d9e0 }
  .title { font-size: 20px; font-weight: 600 }
  .small { font-size: 13px; fill: #59636e }
  .group { font-size: 14px; font-weight: 600; text-anchor: middle }
  .head { font-size: 13px; text-anchor: middle }
  .label { font-size: 14px; text-anchor: end }
  .cell { font-size: 14px; text-anchor: middle }
  .total { font-size: 14px; font-weight: 600; text-anchor: middle }
  @media (prefers-color-scheme: dark) {
    text { fill: #f0f6fc }
    .card { fill: #0d1117; stroke: #3d444d }
    .small { fill: #9198a1 }
  }
"""


def picture(truths: dict[str, int], results: Results) -> str:
    columns = shown_columns(results)
    lefts = _column_lefts(columns)
    width = max(lefts.values()) + CELL_WIDTH + MARGIN
    top = TITLE_HEIGHT + HEADER_HEIGHT
    bottom = top + CELL_HEIGHT * len(truths)
    parts = [
        f'<rect class="card" x="0.5" y="0.5" width="{width - 1}" height="{bottom + FOOTER_HEIGHT - 1}" rx="8"/>',
        _text(MARGIN, 32, "title", "FLOPs of one training step: what the tools say against the truth"),
        _text(MARGIN, 54, "small", _subtitle(truths)),
        *_headers(columns, lefts),
        *_rows(truths, results, lefts, top),
        *_totals(truths, results, lefts, bottom),
        *_legend(bottom + 50),
    ]
    size = f'width="{width}" height="{bottom + FOOTER_HEIGHT}" viewBox="0 0 {width} {bottom + FOOTER_HEIGHT}"'
    body = "\n".join(parts)
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">\n<style>{STYLE}</style>\n{body}\n</svg>\n'


def _subtitle(truths: dict[str, int]) -> str:
    size = f"batch {BATCH_SIZE} x {SEQ_LEN}"
    return f"{len(truths)} small Hugging Face models, {size}, on a CPU; beyond half or double the cell is count / truth"


def _column_lefts(columns: list[Column]) -> dict[str, int]:
    lefts: dict[str, int] = {}
    left = MARGIN + LABEL_WIDTH
    for _, members in groupby(columns, key=lambda column: column.group):
        for column in members:
            lefts[column.tool] = left
            left += CELL_WIDTH
        left += GROUP_GAP
    return lefts


def _headers(columns: list[Column], lefts: dict[str, int]) -> list[str]:
    parts = []
    for group, members in groupby(columns, key=lambda column: column.group):
        tools = [column.tool for column in members]
        middle = (lefts[tools[0]] + lefts[tools[-1]] + CELL_WIDTH) / 2
        parts.append(_text(middle, TITLE_HEIGHT + 14, "group", group))
    for column in columns:
        middle = lefts[column.tool] + CELL_WIDTH / 2
        for line_number, line in enumerate(column.heading.splitlines()):
            parts.append(_text(middle, TITLE_HEIGHT + 38 + 16 * line_number, "head", line))
    return parts


def _rows(truths: dict[str, int], results: Results, lefts: dict[str, int], top: int) -> list[str]:
    parts = []
    for row, (name, truth) in enumerate(truths.items()):
        y = top + CELL_HEIGHT * row
        parts.append(_text(MARGIN + LABEL_WIDTH - 10, y + 17, "label", name))
        for tool, left in lefts.items():
            parts += _cell(left, y, cell_text(results[tool][name], truth), grade(results[tool][name], truth))
    return parts


def _cell(left: int, y: int, text: str, cell_grade: Grade) -> list[str]:
    box = f'x="{left + 1}" y="{y + 1}" width="{CELL_WIDTH - 2}" height="{CELL_HEIGHT - 2}" rx="3"'
    return [
        f'<rect {box} fill="{FILLS[cell_grade]}"/>',
        _text(left + CELL_WIDTH / 2, y + 17, "cell", text, f' style="fill: {INKS[cell_grade]}"'),
    ]


def _totals(truths: dict[str, int], results: Results, lefts: dict[str, int], y: int) -> list[str]:
    parts = [_text(MARGIN + LABEL_WIDTH - 10, y + 20, "label", "exact")]
    for tool, left in lefts.items():
        exact = sum(results[tool][name].flops == truth for name, truth in truths.items())
        parts.append(_text(left + CELL_WIDTH / 2, y + 20, "total", f"{exact}/{len(truths)}"))
    return parts


def _legend(y: int) -> list[str]:
    parts = []
    left = MARGIN + LABEL_WIDTH
    for legend_grade, meaning in LEGEND:
        parts.append(f'<rect x="{left}" y="{y - 12}" width="16" height="16" rx="3" fill="{FILLS[legend_grade]}"/>')
        parts.append(_text(left + 23, y + 1, "small", meaning))
        left += 52 + 7 * len(meaning)
    return parts


def _text(x: float, y: float, css_class: str, text: str, extra: str = "") -> str:
    return f'<text class="{css_class}" x="{x:g}" y="{y:g}"{extra}>{escape(text)}</text>'
