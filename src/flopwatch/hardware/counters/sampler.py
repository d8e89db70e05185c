"""Samples a device's counters in a thread of its own, and passes to the next source when one fails or hangs."""

import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from threading import Lock, Thread

from flopwatch.clock import Clock, monotonic_seconds
from flopwatch.guard import Guard
from flopwatch.hardware.counters.chain import probes_for, why_not
from flopwatch.hardware.counters.protocol import CounterProbe, CounterSource, DeviceIdentity
from flopwatch.records.counters import CounterReading, CounterWindow, window_of

_MOST_READINGS = 5000
"""Readings that wait for `take`; those of more than an hour at one per second. Older ones are dropped."""
_SECONDS_TO_CLOSE = 0.2
_SECONDS_TO_ANSWER_AFTER_ALL = 1.0
_READINGS_PER_WINDOW = 5
SHORTEST_INTERVAL_SECONDS = 0.5
"""With shorter intervals, the thread would take more than 0.05 % of a core (docs/counters.md)."""
LONGEST_INTERVAL_SECONDS = 1.0

Notify = Callable[[str, str], object]
"""Gets a code, `counters_changed` or `counters_absent`, and a sentence."""


class CounterSampler:
    """Reads the counters of one device, in a daemon thread.

    The interval is a fifth of the time between two calls of `take`, within `interval_seconds` and 1 s: a reading costs
    the processor some 0.2 ms, because the thread has slept and its code has left the caches, and activity and energy
    are counted by the device, so that a longer interval loses nothing of them.

    The sources are tried in the order of `probes`, in that thread. A source that is absent, that fails, or that does
    not answer for `hang_seconds` is not used again, and the next one takes over; each change is told once. A source
    that hangs is noticed by `take`, which leaves its thread behind and starts another one. After a fork, the child
    does not sample, and its `take` returns None.

    Attributes:
        source: Name of the source that is read now; None if none is.
        reasons: Why each source that was tried before it is not used, in one line, by name.
        interval_seconds: The interval now.
    """

    def __init__(
        self,
        device: DeviceIdentity,
        notify: Notify | None = None,
        *,
        probes: Sequence[CounterProbe] | None = None,
        interval_seconds: float = SHORTEST_INTERVAL_SECONDS,
        hang_seconds: float = 5.0,
        clock: Clock = monotonic_seconds,
    ) -> None:
        """Start the thread; nothing is read on the caller's thread.

        `interval_seconds` is the shortest interval. `notify` is called in the sampling thread.
        """
        self.source: str | None = None
        self.reasons: dict[str, str] = {}
        self._device = device
        self._notify = notify
        self._probes = tuple(probes_for(device) if probes is None else probes)
        self._least_interval = self.interval_seconds = interval_seconds
        self._hang_seconds = hang_seconds
        self._clock = clock
        self._pid = os.getpid()
        self._taken_at = clock()
        self._readings: deque[CounterReading] = deque(maxlen=_MOST_READINGS)
        self._before: CounterReading | None = None
        self._suspected: tuple[float, float] | None = None
        """Since when the source is read that seemed to hang, and when this was noticed."""
        self._turn = _Turn(self, 0)
        self._turn.start()

    def take(self) -> CounterWindow | None:
        """The readings since the last call, together; None if there are none. Takes microseconds and never waits."""
        if os.getpid() != self._pid:
            return None
        self._pass_over_if_hanging()
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
            self._turn.end()
            self._turn.join(_SECONDS_TO_CLOSE)

    def _adapt_interval(self) -> None:
        before, self._taken_at = self._taken_at, self._clock()
        fifth = (self._taken_at - before) / _READINGS_PER_WINDOW
        self.interval_seconds = max(self._least_interval, min(fifth, LONGEST_INTERVAL_SECONDS))

    def _pass_over_if_hanging(self) -> None:
        turn, now = self._turn, self._clock()
        since, index = turn.busy_since, turn.index
        if since is None or turn.ended or now - since < self._hang_seconds:
            return
        if self._suspected is None or self._suspected[0] != since:
            self._suspected = since, now
        # All threads may have been stopped, or this one has not let the other run, as while it pickles a large object.
        if now - self._suspected[1] < _SECONDS_TO_ANSWER_AFTER_ALL:
            return
        turn.end()
        self.reasons[self._probes[index].name] = f"it did not answer for {self._hang_seconds:g} s"
        self._turn = _Turn(self, index + 1)
        self._turn.start()

    def _tell(self, code: str, message: str) -> None:
        if self._notify is not None:
            with Guard("the notice of hardware counters"):
                self._notify(code, message)


class _Turn:
    """One sampling thread, which tries the sources from `index` on. It is left behind if a source hangs."""

    def __init__(self, sampler: CounterSampler, index: int) -> None:
        self.index = index
        self.busy_since: float | None = None
        self.ended = False
        self._sampler = sampler
        self._sleep = Lock()  # released to end the sleep; a timed wait for a lock is the cheapest one
        self._sleep.acquire()
        self._thread = Thread(target=self._run, name="flopwatch-counters", daemon=True)

    def start(self) -> None:
        try:
            self._thread.start()
        except RuntimeError as error:  # the process may have no more threads
            self._sampler._tell("counters_absent", f"no hardware counters are read, because {error}")

    def join(self, seconds: float) -> None:
        if self._thread.ident is not None:
            self._thread.join(seconds)

    def end(self) -> None:
        if not self.ended:
            self.ended = True
            self._sleep.release()

    def _run(self) -> None:
        sampler = self._sampler
        while self.index < len(sampler._probes) and not self.ended:
            self._use(sampler._probes[self.index])
            if not self.ended:
                self.index += 1
        if not self.ended:
            sampler.source = None
            sampler._tell("counters_absent", f"no hardware counters are read. {_listed(sampler.reasons)}")

    def _use(self, probe: CounterProbe) -> None:
        """Sample with one source until it fails or the turn ends."""
        sampler = self._sampler
        source: CounterSource | None = None
        self.busy_since = sampler._clock()
        try:
            source = probe.open(sampler._device)
            self._read(source)
            if self.index and not self.ended:
                told = f"hardware counters come from {source.name}. {_listed(sampler.reasons)}"
                sampler._tell("counters_changed", told)
            self._sample_until_ended(source)
        except BaseException as error:  # noqa: BLE001 - SystemExit would end the thread without a report
            if not self.ended:
                sampler.reasons[probe.name] = why_not(error)
        self.busy_since = sampler._clock()
        if source is not None:
            with suppress(BaseException):  # its library may do anything, and the next source waits
                source.close()
        self.busy_since = None

    def _sample_until_ended(self, source: CounterSource) -> None:
        while not self.ended:
            self.busy_since = None
            if not self._sleep.acquire(timeout=max(self._sampler.interval_seconds, source.interval_seconds)):
                self.busy_since = self._sampler._clock()
                self._read(source)

    def _read(self, source: CounterSource) -> None:
        reading = source.sample()
        if not self.ended:
            self._sampler.source = source.name
            self._sampler._readings.append(reading)


def _listed(reasons: Mapping[str, str]) -> str:
    """Sources with their reasons; sources with the same reason stand together."""
    names: dict[str, list[str]] = {}
    for name, reason in tuple(reasons.items()):
        names.setdefault(reason, []).append(name)
    return "; ".join(f"{', '.join(of)}: {reason}" for reason, of in names.items()) or "No source knows this device"
