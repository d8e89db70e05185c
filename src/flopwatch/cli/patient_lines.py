"""Lines printed by a thread of their own: a pipe that nobody reads (`| less`) must not hold up the sweep."""

import contextlib
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread

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
