"""Show a document in a terminal, with rich. Text of users is never markup here, and steers no terminal."""

import re
import textwrap
from collections.abc import Iterator, Sequence
from functools import singledispatch
from io import StringIO
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from flopwatch.present import document as doc
from flopwatch.text import one_line, plain

STYLES = {
    "": "",
    "strong": "bold",
    "best": "bold",
    "soft": "dim",
    "note": "dim",
    "warn": "yellow",
    "chip": "",
    "verdict": "",
    "ok": "green",
    "oom": "yellow",
    "failed": "red",
    "not-run": "dim",
    "better": "green",
    "worse": "red",
    "whole": "bright_black",
    "loss": "yellow",
    "large loss": "red",
    "rest": "green",
}
_WIDEST_TEXT = 100
_LONGEST_HEADING = 36
_WIDEST_BAR = 90
_LONGEST_LABEL = 16


def print_document(document: doc.Document, console: Console | None = None) -> None:
    """Print a document to standard output, or to another console."""
    console = console or Console(highlight=False)
    for line in rendered(document, console.width, ascii_only=console.options.ascii_only):
        # Texts are wrapped already. A longer word, such as a path, is not broken, so that it can be copied.
        if isinstance(line, Text):
            console.print(line, soft_wrap=True)
            continue
        for row in Segment.split_lines(console.render(line)):
            drawn = Text.assemble(*((segment.text, segment.style or "") for segment in row))
            drawn.rstrip()
            console.print(drawn, soft_wrap=True)


def document_text(document: doc.Document, width: int = 80) -> str:
    """The document without colours."""
    stream = StringIO()
    print_document(document, Console(file=stream, width=width, highlight=False, color_system=None))
    return stream.getvalue()


def rendered(document: doc.Document, width: int = 80, *, ascii_only: bool = False) -> Iterator[RenderableType]:
    """The lines and tables of a document, for a console of this width."""
    form = _Form(document, width, ascii_only)
    if document.title:
        title = Text(f"{document.kind} " if document.kind else "", style="bold")
        yield form.indented(title + Text(one_line(document.title), style="" if document.kind else "bold"))
    if document.source and document.source != document.title:
        yield from form.note(document.source)
    for sentence in document.lead:
        yield from form.paragraph(sentence)
    yield from form.parts(document.parts)


class _Form:
    """Where a part stands: how deep, and how much room it has."""

    def __init__(self, document: doc.Document, width: int, ascii_only: bool, depth: int = 0) -> None:
        self.document, self.width, self.ascii_only, self.depth = document, width, ascii_only, depth
        self.indent = 2 if depth else 0  # not more, so that tables of subsections have room

    def deeper(self) -> "_Form":
        return _Form(self.document, self.width, self.ascii_only, self.depth + 1)

    def parts(self, parts: Sequence[doc.Part]) -> Iterator[RenderableType]:
        for part in self.document.shown(parts, "terminal"):
            yield from _render(part, self)

    def paragraph(self, text: str, style: str = "", hang: str = "") -> Iterator[Text]:
        """Wrap a text; `hang` stands before its first line, and its other lines are as far to the right."""
        room = max(min(self.width, _WIDEST_TEXT), 20)
        first, others = " " * self.indent + hang, " " * (self.indent + len(hang))
        lines = textwrap.wrap(
            one_line(text),
            room,
            initial_indent=first,
            subsequent_indent=others,
            break_on_hyphens=False,
            break_long_words=False,
        )
        return (Text(line, style=style, no_wrap=True, overflow="ignore") for line in lines)

    def indented(self, content: RenderableType) -> RenderableType:
        return Padding(content, (0, 0, 0, self.indent))

    def note(self, text: str) -> Iterator[Text]:
        return self.paragraph(text, "dim")


@singledispatch
def _render(part: Any, form: _Form) -> Iterator[RenderableType]:
    """Charts, strips and raw records need a page."""
    yield from ()


@_render.register
def _(part: doc.Text, form: _Form) -> Iterator[RenderableType]:
    if part.tone == "command":
        return iter([Text(" " * form.indent + one_line(part.text))])
    return form.paragraph(part.text, STYLES[part.tone], "! " if part.tone == "warn" else "")


@_render.register
def _(part: doc.Items, form: _Form) -> Iterator[RenderableType]:
    for place, text in enumerate(part.texts, start=1):
        hang = f"{place}. " if part.is_numbered else "- "
        if isinstance(text, str):
            yield from form.paragraph(text, hang=hang)
            continue
        yield from form.paragraph(text.text, "bold", hang)
        for line in text.detail.splitlines():
            yield from form.paragraph(line, hang=" " * len(hang))
        if place < len(part.texts):
            yield Text()


@_render.register
def _(part: doc.Facts, form: _Form) -> Iterator[RenderableType]:
    pairs = [(one_line(name), str(value)) for name, value in part.pairs if str(value)]
    label = min(max((cell_len(name) for name, _ in pairs), default=0), _LONGEST_LABEL)
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(width=label, style="dim")
    grid.add_column(overflow="fold")
    for name, value in pairs:
        grid.add_row(Text(name), Text(one_line(value)))
    if pairs:
        yield Padding(grid, (0, 0, 0, 2 * form.depth))


@_render.register
def _(part: doc.Block, form: _Form) -> Iterator[RenderableType]:
    lines = plain(part.text).rstrip().splitlines()[-part.most_lines :]
    if part.title:
        yield Padding(Text(one_line(part.title), style="dim"), (0, 0, 0, 2 * form.depth))
    yield Padding(Text("\n".join(lines), style="dim"), (0, 0, 0, 2 * form.depth + 2))


@_render.register
def _(part: doc.Tiles, form: _Form) -> Iterator[RenderableType]:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(justify="right", no_wrap=True, style="bold")
    grid.add_column()
    for value, words in part.pairs:
        grid.add_row(Text(one_line(value)), Text(one_line(words)))
    yield form.indented(grid)


@_render.register
def _(part: doc.Section, form: _Form) -> Iterator[RenderableType]:
    title = Text()
    for cell in part.lead:
        title.append(f"{one_line(str(cell))} ", f"bold {STYLES[cell.tone]}")
    title.append(one_line(part.title + part.remark), "" if part.lead else "bold" if form.depth else "bold cyan")
    yield Text()
    if part.title:
        yield form.indented(title)
    yield from (form.deeper() if part.title else form).parts(part.parts)


@_render.register
def _(part: doc.Tabs, form: _Form) -> Iterator[RenderableType]:
    yield from form.parts(part.tables)
    if part.note:
        yield from form.note(part.note)
        yield Text()


@_render.register
def _(part: doc.Table, form: _Form) -> Iterator[RenderableType]:
    columns, rows = _joined(*part.shown("terminal"))
    left_out = part.left_out("terminal")
    notes = [form.document.with_rest(left_out, "terminal")] if left_out else []
    notes += [part.note] if part.note else []
    if sum(_widths(columns, rows)) - 1 > form.width - form.indent:
        kept = [place for place, column in enumerate(columns) if not column.is_extra]
        columns, rows = [columns[place] for place in kept], [[row[place] for place in kept] for row in rows]
    for places in _pieces(columns, rows, part.fixed, form.width - form.indent):
        if part.title:
            yield from form.paragraph(part.title, "bold")
        yield form.indented(_table(columns, rows, places, merges=part.merges))
    for note in notes:
        yield from form.note(note)
    yield Text()


def _joined(columns: list[doc.Column], rows: list[list[doc.Cell]]) -> tuple[list[doc.Column], list[list[Text]]]:
    """Join the columns of one group to one column, because a terminal is narrow."""
    groups: list[list[int]] = []
    for place, column in enumerate(columns):
        is_same = groups and column.group and columns[groups[-1][-1]].group == column.group
        groups = [*groups[:-1], [*groups[-1], place]] if is_same else [*groups, [place]]
    texts = [[Text(_cell_text(cell), style=STYLES[cell.tone]) for cell in row] for row in rows]
    widths = [max((row[place].cell_len for row in texts), default=0) for place in range(len(columns))]
    joined = [[_side_by_side(row, places, widths) for places in groups] for row in texts]
    return [_heading(columns, places) for places in groups], joined


def _side_by_side(row: list[Text], places: list[int], widths: list[int]) -> Text:
    if len(places) == 1:
        return row[places[0]]
    parts = [Text(" " * (widths[place] - row[place].cell_len)) + row[place] for place in places]
    return Text("  ").join(parts)


def _heading(columns: list[doc.Column], places: list[int]) -> doc.Column:
    first = columns[places[0]]
    name = one_line(first.group if len(places) > 1 else first.head if first.short is None else first.short)
    short = name if len(name) <= _LONGEST_HEADING else name[: _LONGEST_HEADING - 1] + "…"
    return doc.Column(short, first.is_number, is_extra=first.is_extra)


def _cell_text(cell: doc.Cell) -> str:
    return one_line(str(cell) if cell.short is None else cell.short)


def _widths(columns: list[doc.Column], rows: list[list[Text]]) -> list[int]:
    return [
        max([cell_len(column.head), *(row[place].cell_len for row in rows)]) + 2 for place, column in enumerate(columns)
    ]


def _pieces(columns: list[doc.Column], rows: list[list[Text]], fixed: int, room: int) -> list[list[int]]:
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


def _table(columns: list[doc.Column], rows: list[list[Text]], places: list[int], *, merges: bool) -> Table:
    table = Table(
        box=SIMPLE_HEAD,
        header_style="dim",
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
        show_header=any(column.head for column in columns),
    )
    for column in (columns[place] for place in places):
        side = "right" if column.is_number else "left"
        table.add_column(Text(column.head), justify=side, no_wrap=column.is_number, overflow="fold")  # type: ignore[arg-type]
    before = None
    for row in rows:
        cells = [row[place] for place in places]
        is_same = merges and before is not None and cells[0].plain == before
        before = cells[0].plain
        table.add_row(*([Text()] if is_same else cells[:1]), *cells[1:])
    return table


@_render.register
def _(part: doc.Bars, form: _Form) -> Iterator[RenderableType]:
    if part.title:
        yield from form.paragraph(f"{part.title} {part.remark}", "bold")
    bars = [bar._replace(name=one_line(bar.name), text=one_line(bar.text)) for bar in part.bars]
    names = max((cell_len(bar.name) for bar in bars), default=0)
    texts = max((cell_len(bar.text) for bar in bars), default=0)
    room = max(min(form.width - form.indent - names - 3 - texts, _WIDEST_BAR), 10)
    for bar in bars:
        weight = "" if bar.tone == "loss" else "bold"
        drawn = bar_cells(bar.low, bar.high, room, ascii_only=form.ascii_only)
        yield Text.assemble(
            (" " * form.indent + f"{bar.name:<{names}}  ", weight),
            (f"{drawn:<{room}}", STYLES[bar.tone]),
            (f" {bar.text:>{texts}}", weight),
            no_wrap=True,
            overflow="ignore",
        )


def bar_cells(low: float, high: float, width: int, *, ascii_only: bool = False) -> str:
    """A bar between two shares of the width, in half characters; a shorter one is a thin mark.

    Its length is rounded, not its two ends, so that equal losses have equal bars. It ends at the edge, because logged
    times may add up to more than the wall time.

    >>> bar_cells(0.5, 1.0, 8), bar_cells(0.5, 0.69, 8)
    ('    ████', '    █▌')
    >>> bar_cells(0.5, 1.0, 8, ascii_only=True), bar_cells(0.49, 0.5, 8, ascii_only=True)
    ('    ####', '   |')
    """
    low, high = (min(max(share, 0.0), 1.0) for share in (low, high))
    parts = 1 if ascii_only else 2
    length, end = round((high - low) * parts * width), round(high * parts * width)
    if length == 0:
        return " " * (max(end - 1, 0) // parts) + ("|" if ascii_only else "▕")
    start = max(end - length, 0)
    if ascii_only:
        return " " * start + "#" * length
    halves = " " * start + "█" * length + " " * (length + start & 1)
    looks = {"██": "█", "█ ": "▌", " █": "▐", "  ": " "}
    return re.sub("..", lambda pair: looks[pair[0]], halves).rstrip()
