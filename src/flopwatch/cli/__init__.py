"""The entry point of the command line, and what its commands share. Commands that do not need torch do not load it."""

import contextlib
import errno
import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click

from flopwatch.cli.streams import discard_output
from flopwatch.errors import FlopwatchError, InputError
from flopwatch.language import Said, _
from flopwatch.present.json_form import strict_json
from flopwatch.text import plain

_OUTPUT_IS_GONE = (errno.EPIPE, errno.ENOSPC, errno.EIO, errno.EDQUOT)
STANDARD_OUTPUT = "-"
RUNS_FOLDER = "flopwatch-runs"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line. Wrong input prints a message and exits with status 2.

    Args:
        arguments: The arguments after `flopwatch`; None reads them from `sys.argv`.
    """
    from flopwatch.cli.app import app

    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] != ["run"]:  # a script's output streams stay as they are
        for stream in (sys.stdout, sys.stderr):  # which may not encode a lone surrogate in a path
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")
    try:
        outcome = app(args=given, prog_name="flopwatch", standalone_mode=False)
    except click.Abort:
        sys.exit(1)
    except click.UsageError as error:
        _print_usage_error(error)
        sys.exit(2)
    except FlopwatchError as error:
        # What a log does not show is found; all other errors are English.
        print_error(next((said for said in error.args if isinstance(said, Said)), str(error)))
        sys.exit(2)
    except OSError as error:
        if error.errno not in _OUTPUT_IS_GONE or error.filename is not None:
            raise
        _leave_without_output(error)
    if not callable(outcome):
        sys.exit(outcome)
    outcome()


def _print_usage_error(error: click.UsageError) -> None:
    if isinstance(error, click.exceptions.NoArgsIsHelpError):  # its message is the help
        error.show()
        return
    say(error.format_message(), fg="red", err=True)
    command = error.ctx.command_path if error.ctx is not None else "flopwatch"
    say(f"Run '{command} --help' to see its arguments and options.", err=True)


def _leave_without_output(error: OSError) -> None:
    """Exit with status 1, because the result could not be printed. A closed pipe needs no message."""
    with contextlib.suppress(OSError, ValueError):
        discard_output(sys.stdout)
        if error.errno != errno.EPIPE:
            print_error(f"cannot write the output: {error.strerror}")
    sys.exit(1)


class Declared(NamedTuple):
    """An option or an argument in the signature of a command, beside its type."""

    text: str
    names: tuple[str, ...] = ()
    metavar: str | None = None
    is_argument: bool = False


def flag(text: str, *names: str, metavar: str | None = None) -> Any:
    return Declared(text, names, metavar)


def argument(text: str, metavar: str) -> Any:
    return Declared(text, metavar=metavar, is_argument=True)


_MOST_TERAFLOPS = 1e6


def flops_per_s(peak_tflops: float) -> float:
    """The FLOP/s of `--peak-tflops`; raises InputError if no device can have such a peak."""
    if not 0 < peak_tflops < _MOST_TERAFLOPS:
        raise InputError(f"--peak-tflops must be a positive number of TFLOP/s, such as 989.4, got {peak_tflops:g}")
    return peak_tflops * 1e12


def say(text: str, **style: Any) -> None:
    """Print what was found in the reader's language, as `click.secho` does."""
    click.secho(_(text), **style)


def print_json(content: Any) -> None:
    click.echo(strict_json(content, indent=2))


def write_file(path: str, content: str) -> None:
    encoded = content.encode("utf-8", "backslashreplace")
    if path == STANDARD_OUTPUT:
        click.echo(encoded, nl=False)
        return
    try:
        Path(path).expanduser().write_bytes(encoded)
    except OSError as error:
        raise InputError(f"cannot write {path!r}: {error.strerror}; name a file in a folder that exists") from error


def print_error(message: str) -> None:
    """Print a message to stderr, in red on a terminal. Control characters in the message are escaped."""
    say(plain(_(message)), fg="red", err=True)
