"""A document: what a report says, once, for all media.

A document holds texts as they are: each renderer makes the text of users harmless in its own way. It knows no record,
so everything in the house may build one.
"""

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from types import MappingProxyType
from typing import Generic, Literal, NamedTuple, TypeAlias, TypeVar

from flopwatch.language import Said, semicolons

Medium: TypeAlias = Literal["terminal", "markdown", "html"]
EVERYWHERE: tuple[Medium, ...] = ("terminal", "markdown", "html")
Tone: TypeAlias = Literal[
    "", "strong", "best", "soft", "note", "warn", "command", "chip", "verdict", "ok", "oom", "failed", "not-run",
    "better", "worse",
]  # fmt: skip
"""How a text is shown. `note` is small and soft; a terminal never breaks a `command`; `ok` to `not-run` are the classes
of outcomes, which have colours."""

Item = TypeVar("Item")
Made = TypeVar("Made")


class Most(NamedTuple):
    """How many rows or parts each medium shows at most."""

    terminal: int
    markdown: int
    html: int

    def of(self, medium: Medium) -> int:
        return self[EVERYWHERE.index(medium)]


SOME_ROWS, SOME_ITEMS = Most(24, 60, 200), Most(8, 60, 200)


def evenly(items: Sequence[Item], at_most: int) -> list[Item]:
    """Select at most `at_most` items: the first, the last, and evenly spaced items between them.

    >>> evenly([1, 2, 3, 4, 5, 6, 7], 3), evenly([1, 2], 3)
    ([1, 4, 7], [1, 2])
    """
    if len(items) <= at_most:
        return list(items)
    if at_most == 1:
        return [items[-1]]
    return [items[round(place * (len(items) - 1) / (at_most - 1))] for place in range(at_most)]


class Cell(NamedTuple):
    """A cell of a table. A cell without any of the attributes below `text` may be a plain str.

    Attributes:
        detail: A softer text behind the text.
        short: What a narrow terminal shows instead of text and detail.
    """

    text: str
    tone: Tone = ""
    detail: str = ""
    short: str | None = None

    @property
    def whole(self) -> str:
        return Said("{text} {detail}", text=self.text, detail=self.detail) if self.detail else self.text


def as_cell(content: Cell | str) -> Cell:
    return content if isinstance(content, Cell) else Cell(content)


class Head(NamedTuple):
    """A column of a table.

    Attributes:
        is_number: The column is aligned right, and its texts are not wrapped.
        short: The heading in a terminal.
        only: The media that have the column.
    """

    head: str
    is_number: bool = False
    short: str | None = None
    only: tuple[Medium, ...] = EVERYWHERE
    is_extra: bool = False


def numbers(*heads: str) -> tuple[Head, ...]:
    """Columns of numbers with headings of ours, which are translated."""
    return tuple(Head(Said(head), is_number=True) for head in heads)


def english_numbers(*heads: str) -> tuple[Head, ...]:
    """Columns of numbers of a command whose output is English, or with names of users."""
    return tuple(Head(head, is_number=True) for head in heads)


class Grid(NamedTuple):
    """A table.

    Attributes:
        columns: A column that is a str holds texts.
        most: How many rows each medium shows; a note says how many are left out.
        is_spaced: Whether evenly spaced rows are shown if there are more, instead of the first ones.
        fixed: Number of columns at the left that name the row. A terminal that is too narrow shows the other columns
            in several tables, and repeats these.
        merges: Whether rows below each other do not repeat the text of the first column.
        fits: Whether a page makes the table only as wide as its content.
    """

    columns: Sequence[Head | str]
    rows: Sequence[Sequence[Cell | str]]
    title: str = ""
    note: str = ""
    most: Most = SOME_ROWS
    is_spaced: bool = False
    fixed: int = 1
    merges: bool = False
    fits: bool = False

    def shown(self, medium: Medium) -> tuple[list[Head], list[list[Cell]]]:
        """The columns and rows that a medium shows. Markdown repeats the text of the first column."""
        columns = [column if isinstance(column, Head) else Head(column) for column in self.columns]
        kept = [place for place, column in enumerate(columns) if medium in column.only]
        rows = [[as_cell(row[at]) for at in kept] for row in (self.rows[place] for place in self._places(medium))]
        if self.merges and medium != "markdown":
            names = [row[0].text for row in rows]
            rows = [
                [Cell(""), *row[1:]] if above == name else row
                for row, name, above in zip(rows, names, ["", *names], strict=False)
            ]
        return [columns[place] for place in kept], rows

    def _places(self, medium: Medium) -> Sequence[int]:
        count, most = len(self.rows), self.most.of(medium)
        return evenly(range(count), most) if self.is_spaced else range(min(count, most))

    def left_out(self, medium: Medium) -> str:
        shown = len(self._places(medium))
        if shown == len(self.rows):
            return ""
        if self.is_spaced:
            return Said("{shown:,} of {rows:,} rows are shown, evenly spaced", shown=shown, rows=len(self.rows))
        return Said("{shown:,} of {rows:,} rows are shown", shown=shown, rows=len(self.rows))


class Text(NamedTuple):
    """A paragraph. Words between backticks are code."""

    text: str
    tone: Tone = ""


class Items(NamedTuple):
    """A list of sentences; `most` limits it, and `more` says what the others are.

    A `Cell` is a heading with its `detail`, which a terminal shows in lines of its own.
    """

    texts: Sequence[str | Cell]
    is_numbered: bool = False
    most: Most = SOME_ITEMS
    more: str = Said("more")


class Facts(NamedTuple):
    """Names and what they are. Facts without a text are left out."""

    pairs: Sequence[tuple[str, str | Cell]]


class Verbatim(NamedTuple):
    """A text of several lines, such as the end of a log. A terminal shows its last lines."""

    text: str
    title: str = ""
    most_lines: int = 15


class Tiles(NamedTuple):
    pairs: Sequence[tuple[str, str]]


class Bar(NamedTuple):
    """A bar from `low` to `high`, as shares of the width of the chart, with a text at its end."""

    name: str
    low: float
    high: float
    text: str
    tone: Literal["whole", "loss", "large loss", "rest"]
    tip: str = ""


@dataclass(frozen=True, slots=True)
class Bars:
    """A bar chart. `behind` is the same as a table: Markdown shows it instead, a page below the chart."""

    bars: Sequence[Bar]
    title: str = ""
    remark: str = ""
    behind: Grid | None = None


class Drawing(NamedTuple):
    """A chart that only a page shows: markup of `present.svg`, which escapes its texts, and its curves by colour."""

    title: str
    remark: str
    svg: str
    width: float
    height: float
    legend: Sequence[tuple[str, int]] = ()


class Panels(NamedTuple):
    drawings: Sequence[Drawing]


class Section(NamedTuple):
    """Parts below a title. A section without a title only stands apart from what is before it.

    Attributes:
        key: The link to it on a page; without it, there is none.
        link: Its name among the links of the page, if the title is too long.
        is_open: None for an ordinary section; otherwise a page can fold it, and shows it open or folded.
        tone: The colour of its frame on a page.
    """

    title: str
    parts: "Sequence[Part]" = ()
    key: str = ""
    link: str = ""
    lead: Sequence[Cell] = ()
    remark: str = ""
    is_open: bool | None = None
    tone: Tone = ""


class Several(NamedTuple):
    """Parts of one kind, of which each medium shows the first ones. `more` names the others, such as `more groups`."""

    parts: "Sequence[Part]"
    most: Most
    more: str
    names: Sequence[str] = ()


class Only(NamedTuple):
    media: tuple[Medium, ...]
    parts: "Sequence[Part]"


Part: TypeAlias = (
    Text | Items | Facts | Verbatim | Tiles | Grid | Bars | Drawing | Panels | Section | Several | Only
)  # fmt: skip


_HAVE_ALL: dict[Medium, str] = {
    "terminal": Said("--html and --json have all"),
    "markdown": Said("the HTML and JSON reports have all"),
    "html": Said("the JSON report has all"),
}


class Document(NamedTuple):
    """A report.

    Attributes:
        title: Name of what the report is about; `kind` says what that is, and `about` also when it was made.
        parts: Sections, and what stands before the first one.
        style: CSS that only the page of this kind of report needs.
        have_all: For each medium, what to use if the medium shows too little, such as `--json has all`.
    """

    title: str
    parts: Sequence[Part]
    kind: str = ""
    about: str = ""
    lead: Sequence[str] = ()
    source: str = ""
    style: str = ""
    have_all: Mapping[Medium, str] = MappingProxyType(_HAVE_ALL)

    @property
    def whole_title(self) -> str:
        return Cell(self.kind, detail=self.title).whole if self.kind else self.title


class Renderer(Generic[Made]):
    """Shows parts in one medium, each by the method with the name of its type: a `Grid` by `grid`.

    A part for which there is no method needs another medium. `level` says how deep the parts are below the document.
    """

    def __init__(self, medium: Medium, document: Document, level: int = 0) -> None:
        self.medium, self.document, self.level = medium, document, level

    def parts(self, parts: Sequence[Part]) -> Iterator[Made]:
        for part in self.shown(parts):
            yield from self.part(part)

    def part(self, part: Part) -> Iterator[Made]:
        show = getattr(self, type(part).__name__.lower(), None)
        return iter(()) if show is None else show(part)

    def below(self, parts: Sequence[Part]) -> Iterator[Made]:
        inner = copy(self)
        inner.level += 1
        return inner.parts(parts)

    def shown(self, parts: Sequence[Part]) -> Iterator[Part]:
        """The parts that the medium shows. Where it shows the first ones only, a remark says what is left out."""
        for part in parts:
            if isinstance(part, Only):
                yield from self.shown(part.parts) if self.medium in part.media else ()
            elif isinstance(part, Several):
                most = part.most.of(self.medium)
                yield from self.shown(part.parts[:most])
                names = [*part.names[most : most + 4], *(["..."] if len(part.parts) > most + 4 else [])]
                has_names = part.names and self.medium == "terminal"
                said = Said("{more} ({names})", more=part.more, names=semicolons(names)) if has_names else part.more
                yield from self._rest(len(part.parts) - most, said)
            elif isinstance(part, Items):
                most = part.most.of(self.medium)
                yield part._replace(texts=part.texts[:most])
                yield from self._rest(len(part.texts) - most, part.more)
            else:
                yield part

    def _rest(self, hidden: int, what: str) -> Iterator[Text]:
        if hidden > 0:
            said = self.with_rest(Said("{hidden:,} {what}", hidden=hidden, what=what))
            said = said if self.medium == "terminal" else Said("{sentence}.", sentence=said)
            yield Text(said, "" if self.medium == "markdown" else "note")

    def with_rest(self, said: str) -> str:
        """A remark about what is left out, and what has it."""
        have_all = self.document.have_all.get(self.medium)
        return semicolons([said, have_all]) if said and have_all else said
