"""Catches what a part of the monitor raises, so that it never reaches the training."""

from collections.abc import Callable
from types import TracebackType

from flopwatch import debug_log


class Guard:
    """A context in which exceptions of one part of the monitor are reported and go no further."""

    __slots__ = ("_on_failure", "_part")

    def __init__(self, part: str, on_failure: Callable[[str, Exception], None]) -> None:
        self._part, self._on_failure = part, on_failure

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> bool:
        if not isinstance(error, Exception):
            return False
        if debug_log.is_on:
            debug_log.caught(self._part, error)
        self._on_failure(self._part, error)
        return True
