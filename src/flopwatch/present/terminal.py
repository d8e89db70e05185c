"""Show a document in a terminal, with rich. Text of users is never markup here, and steers no terminal."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len, set_cell_size
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from flopwatch.language import _
from flopwatch.present import document as doc
from flopwatch.text import cells, one_line, plain, wrapped

STYLES = {
    **dict.fromkeys(("", "chip", "verdict"), ""),
    **dict.fromkeys(("strong", "best"), "bold"),
    **dict.fromkeys(("soft", "note", "not-run"), "dim"),
    **dict.fromkeys(("ok", "better", "rest"), "green"),
    **dict.fromkeys(("oom", "warn", "loss"), "yellow"),
    **dict.fromkeys(("failed", "worse", "large loss"), "red"),
    "whole": "bright_black",
}
_WIDEST_TEXT = 100
_LONGEST_HEADING = 36
_WIDEST_BAR = 90
_LONGEST_LABEL = 16


def print_document(document: doc.Document, console: Console | None = None) -> None:
    console = console or Console(highlight=False)
    for line in _Terminal(document, console.width).lines():
        # Texts are wrapped already. A longer word, such as a path, is not broken, so that it can be copied.
        if isinstance(line, Text):
            console.print(line, soft_wrap=True)
            continue
        for row in Segment.split_lines(console.render(line)):
            drawn = Text.assemble(*((segment.text, segment.style or "") for segment in row))
            drawn.rstrip()
            console.print(drawn, soft_wrap=True)


class _Terminal(doc.Renderer[RenderableType]):
    """Lines and tables for a terminal of this width. Charts, strips and raw records need a page."""

    def __init__(self, document: doc.Document, width: int) -> None:
        super().__init__("terminal", document)
        self.width = width

    @property
    def indent(self) -> int:
        return 2 if self.level else 0  # not more, so that tables of subsections have room

    def lines(self) -> Iterator[RenderableType]:
        kind, title = _said(self.document.kind), self.document.title
        title = one_line(title) if kind else _said(title)  # after a kind, it is the name of a folder
        if title:
            yield self.indented(Text.assemble((f"{kind} " if kind else "", "bold"), (title, "" if kind else "bold")))
        if self.document.source and self.document.source != self.document.title:
            yield from self.paragraph(self.document.source, "dim")
        for sentence in self.document.lead:
            yield from self.paragraph(sentence)
        yield from self.parts(self.document.parts)

    def paragraph(self, text: str, style: str = "", hang: str = "") -> Iterator[Text]:
        """Wrap a text; `hang` stands before its first line, and its other lines are as far to the right."""
        room, first = max(min(self.width, _WIDEST_TEXT), 20), " " * self.indent + hang
        lines = wrapped(_said(text), room - len(first))
        indents = [first, *[" " * len(first)] * len(lines)]
        drawn = (indent + line for indent, line in zip(indents, lines, strict=False))
        return (Text(line, style, no_wrap=True, overflow="ignore") for line in drawn)

    def indented(self, content: RenderableType, indent: int | None = None) -> RenderableType:
        return Padding(content, (0, 0, 0, self.indent if indent is None else indent))

    def text(self, part: doc.Text) -> Iterator[RenderableType]:
        if part.tone == "command":
            return iter([Text(" " * self.indent + _said(part.text))])
        return self.paragraph(part.text, STYLES[part.tone], "! " if part.tone == "warn" else "")

    def items(self, part: doc.Items) -> Iterator[RenderableType]:
        for place, text in enumerate(part.texts, start=1):
            hang = f"{place}. " if part.is_numbered else "- "
            if isinstance(text, str):
                yield from self.paragraph(text, hang=hang)
                continue
            yield from self.paragraph(text.text, "bold", hang)
            for line in _(text.detail).splitlines():
                yield from self.paragraph(line, hang=" " * len(hang))
            if place < len(part.texts):
                yield Text()

    def facts(self, part: doc.Facts) -> Iterator[RenderableType]:
        pairs = [(_said(name), _said_cell(doc.as_cell(value))) for name, value in part.pairs if doc.as_cell(value).text]
        label = min(max((cell_len(name) for name, _ in pairs), default=0), _LONGEST_LABEL)
        room = max(self.width - 2 * self.level - label - 2, 10)
        # Rich breaks lines at spaces only, of which Chinese has few.
        lines = [
            (name, "\n".join(wrapped(value, room)) if cells(value) > len(value) else value) for name, value in pairs
        ]
        if pairs:
            yield self.indented(_grid(lines, {"width": label, "style": "dim"}, {"overflow": "fold"}), 2 * self.level)

    def verbatim(self, part: doc.Verbatim) -> Iterator[RenderableType]:
        lines = plain(part.text).rstrip().splitlines()[-part.most_lines :]
        if part.title:
            yield self.indented(Text(_said(part.title), "dim"), 2 * self.level)
        yield self.indented(Text("\n".join(lines), "dim"), 2 * self.level + 2)

    def tiles(self, part: doc.Tiles) -> Iterator[RenderableType]:
        pairs = [(_said(value), _said(words)) for value, words in part.pairs]
        yield self.indented(_grid(pairs, {"justify": "right", "no_wrap": True, "style": "bold"}, {}))

    def section(self, part: doc.Section) -> Iterator[RenderableType]:
        title = Text()
        for cell in part.lead:
            title.append(f"{_said_cell(cell._replace(short=None))} ", f"bold {STYLES[cell.tone]}")
        title.append(_said(part.title) + _said(part.remark), "" if part.lead else "bold" if self.level else "bold cyan")
        yield Text()
        if title:
            yield self.indented(title)
        yield from self.below(part.parts) if part.title else self.parts(part.parts)

    def grid(self, part: doc.Grid) -> Iterator[RenderableType]:
        columns, rows = _written(*part.shown("terminal"))
        room, left_out = self.width - self.indent, part.left_out("terminal")
        if sum(_widths(columns, rows)) - 1 > room:
            kept = [place for place, column in enumerate(columns) if not column.is_extra]
            columns, rows = [columns[place] for place in kept], [[row[place] for place in kept] for row in rows]
        for places in _pieces(columns, rows, part.fixed, room):
            if part.title:
                yield from self.paragraph(part.title, "bold")
            yield self.indented(
                _table([columns[place] for place in places], [[row[at] for at in places] for row in rows], room)
            )
        for note in filter(None, (self.with_rest(left_out), part.note)):
            yield from self.paragraph(note, "dim")
        yield Text()

    def bars(self, part: doc.Bars) -> Iterator[RenderableType]:
        if part.title:
            yield from self.paragraph(doc.Cell(part.title, detail=part.remark).whole, "bold")
        bars = [bar._replace(name=_said(bar.name), text=_said(bar.text)) for bar in part.bars]
        names = max((cell_len(bar.name) for bar in bars), default=0)
        texts = max((cell_len(bar.text) for bar in bars), default=0)
        room = max(min(self.width - self.indent - names - 3 - texts, _WIDEST_BAR), 10)
        for bar in bars:
            weight = "" if bar.tone == "loss" else "bold"
            drawn = bar_cells(bar.low, bar.high, room)
            yield Text.assemble(
                (" " * self.indent + set_cell_size(bar.name, names) + "  ", weight),
                (f"{drawn:<{room}}", STYLES[bar.tone]),
                (" " * (1 + texts - cell_len(bar.text)) + bar.text, weight),
                no_wrap=True,
                overflow="ignore",
            )


def _said(text: str) -> str:
    return one_line(_(text))


def _said_cell(cell: doc.Cell) -> str:
    return _said(cell.whole if cell.short is None else cell.short)


def _grid(pairs: Sequence[tuple[str, str]], left: Mapping[str, Any], right: Mapping[str, Any]) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(**left)
    grid.add_column(**right)
    for pair in pairs:
        grid.add_row(*map(Text, pair))
    return grid


def _written(columns: list[doc.Head], rows: list[list[doc.Cell]]) -> tuple[list[doc.Head], list[list[Text]]]:
    """The headings as a terminal has them, and the texts of the cells."""
    heads = []
    for column in columns:
        name = _said(column.head if column.short is None else column.short)
        short = name if cell_len(name) <= _LONGEST_HEADING else set_cell_size(name, _LONGEST_HEADING - 1).rstrip() + "…"
        heads.append(column._replace(head=short))
    return heads, [[Text(_said_cell(cell), STYLES[cell.tone]) for cell in row] for row in rows]


def _widths(columns: list[doc.Head], rows: list[list[Text]]) -> list[int]:
    return [
        max([cell_len(column.head), *(row[place].cell_len for row in rows)]) + 2 for place, column in enumerate(columns)
    ]


def _pieces(columns: list[doc.Head], rows: list[list[Text]], fixed: int, room: int) -> list[list[int]]:
    """The places of the columns of each table; several tables if all columns do not fit and are numbers."""
    widths = _widths(columns, rows)
    if sum(widths) - 1 <= room or not all(column.is_number for column in columns[fixed:]):
        return [list(range(len(columns)))]
    left, pieces = sum(widths[:fixed]), []
    used = room + 1
    for place in range(fixed, len(columns)):
        if used + widths[place] - 1 > room:
            pieces.append(list(range(fixed)))
            used = left
        pieces[-1].append(place)
        used += widths[place]
    return pieces


def _fitting(columns: list[doc.Head], rows: list[list[Text]], room: int) -> list[int | None]:
    """The widths of columns of texts that are wrapped. None of them is narrower than its longest word."""
    widths = _widths(columns, rows)
    too_wide = sum(widths) - 1 - room
    least = {}
    for place, column in enumerate(columns):
        if not column.is_number:
            texts = [column.head, *(row[place].plain for row in rows)]
            least[place] = max((cell_len(word) for text in texts for word in text.split()), default=1)
    spare = {place: widths[place] - 2 - longest for place, longest in least.items()}
    in_all = sum(spare.values())
    if too_wide <= 0 or in_all < too_wide:
        return [None] * len(columns)
    given = {place: least[place] + own * (in_all - too_wide) // in_all for place, own in spare.items()}
    return [given.get(place) for place in range(len(columns))]


def _table(columns: list[doc.Head], rows: list[list[Text]], room: int) -> Table:
    has_heads = any(column.head for column in columns)
    table = Table(box=SIMPLE_HEAD, header_style="dim", padding=(0, 1, 0, 0), show_header=has_heads)
    table.pad_edge = table.show_edge = False
    for column, width in zip(columns, _fitting(columns, rows, room), strict=True):
        side = "right" if column.is_number else "left"
        text = Text(column.head)
        table.add_column(text, justify=side, no_wrap=column.is_number, overflow="fold", width=width)  # type: ignore[arg-type]
    for row in rows:
        table.add_row(*row)
    return table


def bar_cells(low: float, high: float, width: int) -> str:
    """A bar between two shares of the width, in half characters; a shorter one is a thin mark.

    Its length is rounded, not its two ends, so that equal losses have equal bars. It ends at the edge, because logged
    times may add up to more than the wall time.

    >>> bar_cells(0.5, 1.0, 8), bar_cells(0.5, 0.69, 8)
    ('    ████', '    █▌')
    """
    low, high = (min(max(share, 0.0), 1.0) for share in (low, high))
    length, end = round((high - low) * 2 * width), round(high * 2 * width)
    if length == 0:
        return " " * (max(end - 1, 0) // 2) + "▕"
    start = max(end - length, 0)
    halves = " " * start + "█" * length + " " * (length + start & 1)
    looks = {"██": "█", "█ ": "▌", " █": "▐", "  ": " "}
    return re.sub("..", lambda pair: looks[pair[0]], halves).rstrip()
