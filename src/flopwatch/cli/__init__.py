"""The entry point of the command line, and output streams whose errors do not stop a command.

Commands that do not need torch do not load it. While trials run, a closed pipe, a full disk or a closed terminal is
reported once, and the trials continue.
"""

import contextlib
import errno
import io
import os
import shutil
import stat
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from queue import SimpleQueue
from threading import Thread
from typing import Any, NamedTuple, TextIO, cast

import click

from flopwatch.errors import FlopwatchError

_OUTPUT_IS_GONE = (errno.EPIPE, errno.ENOSPC, errno.EIO, errno.EDQUOT)
_WIDEST_TEXT = 100


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line. Wrong input prints a message and exits with status 2.

    Args:
        arguments: The arguments after `flopwatch`; None reads them from `sys.argv`.
    """
    from flopwatch.cli.app import app

    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] != ["run"]:  # a script's output streams stay as they are
        _escape_unknown_characters()
    try:
        outcome = app(args=given, prog_name="flopwatch", standalone_mode=False)
    except click.Abort:
        sys.exit(1)
    except click.UsageError as error:
        _print_usage_error(error)
        sys.exit(2)
    except FlopwatchError as error:
        print_error(str(error))
        sys.exit(2)
    except OSError as error:
        if error.errno not in _OUTPUT_IS_GONE or error.filename is not None:
            raise
        _leave_without_output(error)
    if not callable(outcome):
        sys.exit(outcome)
    outcome()


def _print_usage_error(error: click.UsageError) -> None:
    """Print in two lines what is wrong with the arguments, and the command that prints the help."""
    if isinstance(error, click.exceptions.NoArgsIsHelpError):  # its message is the help
        error.show()
        return
    click.secho(error.format_message(), fg="red", err=True)
    command = error.ctx.command_path if error.ctx is not None else "flopwatch"
    click.echo(f"Run '{command} --help' to see its arguments and options.", err=True)


def _escape_unknown_characters() -> None:
    """Make stdout and stderr escape a character that they cannot encode, such as a lone surrogate in a path."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _leave_without_output(error: OSError) -> None:
    """Exit with status 1, because the result could not be printed. A closed pipe needs no message."""
    with contextlib.suppress(OSError, ValueError):
        _discard_output(sys.stdout)
        if error.errno != errno.EPIPE:
            print_error(f"cannot write the output: {error.strerror}")
    sys.exit(1)


def _discard_output(stream: TextIO) -> None:
    """Send the stream to /dev/null, because otherwise Python would write its buffer at exit and fail again."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


class Declared(NamedTuple):
    """An option or an argument in the signature of a command, beside its type."""

    text: str
    names: tuple[str, ...] = ()
    metavar: str | None = None
    is_argument: bool = False


def flag(text: str, *names: str, metavar: str | None = None) -> Any:
    """A command-line option with its help text. Without `names`, the option is named after the parameter."""
    return Declared(text, names, metavar)


def argument(text: str, metavar: str) -> Any:
    return Declared(text, metavar=metavar, is_argument=True)


def print_json(content: Any) -> None:
    import json

    click.echo(json.dumps(content, indent=2))


def print_error(message: str) -> None:
    """Print a message to stderr, in red on a terminal. Control characters in the message are escaped."""
    from flopwatch.text import plain

    click.secho(plain(message), fg="red", err=True)


def text_width() -> int:
    return min(shutil.get_terminal_size().columns, _WIDEST_TEXT)


def print_section(label: str, label_width: int, paragraphs: Iterable[str]) -> None:
    """Print a label and, to the right of it, paragraphs wrapped to the terminal.

    A paragraph that begins with a space is a line of a table. It is printed unwrapped, because a number that is broken
    over two lines is hard to read.
    """
    indent = 2 + label_width
    width = max(text_width() - indent, 20)
    lines: list[str] = []
    for paragraph in paragraphs:
        wrapped = textwrap.wrap(paragraph, width, break_on_hyphens=False)
        lines += [paragraph] if paragraph.startswith(" ") else [f"{'':{indent}}{line}" for line in wrapped]
    click.secho(f"  {label:<{label_width}}", dim=True, nl=False)
    click.echo("\n".join(lines)[indent:])


class LastingStream:
    """A text stream whose `write` and `flush` do not raise if the pipe is closed or the disk is full.

    Args:
        stream: The stream to write to.
        other: The stream that gets one message when `stream` can no longer be written to.
    """

    def __init__(self, stream: TextIO, other: TextIO) -> None:
        self._stream, self._other = stream, other
        self.is_gone = False
        self.encoding = getattr(stream, "encoding", None) or "utf-8"
        self.errors = getattr(stream, "errors", None) or "strict"
        self.closed = False

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() takes a str, got {type(text).__name__}")
        if self.is_gone:
            return len(text)
        try:
            self._stream.write(text)
        except UnicodeError:  # the encoding lacks a character, or the text has a lone surrogate
            return self.write(text.encode(self.encoding, "backslashreplace").decode(self.encoding))
        except BlockingIOError:  # a non-blocking pipe is full: this text is lost
            return len(text)
        except (OSError, ValueError) as error:
            if not self._may_recover(error):
                self._give_up(error)
        return len(text)

    def flush(self, *, is_last: bool = False) -> None:
        if self.is_gone:
            return
        try:
            self._stream.flush()
        except BlockingIOError:
            return
        except (OSError, ValueError) as error:
            if is_last or not self._may_recover(error):
                self._give_up(error)

    def _may_recover(self, error: Exception) -> bool:
        """Whether the output is a file on a full disk: the stream keeps the text and writes it once there is space."""
        if getattr(error, "errno", None) not in (errno.ENOSPC, errno.EDQUOT):
            return False
        with contextlib.suppress(OSError, ValueError):
            return stat.S_ISREG(os.fstat(self._stream.fileno()).st_mode)
        return False

    def isatty(self) -> bool:
        with contextlib.suppress(OSError, ValueError):
            return self._stream.isatty()
        return False

    def fileno(self) -> int:
        return self._stream.fileno()

    def writable(self) -> bool:
        return True

    def _give_up(self, error: Exception) -> None:
        self.is_gone = True
        with contextlib.suppress(OSError, ValueError):
            _discard_output(self._stream)
        # A reader such as `| head -1` closes the pipe on purpose, so a BrokenPipeError needs no message.
        if not isinstance(error, BrokenPipeError):
            reason = getattr(error, "strerror", None) or str(error)
            with contextlib.suppress(OSError, ValueError):
                self._other.write(f"flopwatch: cannot write to the output ({reason}); continuing without it\n")
                self._other.flush()


@contextlib.contextmanager
def lasting_output() -> Iterator[None]:
    """Inside the block, printing does not raise if the pipe is closed or the disk is full."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (
        cast("TextIO", LastingStream(stream, other)) if stream is not None else stream
        for stream, other in (before, before[::-1])
    )
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, LastingStream):
                stream.flush(is_last=True)
        sys.stdout, sys.stderr = before


_PATIENCE_SECONDS = 5.0


class PatientLines:
    """Prints lines in a thread, so that a pipe that is read slowly, such as `| less`, does not block the sweep.

    Args:
        say: A function that prints a line. It blocks while the pipe is full.
    """

    def __init__(self, say: Callable[[str], object]) -> None:
        self._say = say
        self._lines: SimpleQueue[str | None] = SimpleQueue()  # its put() is safe in a signal handler

        # The thread is not a daemon, so that Python waits at exit until every line is printed.
        self._thread = Thread(target=self._print, name="flopwatch lines")
        self._thread.start()

    def __call__(self, line: str) -> None:
        self._lines.put(line)

    def close(self) -> None:
        """Wait up to 5 s until all lines are printed. Lines that take longer are printed before Python exits."""
        self._lines.put(None)
        self._thread.join(_PATIENCE_SECONDS)

    def _print(self) -> None:
        while (line := self._lines.get()) is not None:
            with contextlib.suppress(Exception, SystemExit):
                self._say(line)
