"""Fakes for tests of code that uses flopwatch: devices, clocks, sinks, and engines that start no processes.

No other module of flopwatch imports this one.
"""

import os
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from threading import Event
from time import sleep
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from flopwatch.clock import monotonic_seconds
from flopwatch.errors import InputError
from flopwatch.files import write_json
from flopwatch.hardware.peaks import DeviceFacts
from flopwatch.records.run import Record
from flopwatch.records.trial import TrialResult, TrialSpec
from flopwatch.records.trial_files import RESULT, STARTED, trial_folder
from flopwatch.sweep.engines.protocol import Ended
from flopwatch.sweep.folder import Trial

if TYPE_CHECKING:
    from flopwatch.hardware.measure import Shape

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


def fake_torch(facts: DeviceFacts) -> Any:
    """A fake `torch` module of a machine that has this one device, for `read_device(torch_module=...)`.

    >>> from flopwatch.hardware import read_device
    >>> read_device("cuda:0", fake_torch(fake_device("h100"))) == fake_device("h100")
    True
    """
    import torch  # inside the function, because most fakes do not need it

    def properties(device: object) -> SimpleNamespace:
        major, minor = facts.compute_capability or (9, 4)
        return SimpleNamespace(
            name=facts.name,
            multi_processor_count=facts.unit_count,
            gpu_eu_count=(facts.unit_count or 0) * 8,
            total_memory=(facts.memory_gib or 0) * 2**30,
            gcnArchName=facts.gcn_arch or facts.name,
            major=major,
            minor=minor,
            clock_rate=(facts.clock_mhz or 0) * 1e3,
        )

    namespace = SimpleNamespace(
        accelerator=SimpleNamespace(is_available=lambda: True, current_accelerator=lambda: torch.device(facts.kind)),
        version=SimpleNamespace(hip="6.4" if facts.gcn_arch else None),
        backends=SimpleNamespace(
            mps=SimpleNamespace(
                is_available=lambda: facts.kind == "mps",
                get_name=lambda: facts.name,
                get_core_count=lambda: facts.unit_count,
            )
        ),
    )
    own_module = SimpleNamespace(get_device_properties=properties, get_device_name=lambda device: facts.name)
    setattr(namespace, facts.kind, own_module)
    return namespace


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


class FakeEvents:
    """Replaces `torch.Event`: each fake event completes `lag_seconds` after it was recorded.

    >>> clock = FakeClock()
    >>> events = FakeEvents(clock, lag_seconds=3.0)
    >>> start, end = events("cuda:0"), events("cuda:0")
    >>> start.record(); clock.advance(2.0); end.record()
    >>> start.elapsed_time(end), end.query()
    (2000.0, False)
    >>> clock.advance(3.0); end.query()
    True

    Attributes:
        waits: How often `synchronize` was called.
    """

    def __init__(self, clock: FakeClock, lag_seconds: float = 0.0) -> None:
        self.waits = 0
        self._clock = clock
        self._lag_seconds = lag_seconds

    def __call__(self, device: object = None, *, enable_timing: bool = False) -> Any:
        recorded: list[float] = []

        def wait() -> None:
            self.waits += 1

        return SimpleNamespace(
            record=lambda: recorded.append(self._clock()),
            query=lambda: self._clock() >= recorded[-1] + self._lag_seconds,
            synchronize=wait,
            elapsed_time=lambda end: 1e3 * (end.recorded[-1] - recorded[-1]),
            recorded=recorded,
        )


class FakeMatmul:
    """Replaces the timer of `measure_peak`: computes times from `flops_per_s(shape)`, and advances `clock` by them.

    >>> clock = FakeClock()
    >>> time_matmul = FakeMatmul(clock, lambda shape: 1e9)
    >>> time_matmul((1000, 1000, 1000), 3), clock()
    (6.0, 6.0)

    Attributes:
        timed: The calls so far: shape and number of products.
    """

    def __init__(self, clock: FakeClock, flops_per_s: "Callable[[Shape], float]") -> None:
        self.timed: list[tuple[Shape, int]] = []
        self._clock = clock
        self._flops_per_s = flops_per_s

    def __call__(self, shape: "Shape", calls: int) -> float:
        self.timed.append((shape, calls))
        from flopwatch.hardware.measure import matmul_flops  # loads torch

        seconds = calls * matmul_flops(shape) / self._flops_per_s(shape)
        self._clock.advance(seconds)
        return seconds


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

    def end(self, names: Sequence[str]) -> None:
        pass

    def withdraw(self) -> Sequence[str]:
        return ()

    def cancel(self) -> None:
        pass

    def close(self) -> None:
        pass

    def state(self) -> str:
        return "in this process"


class FlakyEngine(InProcessEngine):
    """An engine that runs no processes: trials succeed without doing anything, or are lost as if their node had failed.

    Which attempts are lost depends only on the trial's name, the number of the attempt and the seed.

    >>> FlakyEngine(share_lost=0.5).name
    'in-process'

    Args:
        share_lost: Probability that an attempt is lost.
        seed: Determines which attempts are lost.
        room: Number of trials that the engine accepts at once.
        seconds: Time that passes before trials end.
    """

    def __init__(self, share_lost: float = 0.01, seed: int = 0, room: int = 8, seconds: float = 0.0) -> None:
        super().__init__(self._answer, room)
        self._share_lost, self._seed, self._seconds = share_lost, seed, seconds

    def _answer(self, trial: Trial) -> TrialResult | None:
        chance = Random(f"{trial.name} {len(trial.earlier_attempts)} {self._seed}").random()
        if chance < self._share_lost:
            write_json(trial_folder(trial.sweep, trial.name) / STARTED, {"pid": 0, "host": "n1"})
            return None
        facts: dict[str, float] = {"runner_pid": os.getpid(), "runner_rss_bytes": _own_rss_bytes()}
        facts["end_monotonic_seconds"] = monotonic_seconds()
        return TrialResult(trial.name, trial.key, trial.spec, "ok", "ran to its end", facts, seconds=0.0)

    def submit(self, trials: Sequence[Trial]) -> None:
        super().submit(trials)
        self.submitted.clear()  # otherwise the list would grow with every trial of a long sweep

    def wait(self, seconds: float) -> Sequence[Ended]:
        sleep(self._seconds)
        return [Ended(ended.name, {"state": "NODE_FAIL", "host": "n1"}) for ended in super().wait(seconds)]


def _own_rss_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
