"""What flopwatch does while the disk of a sweep is full: it waits for space and writes then. Standard library only."""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from flopwatch.errors import InputError
from flopwatch.files import is_full_disk

_Result = TypeVar("_Result")
_TRY_SECONDS = 0.5  # time between two tries to write


def when_there_is_space(write: Callable[[], _Result], waits: Callable[[str], None] = lambda why: None) -> _Result:
    """Call `write` again and again until it does not fail because the disk is full, and return what it returns.

    `waits` is called before each pause with the system's message. It may raise an exception to give up.
    """
    while True:
        try:
            return write()
        except OSError as error:
            if not is_full_disk(error):
                raise
            waits(str(error.strerror))
        time.sleep(_TRY_SECONDS)


@contextlib.contextmanager
def refused_on_a_full_disk(sweep: Path) -> Iterator[None]:
    """Raise an InputError if the disk is full before any trial has run."""
    try:
        yield
    except OSError as error:
        if not is_full_disk(error):
            raise
        raise InputError(
            f"cannot write to {error.filename or sweep}: {error.strerror}; "
            "free some space, or choose another folder with --output"
        ) from None
