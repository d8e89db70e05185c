"""Samples a device's counters in a thread of its own, until the source fails or hangs."""

import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from threading import Lock, Thread

from flopwatch.clock import Clock, monotonic_seconds
from flopwatch.guard import Guard, caught
from flopwatch.hardware.counters.nvml import open_nvml_counters
from flopwatch.hardware.counters.protocol import CounterSource, CountersUnavailableError, DeviceIdentity
from flopwatch.records.counters import CounterReading, CounterWindow, window_of
from flopwatch.text import first_line

_MOST_READINGS = 5000
"""Readings that wait for `take`; those of more than an hour at one per second. Older ones are dropped."""
_SECONDS_TO_CLOSE = 0.2
_SECONDS_TO_ANSWER_AFTER_ALL = 1.0
_READINGS_PER_WINDOW = 5
SHORTEST_INTERVAL_SECONDS = 0.5
"""With shorter intervals, the thread would take more than 0.05 % of a core (docs/counters.md)."""
LONGEST_INTERVAL_SECONDS = 1.0

OpenSource = Callable[[DeviceIdentity], CounterSource]


class CounterSampler:
    """Reads the counters of one device, in a daemon thread.

    The interval is a fifth of the time between two calls of `take`, within `interval_seconds` and 1 s: a reading costs
    the processor some 0.2 ms, because the thread has slept and its code has left the caches, and activity and energy
    are counted by the device, so that a longer interval loses nothing of them.

    A source that is absent, that fails, or that does not answer for `hang_seconds` is given up. That it hangs is
    noticed by `take`, which leaves the thread behind. After a fork, the child does not sample, and its `take` returns
    None.

    Attributes:
        source: Name of the source while it is read; otherwise None.
        why_absent: Why nothing is read any more, in one line; empty before that.
        interval_seconds: The interval now.
    """

    def __init__(
        self,
        device: DeviceIdentity,
        notify: Callable[[str], object] | None = None,
        *,
        open_source: OpenSource = open_nvml_counters,
        interval_seconds: float = SHORTEST_INTERVAL_SECONDS,
        hang_seconds: float = 5.0,
        clock: Clock = monotonic_seconds,
    ) -> None:
        """Start the thread; nothing is read on the caller's thread.

        `interval_seconds` is the shortest interval. `notify` gets `why_absent`, once, in the sampling thread or in
        `take`.
        """
        self.source: str | None = None
        self.why_absent = ""
        self._device, self._notify, self._open_source = device, notify, open_source
        self._least_interval = self.interval_seconds = interval_seconds
        self._hang_seconds, self._clock, self._pid = hang_seconds, clock, os.getpid()
        self._taken_at = clock()
        self._readings: deque[CounterReading] = deque(maxlen=_MOST_READINGS)
        self._before: CounterReading | None = None
        self._busy_since: float | None = None
        """Since when the source works on an answer; None while the thread sleeps."""
        self._suspected: tuple[float, float] | None = None
        """Since when the source is read that seemed to hang, and when this was noticed."""
        self._is_over = False
        self._sleep = Lock()  # released to end the sleep; a timed wait for a lock is the cheapest one
        self._sleep.acquire()
        self._thread = Thread(target=self._run, name="flopwatch-counters", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # the process may have no more threads
            self._give_up(first_line(error))

    def take(self) -> CounterWindow | None:
        """The readings since the last call, together; None if there are none. Takes microseconds and never waits."""
        if os.getpid() != self._pid:
            return None
        self._give_up_if_hanging()
        self._adapt_interval()
        taken = []
        with suppress(IndexError):
            while True:
                taken.append(self._readings.popleft())
        window = window_of(taken, self._before)
        self._before = taken[-1] if taken else self._before
        return window

    def close(self) -> None:
        """End the thread, or leave it behind if its source does not answer."""
        if os.getpid() == self._pid:
            self._end()
            if self._thread.ident is not None:
                self._thread.join(_SECONDS_TO_CLOSE)

    def _end(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._sleep.release()

    def _give_up(self, why: str) -> None:
        self._end()
        self.source, self.why_absent = None, why
        if self._notify is not None:
            with Guard("the notice of hardware counters"):
                self._notify(why)

    def _give_up_if_hanging(self) -> None:
        since, now = self._busy_since, self._clock()
        if since is None or self._is_over or now - since < self._hang_seconds:
            return
        if self._suspected is None or self._suspected[0] != since:
            self._suspected = since, now
        # All threads may have been stopped, or this one has not let the other run, as while it pickles a large object.
        if now - self._suspected[1] >= _SECONDS_TO_ANSWER_AFTER_ALL:
            self._give_up(f"the driver did not answer for {self._hang_seconds:g} s")

    def _adapt_interval(self) -> None:
        before, self._taken_at = self._taken_at, self._clock()
        fifth = (self._taken_at - before) / _READINGS_PER_WINDOW
        self.interval_seconds = max(self._least_interval, min(fifth, LONGEST_INTERVAL_SECONDS))

    def _run(self) -> None:
        """In the sampling thread, read until the source fails or the sampler is closed."""
        source: CounterSource | None = None
        self._busy_since = self._clock()
        try:
            source = self._open_source(self._device)
            while not self._is_over:
                self._busy_since = self._clock()
                reading = source.sample()
                self._busy_since = None
                if not self._is_over:
                    self.source = source.name
                    self._readings.append(reading)
                    self._sleep.acquire(timeout=self.interval_seconds)
        except BaseException as error:  # noqa: BLE001 - SystemExit would end the thread without a report
            if not self._is_over:
                self._give_up(why_not(error))
        if source is not None:
            with suppress(BaseException):  # the driver's library may do anything
                source.close()


def why_not(error: BaseException) -> str:
    """Why a source is not used, in one line."""
    caught("hardware counters", error)
    said = first_line(error)
    return said if isinstance(error, CountersUnavailableError) else f"{type(error).__name__}: {said}"


def read_once(
    device: DeviceIdentity, open_source: OpenSource = open_nvml_counters, *, seconds: float = 5.0
) -> tuple[CounterWindow | None, str]:
    """The first reading of a device's counters, or None and why there is none; waits at most so many seconds."""
    sampler, ends = CounterSampler(device, open_source=open_source), time.monotonic() + seconds
    while (window := sampler.take()) is None and not sampler.why_absent and time.monotonic() < ends:
        time.sleep(0.005)
    sampler.close()
    if window is not None:
        return window, ""
    return None, sampler.why_absent or f"the driver did not answer for {seconds:g} s"
