"""Lines of a screen: each a `rich` text that fits, so that a frame's height is the number of its lines."""

import textwrap
from collections.abc import Iterable, Sequence

from rich.text import Text


def line(*parts: str | tuple[str, str]) -> Text:
    """One line of pieces, plain or with a style."""
    return Text.assemble(*parts, no_wrap=True, overflow="ellipsis")


def spread(left: Text, right: Text, width: int) -> Text:
    """One at the left edge, one at the right; the left one gives way."""
    room = max(width - right.cell_len - 1, 0)
    fitted = left.copy()
    fitted.truncate(room, overflow="ellipsis", pad=True)
    return line() + fitted + Text(" ") + right


def beside(columns: Sequence[tuple[int, Sequence[Text]]], gap: int) -> list[Text]:
    """Blocks next to each other, each cut or filled to its width."""
    height = max(len(block) for _, block in columns)
    rows = []
    for index in range(height):
        cells = [block[index].copy() if index < len(block) else Text() for _, block in columns]
        for (width, _), cell in zip(columns, cells, strict=True):
            cell.truncate(width, overflow="ellipsis", pad=True)
        row = line() + Text(" " * gap).join(cells)
        row.rstrip()
        rows.append(row)
    return rows


def flow(items: Iterable[Text], width: int, gap: int = 2) -> list[Text]:
    """Items one after the other, in as many lines as they need."""
    lines: list[Text] = []
    for item in items:
        if lines and lines[-1].cell_len + gap + item.cell_len <= width:
            lines[-1] = lines[-1] + Text(" " * gap) + item
        else:
            lines.append(line() + item)
    return lines


def paragraph(text: str, width: int, style: str = "") -> list[Text]:
    return [line((piece, style)) for piece in textwrap.wrap(text, max(width, 10))]
