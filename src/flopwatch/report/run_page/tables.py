"""Tables and lists of a run's page. All text is escaped here."""

import re
from collections.abc import Iterable, Sequence

from flopwatch.present.svg import esc


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], sides: str, caption: str = "") -> str:
    """A table that scrolls by itself on a narrow screen.

    Args:
        heads: Headings of the columns.
        rows: Texts of the cells.
        sides: One letter for each column: `n` for a number, which is aligned right, and `t` for a text.
        caption: A title of the table.

    >>> table(("a",), [("<b>",)], "t")
    '<div class="scroll"><table><thead><tr><th scope="col">a</th></tr></thead><tbody><tr><td class="text">&lt;b&gt;</td></tr></tbody></table></div>'
    """  # noqa: E501
    head = "".join(
        f'<th scope="col"{" class=n" if side == "n" else ""}>{esc(name)}</th>'
        for name, side in zip(heads, sides, strict=True)
    )
    title = f"<caption>{esc(caption)}</caption>" if caption else ""
    body = "".join(f"<tr>{_cells(row, sides)}</tr>" for row in rows)
    return f'<div class="scroll"><table>{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _cells(row: Sequence[str], sides: str) -> str:
    names = {"n": "n", "t": "text"}
    return "".join(f'<td class="{names[side]}">{esc(cell)}</td>' for cell, side in zip(row, sides, strict=True))


def behind(tables: str) -> str:
    """The tables behind a chart, which have its numbers for those who cannot see it."""
    return f'<details class="behind"><summary>The numbers as a table</summary>{tables}</details>'


def facts(pairs: Iterable[tuple[str, str]]) -> str:
    """A list of names and what they are."""
    return '<dl class="facts">' + "".join(f"<dt>{esc(name)}</dt><dd>{esc(text)}</dd>" for name, text in pairs) + "</dl>"


def paragraph(text: str) -> str:
    """A remark in small letters."""
    return f'<p class="soft small">{in_words(text)}</p>'


def in_words(text: str) -> str:
    """A text whose commands stand between backticks.

    >>> in_words("Run `ls <x>`.")
    'Run <code>ls &lt;x&gt;</code>.'
    """
    return re.sub("`([^`]+)`", r"<code>\1</code>", esc(text))
