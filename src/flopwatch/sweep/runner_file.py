"""`DIR/runner.json`: which process runs the sweep, and how it stands. Others look at it; nothing depends on it."""

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flopwatch.clock import Clock, monotonic_seconds
from flopwatch.file_reading import read_json
from flopwatch.record_reading import BrokenRecordError, read_record
from flopwatch.sweep.engines.protocol import Trial
from flopwatch.sweep.observing import Observer, SafeObserver, Stop
from flopwatch.trial_files import write_json
from flopwatch.trial_records import TrialResult

FILE = "runner.json"
LOG = "runner.log"

_EVERY_SECONDS = 1.0
_MOST_NAMES = 100


@dataclass(frozen=True, slots=True)
class RunnerState:
    """Attributes:
    pid: Of the runner.
    host: Where it is.
    process_start: When that process began, by its host's kernel: a number may be given again to another process.
    engine_state: The engine's word.
    running: Seconds since the start, by name; the first hundred.
    running_count: How many run.
    waiting: How many have not been placed.
    stopping: `` while it goes on, `finish`, `kill`, `budget`, or `over` when the runner has left.
    """

    pid: int = 0
    host: str = ""
    process_start: str = ""
    engine_state: str = ""
    running: Mapping[str, float] | None = None
    running_count: int = 0
    waiting: int = 0
    stopping: str = ""


def read_runner(sweep: Path) -> RunnerState | None:
    """What the last runner told; None where none ever did."""
    try:
        state = read_record(RunnerState, read_json(sweep / FILE))
    except BrokenRecordError:
        return None
    # Without its mark the process of that number may be anybody's, and a signal would reach the wrong one.
    is_marked = bool(state.process_start) or not process_start(os.getpid())
    return state if state.pid > 0 and is_marked else None


def is_here(state: RunnerState) -> bool:
    return state.host == os.uname().nodename


def is_alive(state: RunnerState) -> bool | None:
    """Whether that process still runs; None from another host, which cannot know."""
    if state.stopping == "over":
        return False
    return process_start(state.pid) == state.process_start if is_here(state) else None


def process_start(pid: int) -> str:
    """The kernel's mark of when a process began; empty when there is none, or no /proc."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return ""
    return "" if after_name[0] == b"Z" else after_name[19].decode()


class NotedRunner:
    """An observer that writes the file about once a second and tells the observer behind it everything.

    Args:
        sweep: The sweep's folder.
        clock: Decides how often.
    """

    def __init__(self, sweep: Path, clock: Clock = monotonic_seconds) -> None:
        self._file, self._clock = sweep / FILE, clock
        self._behind: Observer | None = None
        self._stop = Stop()
        self._since: dict[str, float] = {}
        self._next_write = 0.0
        self._about: dict[str, Any] = {
            "pid": os.getpid(),
            "host": os.uname().nodename,
            "process_start": process_start(os.getpid()),
        }

    def before(self, observer: Observer, stop: Stop) -> "NotedRunner":
        self._behind, self._stop = SafeObserver(observer), stop
        return self

    def started(self, trial: Trial) -> None:
        self._since[trial.name] = self._clock()
        if self._behind is not None:
            self._behind.started(trial)

    def ended(self, result: TrialResult) -> None:
        self._since.pop(result.name, None)
        if self._behind is not None:
            self._behind.ended(result)

    def tries_again(self, lost: TrialResult, retry: int, most: int) -> None:
        self._since.pop(lost.name, None)
        if self._behind is not None and hasattr(self._behind, "tries_again"):
            self._behind.tries_again(lost, retry, most)

    def ticked(self, running: Mapping[str, Trial], waiting: int, engine_state: str) -> None:
        if self._clock() >= self._next_write:
            now = self._clock()
            names = [name for name, _ in zip(running, range(_MOST_NAMES), strict=False)]
            since = {name: round(now - self._since.setdefault(name, now), 1) for name in names}
            self.write(engine_state, since, len(running), waiting)
        if self._behind is not None:
            self._behind.ticked(running, waiting, engine_state)

    def write(
        self,
        engine_state: str,
        running: Mapping[str, float] | None = None,
        running_count: int = 0,
        waiting: int = 0,
        stopping: str | None = None,
    ) -> None:
        """A full disk or a deleted folder ends nothing."""
        self._next_write = self._clock() + _EVERY_SECONDS
        state = RunnerState(
            **self._about,
            engine_state=engine_state,
            running=dict(running or {}),
            running_count=running_count,
            waiting=waiting,
            stopping=_stopping(self._stop) if stopping is None else stopping,
        )
        with contextlib.suppress(OSError):
            write_json(self._file, asdict(state))


def _stopping(stop: Stop) -> str:
    return "kill" if stop.kill else "finish" if stop.finish else "budget" if stop.is_over_budget else ""


@contextlib.contextmanager
def noted_runner(sweep: Path) -> Iterator[NotedRunner]:
    """Writes who runs the sweep from here on, and at the end that nobody does."""
    noted = NotedRunner(sweep)
    noted.write("getting ready")
    try:
        yield noted
    finally:
        noted.write("", stopping="over")
