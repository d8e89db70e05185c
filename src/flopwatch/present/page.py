"""Write a document as one HTML page that loads no other files, or as a piece of HTML. All text is escaped here."""

import hashlib
import json
import re
from base64 import b64encode
from collections.abc import Iterator, Sequence
from functools import singledispatch
from itertools import groupby
from pathlib import Path
from typing import Any

from flopwatch.present import document as doc
from flopwatch.present.svg import COLOURS, bars_svg, esc, figure, legend_marker, tipped
from flopwatch.text import plain
from flopwatch.version import __version__

_FOLDER = Path(__file__).parent
_CLASSES = {"note": "soft small", "ok": "f-ok", "oom": "f-oom", "failed": "f-failed", "not-run": "f-not-run"}


def to_page(document: doc.Document) -> str:
    """The whole page. Its policy forbids to load anything, and to run any script but its own."""
    body = "\n".join(_html(document.parts, document, 2))
    style = (_FOLDER / "page.css").read_text(encoding="utf-8") + document.style
    needed = ("tips.js", "page.js") if "<button" in body else ("tips.js",)
    script = "".join((_FOLDER / name).read_text(encoding="utf-8") for name in needed)
    title = f"{document.kind} {document.title}".strip()
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_policy(script)}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{esc(title)}</title><style>{style}</style></head><body>",
            *_header(document),
            "<main>",
            body,
            "</main>",
            f"<footer>flopwatch {esc(__version__)}, from {esc(document.source)}. The page loads no files.</footer>",
            f"<script>{script}</script></body></html>\n",
        ]
    )


def _policy(script: str) -> str:
    own = b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{own}'; base-uri 'none'; form-action 'none'"
    )


def _header(document: doc.Document) -> Iterator[str]:
    kind = esc(f"flopwatch {document.kind.lower()}{document.about}")
    yield f"<header><h1><small>{kind}</small>{esc(document.title)}</h1>"
    yield "".join(f'<p class="soft">{in_words(sentence)}</p>' for sentence in document.lead) + "</header>"
    links = (
        f'<a href="#{esc(part.key)}">{esc(part.link or part.title)}</a>' for part in document.sections() if part.key
    )
    yield f"<nav>{''.join(links)}</nav>"


def in_words(text: str) -> str:
    """A text whose commands stand between backticks.

    >>> in_words("Run `ls <x>`.")
    'Run <code>ls &lt;x&gt;</code>.'
    """
    return re.sub("`([^`]+)`", r"<code>\1</code>", esc(text))


def _html(parts: Sequence[doc.Part], document: doc.Document, level: int) -> Iterator[str]:
    for part in document.shown(parts, "html"):
        yield from _render(part, document, level)


def _class(*names: str) -> str:
    known = " ".join(filter(None, names))
    return f' class="{known}"' if known else ""


def _paragraph(text: str) -> str:
    return f'<p class="soft small">{in_words(text)}</p>' if text else ""


@singledispatch
def _render(part: Any, document: doc.Document, level: int) -> Iterator[str]:
    raise TypeError(f"a document has no part {type(part).__name__}")


@_render.register
def _(part: doc.Text, document: doc.Document, level: int) -> Iterator[str]:
    tag = "div" if part.tone == "warn" else "p"
    yield f"<{tag}{_class(_CLASSES.get(part.tone, part.tone))}>{in_words(part.text)}</{tag}>"


@_render.register
def _(part: doc.Items, document: doc.Document, level: int) -> Iterator[str]:
    tag = "ol" if part.is_numbered else "ul"
    items = (
        in_words(text) if isinstance(text, str) else f"<b>{in_words(text.text)}</b> {in_words(text.detail)}"
        for text in part.texts
    )
    yield f"<{tag}>{''.join(f'<li>{item}</li>' for item in items)}</{tag}>"


@_render.register
def _(part: doc.Facts, document: doc.Document, level: int) -> Iterator[str]:
    known = ((name, value) for name, value in part.pairs if str(value))
    pairs = ((name, value if isinstance(value, doc.Cell) else doc.Cell(value)) for name, value in known)
    listed = "".join(f"<dt>{esc(name)}</dt><dd{_class(cell.tone)}>{esc(str(cell))}</dd>" for name, cell in pairs)
    yield f"<dl>{listed}</dl>" if listed else ""


@_render.register
def _(part: doc.Block, document: doc.Document, level: int) -> Iterator[str]:
    title = f'<span class="soft small">{esc(part.title)}</span>' if part.title else ""
    yield f"{title}<pre>{esc(part.text)}</pre>"


@_render.register
def _(part: doc.Tiles, document: doc.Document, level: int) -> Iterator[str]:
    tiles = (f'<div class="tile"><b>{esc(value)}</b><span>{esc(words)}</span></div>' for value, words in part.pairs)
    yield f'<div class="tiles">{"".join(tiles)}</div>'


@_render.register
def _(part: doc.Strip, document: doc.Document, level: int) -> Iterator[str]:
    if part.shares:
        legend = "".join(f'<span><i class="{tone}"></i>{esc(name)} {n:,}</span>' for name, n, tone in part.shares)
        yield f'{_strip(part.shares)}<div class="legend">{legend}</div>'


def _strip(shares: Sequence[doc.Share]) -> str:
    total = sum(share.amount for share in shares)
    bars = "".join(
        f'<i class="{tone}" style="width:{n / total:.3%}" data-t="{esc(name)}: {n:,}"></i>' for name, n, tone in shares
    )
    return f'<div class="strip">{bars}</div>'


@_render.register
def _(part: doc.Section, document: doc.Document, level: int) -> Iterator[str]:
    key = f' id="{esc(part.key)}"' if part.key else ""
    remark = f"<small>{esc(part.remark)}</small>" if part.remark else ""
    lead = "".join(f"<b>{esc(str(c))}</b> " if c.tone != "chip" else f"{_content(c)} " for c in part.lead)
    title = f"{lead}{esc(part.title)}{remark}"
    inside = _html(part.parts, document, level + 1)
    if part.is_open is None:
        head = f"<h{level}>{title}</h{level}>" if part.title else ""
        yield f"<section{key}{_class(part.tone)}>{head}"
        yield from inside
        yield "</section>"
    else:
        style = f"card o-{part.tone}" if part.tone else "fold"
        state = " open" if part.is_open else ""
        yield f'<details{key} class="{style}"{state}><summary>{title}</summary><div class="body">'
        yield from inside
        yield "</div></details>"


@_render.register
def _(part: doc.Tabs, document: doc.Document, level: int) -> Iterator[str]:
    buttons = (f'<button aria-pressed="false">{esc(table.title)}</button>' for table in part.tables)
    yield f'<div class="tabbed"><div class="tabs" hidden>{"".join(buttons)}</div>'
    yield from (f'<div class="tab">{"".join(_render(table, document, level))}</div>' for table in part.tables)
    yield f"{_paragraph(part.note)}</div>"


@_render.register
def _(part: doc.Beside, document: doc.Document, level: int) -> Iterator[str]:
    drawn = ["".join(_render(inner, document, level)) for inner in document.shown(part.parts, "html")]
    blocks = (
        text if text.startswith('<div class="block"') else f'<div class="fitting">{text}</div>'
        for text in drawn
        if text
    )
    yield f'<div class="blocks">{"".join(blocks)}</div>'


@_render.register
def _(part: doc.Table, document: doc.Document, level: int) -> Iterator[str]:
    columns, rows = part.shown("html")
    left_out = part.left_out("html")
    title = f"<h3>{esc(part.title)}</h3>" if part.title else ""
    body = "".join(_rows(columns, rows, merges=part.merges))
    frame = _class("scroll", "fit" if part.fits else "")
    yield f"{title}<div{frame}><table>{_head(columns)}<tbody>{body}</tbody></table></div>"
    yield _paragraph(document.with_rest(left_out, "html") + "." if left_out else "") + _paragraph(part.note)


def _head(columns: Sequence[doc.Column]) -> str:
    if not any(column.head for column in columns):
        return ""
    groups = [(name, len(list(own))) for name, own in groupby(columns, key=lambda column: column.group)]
    above = "".join(
        f'<th class="g" colspan="{size}">{esc(name)}</th>' if name else "<th></th>" * size for name, size in groups
    )
    pairs = zip(columns, _sides(columns), strict=True)
    heads = "".join(f"<th{_class(side)}>{esc(column.head)}</th>" for column, side in pairs)
    return f"<thead>{f'<tr>{above}</tr>' if any(name for name, _ in groups) else ''}<tr>{heads}</tr></thead>"


def _sides(columns: Sequence[doc.Column]) -> list[str]:
    """The classes of the cells of each column: `n` for numbers, `g` where a group of columns begins."""
    befores = ["", *(column.group for column in columns)]
    return [
        " ".join(["n"] * column.is_number + ["g"] * (column.group not in ("", before)))
        for column, before in zip(columns, befores, strict=False)
    ]


def _rows(columns: Sequence[doc.Column], rows: Sequence[Sequence[doc.Cell]], *, merges: bool) -> Iterator[str]:
    before, sides = None, _sides(columns)
    for row in rows:
        is_same = merges and row[0].text == before
        before = row[0].text
        shown = [doc.Cell("") if is_same else row[0], *row[1:]]
        cells = "".join(_cell(cell, side) for cell, side in zip(shown, sides, strict=True))
        yield f"<tr{_class('new' if merges and not is_same else '')}>{cells}</tr>"


def _cell(cell: doc.Cell, side: str) -> str:
    tone = "" if cell.tone == "chip" else _CLASSES.get(cell.tone, cell.tone)
    look = "name" if cell.colour is not None else "small" if cell.detail else ""
    return f"<td{_class(side, tone, look)}{tipped(cell.tip)}>{_content(cell)}</td>"


def _content(cell: doc.Cell) -> str:
    text = esc(cell.text)
    if cell.shares:
        return _strip(cell.shares)
    if cell.bar is not None:
        return f'<span class="bar k{(cell.colour or 0) % COLOURS}" style="width:{round(70 * cell.bar)}px"></span>{text}'
    if cell.tone == "chip":
        return f'<span class="chip">{text}</span>'
    dot = f'<span class="dot k{cell.colour % COLOURS}"></span>' if cell.colour is not None else ""
    detail = f' <span class="soft">{esc(cell.detail)}</span>' if cell.detail else ""
    return f"{dot}{text}{detail}"


@_render.register
def _(part: doc.Bars, document: doc.Document, level: int) -> Iterator[str]:
    drawn, width, height = bars_svg(part.bars)
    behind = (part.behind,) if part.behind else ()
    yield from _render(doc.Drawing(part.title, part.remark, drawn, width, height, behind=behind), document, level)


@_render.register
def _(part: doc.Drawing, document: doc.Document, level: int) -> Iterator[str]:
    keys = (
        f'<span class="key k{kind % COLOURS}{" dashed" if kind > 1 else ""}">{esc(name)}</span>'
        for name, kind in part.legend
    )
    legend = f'<span class="keys">{"".join(keys)}</span>' if part.legend else ""
    drawn = figure(part.title, part.remark, part.svg, part.width, part.height, legend)
    if not part.behind:
        yield drawn
        return
    tables = "".join("".join(_render(table, document, level)) for table in part.behind)
    numbers = f'<details class="behind"><summary>The numbers as a table</summary>{tables}</details>'
    yield f'<div class="chart">{drawn}{numbers}</div>'


@_render.register
def _(part: doc.Panels, document: doc.Document, level: int) -> Iterator[str]:
    if not part.drawings:
        return
    head = f"<h3>{esc(part.title)}</h3>{_paragraph(part.remark)}" if part.title else ""
    panels = "".join("".join(_render(drawing, document, level)) for drawing in part.drawings)
    yield f'<div class="block" style="--n:{min(len(part.drawings), 4)}">{head}<div class="panels">{panels}</div></div>'


@_render.register
def _(part: doc.Legend, document: doc.Document, level: int) -> Iterator[str]:
    marks = [f'<i class="{esc(kind)}"></i>' if isinstance(kind, str) else legend_marker(kind) for _, kind in part.names]
    names = (f"<span>{mark}{esc(name)}</span>" for mark, (name, _) in zip(marks, part.names, strict=True))
    yield f'<div class="legend">{"".join(names)}</div>' if marks else ""


@_render.register
def _(part: doc.Records, document: doc.Document, level: int) -> Iterator[str]:
    """A table that the script of the page fills from JSON, 200 rows at a time."""
    heads = "".join(
        f'<th data-column="{place}"{"" if kind in ("text", "words") else " class=n"}>{esc(heading)}</th>'
        for place, (_, heading, kind, is_shown, _) in enumerate(part.fields)
        if is_shown
    )
    options = "".join(f'<option value="{esc(name)}">{esc(name)}</option>' for name in part.tones)
    yield '<div class="filter">'
    yield '<input id="record-filter" type="search" placeholder="Filter: ghost 512 oom" aria-label="Filter the rows">'
    yield f'<select id="record-choice" aria-label="{esc(part.choice)}">'
    yield f'<option value="">every {esc(part.choice)}</option>{options}</select>'
    yield '<span class="soft small" id="record-count"></span></div>'
    yield f'<div class="scroll"><table id="records"><thead><tr>{heads}</tr></thead><tbody></tbody></table></div>'
    yield f'<p><button id="more-records" hidden>Show 200 more</button></p>{_paragraph(part.hint)}'
    yield f'<script type="application/json" id="record-data">{embedded(_data(part))}</script>'


def embedded(content: Any) -> str:
    """Write JSON for a script element, escaping the characters that could end the element or begin a comment."""
    written = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return written.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _data(part: doc.Records) -> dict[str, Any]:
    """The content of the table for the script. Texts that many rows share are stored only once."""
    names = [field.name for field in part.fields]
    words: list[dict[str, int]] = [{} for _ in part.fields]
    rows = [
        [_value(value, field.kind, own) for value, field, own in zip(row, part.fields, words, strict=True)]
        for row in part.rows
    ]
    choice = names.index(part.choice)
    return {
        "columns": [
            {"kind": "text" if field.kind == "words" else field.kind, "shown": field.is_shown}
            | ({"words": list(own)} if field.kind == "words" else {})
            | ({"mark": names.index(field.mark)} if field.mark else {})
            for field, own in zip(part.fields, words, strict=True)
        ],
        "rows": rows,
        "choice": choice,
        "tones": [part.tones.get(word, "") for word in words[choice]],
    }


def _value(value: Any, kind: str, words: dict[str, int]) -> Any:
    if kind == "words":
        return words.setdefault(plain(value), len(words))
    if kind == "flag":
        return int(value)
    if isinstance(value, str):
        return plain(value)
    return float(f"{value:.4g}") if isinstance(value, float) else value
