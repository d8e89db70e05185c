"""Messages of the command line."""

import typer


def print_error(message: str) -> None:
    """Print to stderr, in red where that is a terminal."""
    typer.secho(message, fg="red", err=True)
