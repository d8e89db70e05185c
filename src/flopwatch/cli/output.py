"""Messages of the command line."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from threading import Thread
from typing import TextIO, cast

import typer

from flopwatch.records.reading import plain


def print_error(message: str) -> None:
    """Print to stderr, in red where that is a terminal; a message may hold what the user or a file said."""
    typer.secho(plain(message), fg="red", err=True)


# Output that never ends the work: a closed pipe, a full disk, a terminal that went away are told once, no more.


class LastingStream:
    """A text stream whose `write` and `flush` never raise for what happened on the other side.

    Args:
        stream: What is written to, while it can be.
        other: Where it is told that it no longer can.
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
        except UnicodeError:  # a half character, or a stream that knows few letters
            return self.write(text.encode(self.encoding, "backslashreplace").decode(self.encoding))
        except BlockingIOError:  # a pipe that is full and may not be waited for: this piece is lost
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
            # What waits in the stream's buffer would be tried again at the end of Python, which then leaves with 120.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
        if not isinstance(error, BrokenPipeError):  # whoever wrote `| head -1` wants no more
            reason = getattr(error, "strerror", None) or str(error)
            with contextlib.suppress(OSError, ValueError):
                self._other.write(f"flopwatch: cannot write to the output ({reason}); the work goes on without it\n")
                self._other.flush()


@contextlib.contextmanager
def lasting_output() -> Iterator[None]:
    """Within it, nothing that is printed can raise because of where it goes."""
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


# Lines printed by a thread of their own: a pipe that nobody reads (`| less`) must not hold up the sweep.


_PATIENCE_SECONDS = 5.0


class PatientLines:
    """Says lines in their order, whenever they can be said; calling it never waits.

    Args:
        say: Prints a line, and may take for ever.
    """

    def __init__(self, say: Callable[[str], object]) -> None:
        self._say = say
        self._lines: SimpleQueue[str | None] = SimpleQueue()  # its put() may be called by a signal handler
        # No daemon: at its end Python waits for what has not been said yet.
        self._thread = Thread(target=self._print, name="flopwatch lines")
        self._thread.start()

    def __call__(self, line: str) -> None:
        self._lines.put(line)

    def close(self) -> None:
        """Wait a little for what is left; the rest is said later, if ever."""
        self._lines.put(None)
        self._thread.join(_PATIENCE_SECONDS)

    def _print(self) -> None:
        while (line := self._lines.get()) is not None:
            with contextlib.suppress(Exception, SystemExit):
                self._say(line)
