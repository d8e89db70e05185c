"""Errors of a file system that may pass, as a disk that is full for a while: a sweep of a week waits them out."""

import errno
import time
from collections import deque
from collections.abc import Callable

from flopwatch.trial_records import TrialResult

_PASSING = frozenset(
    (
        errno.ENOSPC,
        errno.EDQUOT,
        errno.ESTALE,
        errno.EIO,
        errno.ETIMEDOUT,
        errno.EAGAIN,
        errno.EMFILE,
        errno.ENFILE,
        errno.EREMOTEIO,
    )
)

_PAUSE_SECONDS = 5.0


def may_pass(error: OSError) -> bool:
    return error.errno in _PASSING


class Pause:
    """Says when to try again, and why not now.

    Args:
        seconds: Between two tries.
        clock: Of this process.

    Attributes:
        why: Empty while all is well.
    """

    def __init__(self, seconds: float | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._clock = _PAUSE_SECONDS if seconds is None else seconds, clock
        self._until = 0.0
        self.why = ""

    def begin(self, error: OSError) -> None:
        self.why = f"waiting: {error.strerror or error}" + (f" ({error.filename})" if error.filename else "")
        self._until = self._clock() + self._seconds

    def is_over(self) -> bool:
        return not self.why or self._clock() >= self._until

    def end(self) -> None:
        self.why = ""


class Ledger:
    """Writes results into the sweep's list, later if it must: the trials' own folders have them anyway.

    Args:
        write: Writes one.
    """

    def __init__(self, write: Callable[[TrialResult], None]) -> None:
        self._write = write
        self._waiting: deque[TrialResult] = deque()
        self.pause = Pause()

    def add(self, result: TrialResult) -> None:
        self._waiting.append(result)
        self.catch_up()

    def catch_up(self) -> None:
        """Write what waits, in order."""
        while self._waiting and self.pause.is_over():
            try:
                self._write(self._waiting[0])
            except OSError as error:
                if not may_pass(error):
                    raise
                self.pause.begin(error)
                return
            self._waiting.popleft()
            self.pause.end()

    def close(self, patience_seconds: float = 60.0) -> int:
        """Write what still waits; how many could not be."""
        deadline = time.monotonic() + patience_seconds
        while self._waiting and time.monotonic() < deadline:
            time.sleep(0.05)
            self.catch_up()
        return len(self._waiting)
