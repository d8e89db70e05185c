"""For your own tests: fakes of devices, counters, a clock, a sink, and an engine that starts no processes."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

from flopwatch.clock import Clock, monotonic_seconds
from flopwatch.errors import InputError
from flopwatch.files import write_json
from flopwatch.hardware.counters.protocol import CountersUnavailableError, DeviceIdentity
from flopwatch.hardware.peaks import DeviceFacts
from flopwatch.records.counters import CounterReading
from flopwatch.records.run import Record
from flopwatch.records.trial import TrialResult, TrialSpec
from flopwatch.records.trial_files import RESULT, trial_folder
from flopwatch.sweep.engines.protocol import Ended
from flopwatch.sweep.folder import Trial

__all__ = ["FAKE_DEVICES", "FakeClock", "FakeCounters", "InProcessEngine", "RecordingSink", "fake_device"]

FAKE_DEVICES = {
    "h100": DeviceFacts("NVIDIA H100 80GB HBM3", "cuda", 132, 79.1, None, (9, 0), 1980.0),
    "a100": DeviceFacts("NVIDIA A100-SXM4-40GB", "cuda", 108, 39.4, None, (8, 0), 1410.0),
    "a100-mig-1g.5gb": DeviceFacts("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "cuda", 14, 4.75, None, (8, 0), 1410.0),
    "a100-80gb-mig-1g.10gb": DeviceFacts("NVIDIA A100-SXM4-80GB MIG 1g.10gb", "cuda", 14, 9.5, None, (8, 0), 1410.0),
    "v100": DeviceFacts("Tesla V100-SXM2-32GB", "cuda", 80, 31.7, None, (7, 0), 1530.0),
    "mi300x": DeviceFacts("AMD Instinct MI300X", "cuda", 304, 191.7, "gfx942:sramecc+:xnack-", None, 2100.0),
    "mi300x-cpx": DeviceFacts("AMD Instinct MI300X", "cuda", 38, 23.9, "gfx942:sramecc+:xnack-", None, 2100.0),
    "max-1550-tile": DeviceFacts("Intel(R) Data Center GPU Max 1550", "xpu", 56, 64.0),
    "m1-max-24-cores": DeviceFacts("Apple M1 Max", "mps", 24),
    "ascend-910b2": DeviceFacts("Ascend910B2", "npu"),
    "unheard-of": DeviceFacts("Unheard-of Accelerator 9000", "cuda", 64, 80.0, None, (99, 0), 2000.0),
}


def fake_device(product: str) -> DeviceFacts:
    """The facts of a device that this machine need not have, for `peak_flops(device=...)`.

    >>> fake_device("a100-mig-1g.5gb").unit_count
    14
    """
    if product not in FAKE_DEVICES:
        raise InputError(f"there is no fake device {product!r}; use one of: {', '.join(FAKE_DEVICES)}")
    return FAKE_DEVICES[product]


class FakeClock:
    """A clock that stands still until `advance` is called.

    >>> clock = FakeClock()
    >>> clock.advance(2.5)
    >>> clock()
    2.5
    """

    def __init__(self, seconds: float = 0.0) -> None:
        self._seconds = seconds

    def __call__(self) -> float:
        return self._seconds

    def advance(self, seconds: float) -> None:
        self._seconds += seconds


class RecordingSink:
    """A sink that keeps its records in a list. Its arguments make it fail, hang or be slow.

    >>> from flopwatch.records.run import Notice
    >>> sink = RecordingSink()
    >>> sink.write(Notice(1, "info", "hello", "it works"))
    >>> sink.records[0].code
    'hello'

    Args:
        name: The sink's name.
        raises: The exception that `write` raises.
        fails_after: Number of records that the sink accepts before it raises or hangs.
        hangs: Whether `write` blocks until `release` is called.
        seconds_per_record: How long each `write` takes.

    Attributes:
        records: The records that were written, in order.
        flushes: Number of calls of `flush`.
        closed: Number of calls of `close`.
    """

    def __init__(
        self,
        name: str = "recording",
        *,
        raises: BaseException | None = None,
        fails_after: int = 0,
        hangs: bool = False,
        seconds_per_record: float = 0.0,
    ) -> None:
        self.name = name
        self.records: list[Record] = []
        self.flushes = 0
        self.closed = 0
        self._raises = raises
        self._fails_after = fails_after
        self._hangs = hangs
        self._seconds_per_record = seconds_per_record
        self._released = Event()

    def write(self, record: Record) -> None:
        if len(self.records) >= self._fails_after:
            if self._raises is not None:
                raise self._raises
            if self._hangs:
                self._released.wait()
        if self._seconds_per_record:
            self._released.wait(self._seconds_per_record)
        self.records.append(record)

    def flush(self) -> None:
        self.flushes += 1

    def close(self) -> None:
        self.closed += 1

    def release(self) -> None:
        """End every waiting call of `write`; later calls do not wait."""
        self._released.set()


class FakeCounters:
    """Hardware counters with readings that you choose. Its arguments make the source absent, fail or hang.

    Its method `open` takes the place of what opens a source: `CounterSampler(device, open_source=counters.open)`.

    >>> counters = FakeCounters("fake", [{"tensor_active": 0.5}, {"tensor_active": 0.25}])
    >>> counters.open().sample().tensor_active
    0.5

    Args:
        name: Name of the source, as in `CounterReading.source`.
        readings: Values of one reading after the other, by the field of `CounterReading`; the last ones are repeated.
        absent: Why the source cannot be opened.
        raises: The exception that `sample` raises.
        fails_after: Number of readings that the source gives before it raises or hangs.
        hangs: Whether `sample` blocks until `release` is called.
        clock: Gives the time of the readings.

    Attributes:
        opened: Number of calls of `open`.
        sampled: Number of calls of `sample`.
        closed: Number of calls of `close`.
        is_hanging: Whether a call of `sample` waits now.
    """

    def __init__(
        self,
        name: str = "fake",
        readings: Sequence[Mapping[str, Any]] = ({},),
        *,
        absent: str | None = None,
        raises: BaseException | None = None,
        fails_after: int = 0,
        hangs: bool = False,
        clock: Clock = monotonic_seconds,
    ) -> None:
        self.name = name
        self.opened = self.sampled = self.closed = 0
        self.is_hanging = False
        self._readings = [CounterReading(name, 0.0, **values) for values in readings]
        self._absent, self._raises, self._fails_after, self._hangs = absent, raises, fails_after, hangs
        self._clock, self._released = clock, Event()

    def open(self, device: DeviceIdentity | None = None) -> "FakeCounters":
        self.opened += 1
        if self._absent is not None:
            raise CountersUnavailableError(self._absent)
        return self

    def sample(self) -> CounterReading:
        self.sampled += 1
        if self.sampled > self._fails_after:
            if self._raises is not None:
                raise self._raises
            if self._hangs:
                self.is_hanging = True
                self._released.wait()
                self.is_hanging = False
        values = self._readings[min(self.sampled, len(self._readings)) - 1]
        return replace(values, seconds=self._clock())

    def close(self) -> None:
        self.closed += 1

    def release(self) -> None:
        """End every waiting call of `sample`; later calls do not wait."""
        self._released.set()


class InProcessEngine:
    """An engine that runs trials in the calling process, by a function that returns the result.

    >>> def run(trial):
    ...     return TrialResult(trial.name, trial.key, trial.spec, "ok")
    >>> InProcessEngine(run).name
    'in-process'

    Args:
        run: Returns the result of a trial; None simulates a supervisor process that died.
        room: Number of trials that the engine accepts at once.
    """

    name = "in-process"

    def __init__(self, run: Callable[[Trial], TrialResult | None], room: int = 1) -> None:
        self._run, self._room = run, room
        self._ended: deque[str] = deque()
        self.submitted: list[str] = []

    def open(self, sweep: Path, unfinished: Sequence[Trial]) -> Sequence[str]:
        return ()

    def room(self, next_up: TrialSpec) -> int:
        return self._room - len(self._ended)

    def submit(self, trials: Sequence[Trial]) -> None:
        for trial in trials:
            self.submitted.append(trial.name)
            result = self._run(trial)
            if result is not None:
                write_json(trial_folder(trial.sweep, trial.name) / RESULT, result.to_json())
            self._ended.append(trial.name)

    def wait(self, seconds: float) -> Sequence[Ended]:
        ended = [Ended(name) for name in self._ended]
        self._ended.clear()
        return ended

    def withdraw(self) -> Sequence[str]:
        return ()

    def cancel(self) -> None:
        pass

    def close(self) -> None:
        pass

    def state(self) -> str:
        return "in this process"
