"""A small HTML table, which notebooks show for an object with `_repr_html_`. Standard library only."""

from collections.abc import Iterable
from html import escape

from flopwatch.language import _


def html_table(title: str, lines: Iterable[tuple[str, str]]) -> str:
    """A table of two columns below a title, for an object with `_repr_html_`.

    It sets no colours, so it is readable on light and dark pages.

    >>> html_table("a <b>", [])
    '<table><caption style="text-align:left;font-weight:bold">a &lt;b&gt;</caption></table>'
    """
    style = "text-align:left;vertical-align:top"
    rows = "".join(
        f'<tr><th scope="row" style="{style};white-space:nowrap;font-weight:normal">{escape(_(label))}</th>'
        f'<td style="{style}">{escape(_(text))}</td></tr>'
        for label, text in lines
    )
    return f'<table><caption style="text-align:left;font-weight:bold">{escape(_(title))}</caption>{rows}</table>'
