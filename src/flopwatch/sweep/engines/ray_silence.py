"""A cluster that does not answer for a while: its head restarts, or the network is cut. Waited out, and told."""

import contextlib
from collections.abc import Iterator

from flopwatch.clock import Clock, monotonic_seconds

_PATIENCE_SECONDS = 24 * 3600.0

_PASSING = ("RpcError", "RaySystemError", "GetTimeoutError")
"""Classes of Ray that also stand for a head that is not there; by name, so that nobody has to import Ray."""


class RaySilence:
    """Remembers since when Ray has not answered.

    Args:
        can_come_back: False for a Ray of our own, which ends for good.
        clock: Measures the silence.

    Attributes:
        since: When it began; None while Ray answers.
    """

    def __init__(self, *, can_come_back: bool, clock: Clock = monotonic_seconds) -> None:
        self.since: float | None = None
        self._can_come_back, self._clock = can_come_back, clock
        self._words = ""

    @contextlib.contextmanager
    def waited_out(self) -> Iterator[None]:
        """What is asked in here may go without an answer, for a day; other mistakes are raised."""
        try:
            yield
        except Exception as error:
            is_passing = isinstance(error, ConnectionError | TimeoutError) or type(error).__name__ in _PASSING
            if not is_passing or not self._can_come_back:
                raise
            if self.since is not None and self._clock() - self.since > _PATIENCE_SECONDS:
                raise
            self.since = self._clock() if self.since is None else self.since
            self._words = " ".join(str(error).split())[:200]

    def heard(self) -> None:
        """Ray has answered."""
        self.since = None

    def state(self) -> str:
        if self.since is None:
            return ""
        return f"Ray has not answered for {self._clock() - self.since:.0f} s: {self._words}"
