"""The command line: `flopwatch`. Answers without torch whenever the question does not need it."""

import contextlib
import errno
import io
import os
import sys
from collections.abc import Sequence

from flopwatch.errors import FlopwatchError

_OUTPUT_IS_GONE = (errno.EPIPE, errno.ENOSPC, errno.EIO, errno.EDQUOT)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; wrong input ends with a message and exit status 2.

    Args:
        arguments: What follows `flopwatch`; None takes the process's own.
    """
    from flopwatch.cli.app import app

    _take_every_character()
    try:
        app(args=None if arguments is None else list(arguments))
    except FlopwatchError as error:
        from flopwatch.cli.output import print_error

        print_error(str(error))
        sys.exit(2)
    except OSError as error:
        if error.errno not in _OUTPUT_IS_GONE or error.filename is not None:
            raise
        _leave_without_output(error)


def _take_every_character() -> None:
    """A path may hold half a character, and a stream may know few letters: what cannot be written is spelled out."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _leave_without_output(error: OSError) -> None:
    """What was asked for could not be shown, so this is no success; a closed pipe wants no word about it."""
    from flopwatch.cli.output import print_error

    with contextlib.suppress(OSError, ValueError):
        # What waits in the buffer would be tried again at the end of Python.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        if error.errno != errno.EPIPE:
            print_error(f"cannot write the output: {error.strerror}")
    sys.exit(1)
