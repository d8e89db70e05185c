"""Write a document as one HTML page that loads no other files, or as a piece of HTML. All text is escaped here."""

import hashlib
import re
from base64 import b64encode
from collections.abc import Iterator, Sequence
from pathlib import Path

from flopwatch.language import Said, language
from flopwatch.present import document as doc
from flopwatch.present.svg import COLOURS, bars_svg, esc, verbatim
from flopwatch.version import __version__

_FOLDER = Path(__file__).parent
_LOCALES = {"en": "en", "zh": "zh-CN"}
_CLASSES = {"note": "soft small", "ok": "f-ok", "oom": "f-oom", "failed": "f-failed", "not-run": "f-not-run"}


def to_page(document: doc.Document) -> str:
    """The whole page. Its policy forbids to load anything, and to run any script but its own."""
    html = _Html("html", document, 2)
    body = "\n".join(html.parts(document.parts))
    style = (_FOLDER / "page.css").read_text(encoding="utf-8") + document.style
    script = (_FOLDER / "tips.js").read_text(encoding="utf-8")
    own = (
        f"style-src 'unsafe-inline'; script-src 'sha256-{b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
    )
    policy = f"default-src 'none'; {own}; base-uri 'none'; form-action 'none'"
    lead = "".join(f'<p class="soft">{in_words(sentence)}</p>' for sentence in document.lead)
    made = Said(
        "flopwatch {version}, from {source}. The page loads no files.", version=__version__, source=document.source
    )
    linked = [section for section in html.sections(document.parts) if section.key]
    links = (f'<a href="#{verbatim(section.key)}">{esc(section.link or section.title)}</a>' for section in linked)
    return f"""<!DOCTYPE html>
<html lang="{_LOCALES[language()]}"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{esc(document.whole_title)}</title><style>{style}</style></head><body>
<header><h1><small>{esc(document.about or "flopwatch")}</small>{esc(document.title)}</h1>
{lead}</header>
<nav>{"".join(links)}</nav>
<main>
{body}
</main>
<footer>{esc(made)}</footer>
<script>{script}</script></body></html>
"""


def in_words(text: str) -> str:
    """A text whose commands stand between backticks.

    >>> in_words("Run `ls <x>`.")
    'Run <code>ls &lt;x&gt;</code>.'
    """
    return re.sub("`([^`]+)`", r"<code>\1</code>", esc(text))


def _class(*names: str) -> str:
    known = " ".join(filter(None, names))
    return f' class="{known}"' if known else ""


def _paragraph(text: str) -> str:
    return f'<p class="soft small">{in_words(text)}</p>' if text else ""


class _Html(doc.Renderer[str]):
    """Pieces of HTML. The level is that of the headings."""

    def sections(self, parts: Sequence[doc.Part]) -> Iterator[doc.Section]:
        for part in self.shown(parts):
            if isinstance(part, doc.Section):
                yield part

    def text(self, part: doc.Text) -> Iterator[str]:
        tag = "div" if part.tone == "warn" else "p"
        yield f"<{tag}{_class(_CLASSES.get(part.tone, part.tone))}>{in_words(part.text)}</{tag}>"

    def items(self, part: doc.Items) -> Iterator[str]:
        tag = "ol" if part.is_numbered else "ul"
        items = (
            in_words(text) if isinstance(text, str) else f"<b>{in_words(text.text)}</b> {in_words(text.detail)}"
            for text in part.texts
        )
        yield f"<{tag}>{''.join(f'<li>{item}</li>' for item in items)}</{tag}>"

    def facts(self, part: doc.Facts) -> Iterator[str]:
        known = ((name, doc.as_cell(value)) for name, value in part.pairs)
        listed = "".join(
            f"<dt>{esc(name)}</dt><dd{_class(cell.tone)}>{esc(cell.whole)}</dd>" for name, cell in known if cell.text
        )
        yield f"<dl>{listed}</dl>" if listed else ""

    def verbatim(self, part: doc.Verbatim) -> Iterator[str]:
        title = f'<span class="soft small">{esc(part.title)}</span>' if part.title else ""
        yield f"{title}<pre>{verbatim(part.text)}</pre>"

    def tiles(self, part: doc.Tiles) -> Iterator[str]:
        tiles = (f'<div class="tile"><b>{esc(value)}</b><span>{esc(words)}</span></div>' for value, words in part.pairs)
        yield f'<div class="tiles">{"".join(tiles)}</div>'

    def section(self, part: doc.Section) -> Iterator[str]:
        key = f' id="{verbatim(part.key)}"' if part.key else ""
        remark = f"<small>{esc(part.remark)}</small>" if part.remark else ""
        lead = "".join(
            f"{_content(cell)} " if cell.tone == "chip" else f"<b>{esc(cell.whole)}</b> " for cell in part.lead
        )
        title = f"{lead}{esc(part.title)}{remark}"
        if part.is_open is None:
            head = f"<h{self.level}>{title}</h{self.level}>" if part.title else ""
            start, end = f"<section{key}{_class(part.tone)}>{head}", "</section>"
        else:
            style, state = f"card o-{part.tone}" if part.tone else "fold", " open" if part.is_open else ""
            start = f'<details{key} class="{style}"{state}><summary>{title}</summary><div class="body">'
            end = "</div></details>"
        yield start
        yield from self.below(part.parts)
        yield end

    def grid(self, part: doc.Grid) -> Iterator[str]:
        columns, rows = part.shown("html")
        sides, left_out = [_side(column) for column in columns], part.left_out("html")
        title = f"<h3>{esc(part.title)}</h3>" if part.title else ""
        lines = ("".join(_cell(cell, side) for cell, side in zip(row, sides, strict=True)) for row in rows)
        body = "".join(
            f"<tr{_class('new' if part.merges and row[0].text else '')}>{line}</tr>"
            for row, line in zip(rows, lines, strict=True)
        )
        frame = _class("scroll", "fit" if part.fits else "")
        yield f"{title}<div{frame}><table>{_head(columns)}<tbody>{body}</tbody></table></div>"
        yield _paragraph(f"{self.with_rest(left_out)}." if left_out else "") + _paragraph(part.note)

    def bars(self, part: doc.Bars) -> Iterator[str]:
        (drawn,) = self.drawing(doc.Drawing(part.title, part.remark, *bars_svg(part.bars)))
        if part.behind:
            table = "".join(self.grid(part.behind))
            drawn += (
                f'<details class="behind"><summary>{esc(Said("The numbers as a table"))}</summary>{table}</details>'
            )
        yield f'<div class="chart">{drawn}</div>'

    def drawing(self, part: doc.Drawing) -> Iterator[str]:
        keys = (
            f'<span class="key k{kind % COLOURS}{" dashed" if kind > 1 else ""}">{esc(name)}</span>'
            for name, kind in part.legend
        )
        legend = f'<span class="keys">{"".join(keys)}</span>' if part.legend else ""
        small = f" <small>{esc(part.remark)}</small>" if part.remark else ""
        label = f"{esc(part.title)} {esc(part.remark)}".strip()
        yield (
            f"<figure><figcaption>{esc(part.title)}{small}{legend}</figcaption>"
            f'<svg viewBox="0 0 {part.width:.0f} {part.height:.0f}" role="img" aria-label="{label}">{part.svg}</svg>'
            "</figure>"
        )

    def panels(self, part: doc.Panels) -> Iterator[str]:
        yield f'<div class="panels">{"".join(self.parts(part.drawings))}</div>'


def _head(columns: Sequence[doc.Head]) -> str:
    if not any(column.head for column in columns):
        return ""
    heads = (f"<th{_class(_side(column))}>{esc(column.head)}</th>" for column in columns)
    return f"<thead><tr>{''.join(heads)}</tr></thead>"


def _side(column: doc.Head) -> str:
    return "n" if column.is_number else ""


def _cell(cell: doc.Cell, side: str) -> str:
    tone = "" if cell.tone == "chip" else _CLASSES.get(cell.tone, cell.tone)
    return f"<td{_class(side, tone, 'small' if cell.detail else '')}>{_content(cell)}</td>"


def _content(cell: doc.Cell) -> str:
    text = esc(cell.text)
    if cell.tone == "chip":
        return f'<span class="chip">{text}</span>'
    gap = "" if text.endswith("；") else " "
    detail = f'{gap}<span class="soft">{esc(cell.detail)}</span>' if cell.detail else ""
    return f"{text}{detail}"
