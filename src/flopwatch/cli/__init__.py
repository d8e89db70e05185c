"""The command line: `flopwatch`. It does not load torch for commands that do not need it.

Output must not decide over the work: while trials run, a closed pipe, a full disk or a terminal that disappeared is
reported once, and everything goes on.
"""

import contextlib
import errno
import io
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from threading import Thread
from typing import TextIO, cast

import typer

from flopwatch.compat import with_new_flags
from flopwatch.errors import FlopwatchError

_OUTPUT_IS_GONE = (errno.EPIPE, errno.ENOSPC, errno.EIO, errno.EDQUOT)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line. Wrong input ends with a message and exit status 2.

    Args:
        arguments: The arguments after `flopwatch`; None takes those of the process.
    """
    from flopwatch.cli.app import app

    _escape_unknown_characters()
    given, notes = with_new_flags(sys.argv[1:] if arguments is None else arguments)
    for note in notes:
        typer.echo(f"note: {note}", err=True)
    try:
        app(args=given)
    except FlopwatchError as error:
        print_error(str(error))
        sys.exit(2)
    except OSError as error:
        if error.errno not in _OUTPUT_IS_GONE or error.filename is not None:
            raise
        _leave_without_output(error)


def _escape_unknown_characters() -> None:
    """Escape characters that a stream cannot encode, such as lone surrogates in paths, instead of raising."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _leave_without_output(error: OSError) -> None:
    """Exit with status 1, because the result was not shown. A closed pipe needs no message."""
    with contextlib.suppress(OSError, ValueError):
        # Python would write what is left in the buffer at exit, and fail again.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        if error.errno != errno.EPIPE:
            print_error(f"cannot write the output: {error.strerror}")
    sys.exit(1)


def print_error(message: str) -> None:
    """Print a message to stderr, in red on a terminal. Control characters from users or files are escaped."""
    from flopwatch.records.reading import plain

    typer.secho(plain(message), fg="red", err=True)


class LastingStream:
    """A text stream whose `write` and `flush` never raise because of the receiver.

    Args:
        stream: The stream to write to, as long as that works.
        other: The stream for the one message when it no longer works.
    """

    def __init__(self, stream: TextIO, other: TextIO) -> None:
        self._stream, self._other = stream, other
        self.is_gone = False
        self.encoding = getattr(stream, "encoding", None) or "utf-8"
        self.errors = getattr(stream, "errors", None) or "strict"
        self.closed = False

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"text is written here, not {type(text).__name__}")
        if self.is_gone:
            return len(text)
        try:
            self._stream.write(text)
        except UnicodeError:  # a lone surrogate, or an encoding with few characters
            return self.write(text.encode(self.encoding, "backslashreplace").decode(self.encoding))
        except BlockingIOError:  # a full non-blocking pipe: this piece is lost
            return len(text)
        except (OSError, ValueError) as error:
            self._give_up(error)
        return len(text)

    def flush(self) -> None:
        if self.is_gone:
            return
        try:
            self._stream.flush()
        except BlockingIOError:
            return
        except (OSError, ValueError) as error:
            self._give_up(error)

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
            # Python would write the rest of the buffer at exit, fail again and exit with status 120.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
        if not isinstance(error, BrokenPipeError):  # as by `| head -1`: the reader has read enough
            reason = getattr(error, "strerror", None) or str(error)
            with contextlib.suppress(OSError, ValueError):
                self._other.write(f"flopwatch: cannot write to the output ({reason}); continuing without it\n")
                self._other.flush()


@contextlib.contextmanager
def lasting_output() -> Iterator[None]:
    """Replace stdout and stderr by streams that never raise because of the receiver."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (
        cast("TextIO", LastingStream(stream, other)) if stream is not None else stream
        for stream, other in (before, before[::-1])
    )
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        sys.stdout, sys.stderr = before


_PATIENCE_SECONDS = 5.0


class PatientLines:
    """Prints lines in a thread, so that a pipe that is not read (`| less`) does not block the sweep.

    Args:
        say: Prints a line; it may block for any time.
    """

    def __init__(self, say: Callable[[str], object]) -> None:
        self._say = say
        self._lines: SimpleQueue[str | None] = SimpleQueue()  # whose put() may be called by a signal handler
        # Not a daemon thread: Python waits for it at exit, so that no line is lost.
        self._thread = Thread(target=self._print, name="flopwatch lines")
        self._thread.start()

    def __call__(self, line: str) -> None:
        self._lines.put(line)

    def close(self) -> None:
        """Wait a few seconds for the lines that are left; the rest is printed at exit, if it can be."""
        self._lines.put(None)
        self._thread.join(_PATIENCE_SECONDS)

    def _print(self) -> None:
        while (line := self._lines.get()) is not None:
            with contextlib.suppress(Exception, SystemExit):
                self._say(line)
