"""Keeps what a part of flopwatch raises from the training, and shows it to maintainers.

With `FLOPWATCH_LOG=debug` in the environment, every exception that is caught is printed with its traceback, and so is
every decision about the exactness of FLOPs.
"""

import logging
import os
from collections.abc import Callable
from types import TracebackType

is_debugging = os.environ.get("FLOPWATCH_LOG") == "debug"
_log = logging.getLogger("flopwatch.debug")
if is_debugging:
    _log.addHandler(logging.StreamHandler())
    _log.setLevel(logging.DEBUG)
    _log.propagate = False


class Guard:
    """A context that catches exceptions, calls `on_failure` with the part's name and the exception, and goes on."""

    __slots__ = ("_on_failure", "_part")

    def __init__(self, part: str, on_failure: Callable[[str, Exception], object] | None = None) -> None:
        self._part, self._on_failure = part, on_failure

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> bool:
        if not isinstance(error, Exception):
            return False
        caught(self._part, error)
        if self._on_failure is not None:
            self._on_failure(self._part, error)
        return True


def caught(where: str, error: BaseException) -> None:
    """Print an exception that goes no further."""
    if is_debugging:
        _log.debug("flopwatch: caught in %s", where, exc_info=error)


def decided(what: str, *facts: object) -> None:
    """Print a decision about the exactness of FLOPs."""
    if is_debugging:
        _log.debug(f"flopwatch: {what}", *facts)
