"""Write a document as Markdown. Text of users is escaped, so that it cannot become markup."""

import re
from collections.abc import Iterator

from flopwatch.language import Said, _
from flopwatch.present import document as doc
from flopwatch.text import one_line, plain

_SPECIAL = re.compile(r"([\\`*_{}\[\]()<>#|~$])")


def to_markdown(document: doc.Document) -> str:
    lines = [f"## {escaped(document.whole_title)}\n"]
    lines += [f"{escaped(sentence)}\n" for sentence in document.lead]
    lines += _Markdown("markdown", document, 3).parts(document.parts)
    return "\n".join(lines).rstrip() + "\n"


def escaped(text: str) -> str:
    r"""Escape text so that it is one line and Markdown shows it unchanged.

    >>> escaped("a|b <script> @user #12")
    'a\\|b \\<script\\> @\u200buser \\#12'
    """
    # Put a zero-width space after @, because GitHub would otherwise notify the user with that name.
    return _SPECIAL.sub(r"\\\1", one_line(_(text))).replace("@", "@\u200b")


def fenced(text: str) -> str:
    """Write text as a Markdown code block, with a fence that is longer than any run of backticks in the text."""
    text = plain(text)  # Remove control characters first, because this can make separate backticks adjacent.
    longest = max((len(run) for run in re.findall(r"`{3,}", text)), default=2)
    fence = "`" * (longest + 1)
    return f"{fence}text\n{text}\n{fence}"


class _Markdown(doc.Renderer[str]):
    """Lines of Markdown. Charts, strips and raw records need a page."""

    def text(self, part: doc.Text) -> Iterator[str]:
        text = escaped(part.text)
        note = _(Said("Note:"))
        looks = {"warn": f"> **{note}** {text}", "note": f"<sub>{text}</sub>", "strong": f"**{text}**"}
        yield f"{looks.get(part.tone, text)}\n"

    def items(self, part: doc.Items) -> Iterator[str]:
        for place, text in enumerate(part.texts, start=1):
            said = escaped(text) if isinstance(text, str) else f"**{escaped(text.text)}** {escaped(text.detail)}"
            yield f"{f'{place}.' if part.is_numbered else '-'} {said}"
        yield ""

    def facts(self, part: doc.Facts) -> Iterator[str]:
        yield from (f"- {escaped(name)}: {_cell(value)}" for name, value in part.pairs if doc.as_cell(value).text)
        yield ""

    def verbatim(self, part: doc.Verbatim) -> Iterator[str]:
        summary, block = f"<summary>{escaped(part.title)}</summary>", fenced(part.text)
        yield f"<details>{summary}\n\n{block}\n\n</details>\n" if part.title else f"{block}\n"

    def tiles(self, part: doc.Tiles) -> Iterator[str]:
        return self.grid(doc.Grid(("", ""), [(words, doc.Cell(value, "best")) for value, words in part.pairs]))

    def bars(self, part: doc.Bars) -> Iterator[str]:
        rows = [(bar.name, bar.text) for bar in part.bars]
        return self.grid(part.behind or doc.Grid(("", ""), rows, part.title))

    def section(self, part: doc.Section) -> Iterator[str]:
        texts = [escaped(cell.whole) for cell in part.lead]
        lead = f"{', '.join(texts)}: " if texts else ""
        if part.title:
            yield f"{'#' * self.level} {lead}{escaped(part.title)}{escaped(part.remark)}\n"
        yield from self.below(part.parts)

    def grid(self, part: doc.Grid) -> Iterator[str]:
        columns, rows = part.shown("markdown")
        if part.title:
            yield f"**{escaped(part.title)}**\n"
        heads = [escaped(column.head) for column in columns]
        yield f"| {' | '.join(heads)} |"
        yield f"| {' | '.join('--:' if column.is_number else ':--' for column in columns)} |"
        yield from (f"| {' | '.join(map(_cell, row))} |" for row in rows)
        yield ""
        if left_out := part.left_out("markdown"):
            yield _(Said("{sentence}.", sentence=self.with_rest(left_out))) + "\n"
        yield from self.text(doc.Text(part.note, "note")) if part.note else ()


def _cell(cell: doc.Cell | str) -> str:
    if isinstance(cell, str):
        return escaped(cell)
    text, detail = escaped(cell.text), escaped(cell.detail)
    bold = f"**{text}**" if cell.tone in ("best", "better", "worse") and text else text
    return bold + ("" if text.endswith("；") else " ") + detail if detail else bold
