"""Output streams whose errors do not stop a command.

While trials run, a closed pipe, a full disk or a closed terminal is reported once, and the trials continue.
"""

import contextlib
import os
import stat
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast

from flopwatch.files import is_full_disk


def discard_output(stream: TextIO) -> None:
    """Send the stream to /dev/null, because otherwise Python would write its buffer at exit and fail again."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


class LastingStream:
    """A text stream whose `write` and `flush` do not raise if the pipe is closed or the disk is full.

    `other` gets one message when `stream` can no longer be written to.
    """

    def __init__(self, stream: TextIO, other: TextIO) -> None:
        self._stream, self._other = stream, other
        self.is_gone = False
        self.encoding = getattr(stream, "encoding", None) or "utf-8"
        self.errors = getattr(stream, "errors", None) or "strict"
        self.closed = False

    def write(self, text: str) -> int:
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
        if not is_full_disk(error):
            return False
        with contextlib.suppress(OSError, ValueError):
            return stat.S_ISREG(os.fstat(self._stream.fileno()).st_mode)
        return False

    def isatty(self) -> bool:
        with contextlib.suppress(OSError, ValueError):
            return self._stream.isatty()
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _give_up(self, error: Exception) -> None:
        self.is_gone = True
        with contextlib.suppress(OSError, ValueError):
            discard_output(self._stream)
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
