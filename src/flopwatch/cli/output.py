"""Messages of the command line."""

import typer

from flopwatch.plain_text import plain


def print_error(message: str) -> None:
    """Print to stderr, in red where that is a terminal; a message may hold what the user or a file said."""
    typer.secho(plain(message), fg="red", err=True)
