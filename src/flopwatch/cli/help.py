"""`--help` in the reader's language. Click breaks lines by letters, of which Chinese ones take two columns."""

from collections.abc import Iterable

import click

from flopwatch.language import shown
from flopwatch.text import cells, padded, wrapped


class Formatter(click.HelpFormatter):
    def write_usage(self, prog: str, args: str = "", prefix: str | None = None) -> None:
        super().write_usage(prog, args, prefix or f"{shown('Usage:')} ")

    def write_heading(self, heading: str) -> None:
        self.write(f"{'':>{self.current_indent}}{shown(f'{heading}:')}\n")

    def write_text(self, text: str) -> None:
        paragraphs = [self._lines(paragraph, self.current_indent) for paragraph in text.split("\n\n")]
        self.write("\n".join("".join(f"{'':>{self.current_indent}}{line}\n" for line in part) for part in paragraphs))

    def write_dl(self, rows: Iterable[tuple[str, str]], col_max: int = 30, col_spacing: int = 2) -> None:
        """Names, each with its explanation beside it, or below it if the name is long."""
        named = list(rows)
        first = min(max((cells(name) for name, _ in named), default=0), col_max) + col_spacing
        for name, text in named:
            lines = self._lines(text, self.current_indent + first)
            if cells(name) + col_spacing <= first:
                name, lines = padded(name, first) + "".join(lines[:1]), lines[1:]
            self.write(f"{'':>{self.current_indent}}{name}\n")
            self.write("".join(f"{'':>{self.current_indent + first}}{line}\n" for line in lines))

    def _lines(self, text: str, indent: int) -> list[str]:
        body, mark, end = text.partition("  [")  # click's `[default: 4]`
        said = " ".join(shown(" ".join(part.split())) for part in (body, mark + end) if part)
        return wrapped(said, max(self.width - indent, 10))
