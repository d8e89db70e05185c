"""Watching a sweep: observers in the runner's process, and `runner.json` for other processes.

Neither can end a sweep: an observer that raises is reported once and not called again, and nothing depends on
`runner.json`.
"""

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from flopwatch.clock import Clock, monotonic_seconds
from flopwatch.records.reading import (
    BrokenRecordError,
    UnreadableError,
    one_line,
    opened_regular,
    read_json,
    read_record,
)
from flopwatch.records.sweep_results import NewerFormatError, read_results, read_trial_list, result_from
from flopwatch.records.trial import UNSETTLED, TrialResult, TrialSpec
from flopwatch.records.trial_files import RESULTS, RUNNER, write_json
from flopwatch.sweep.folder import Trial
from flopwatch.sweep.runner.plan import Plan


class Observer(Protocol):
    """Called by the runner for what happens; the command line draws its table from it.

    It may also have a method `tries_again(lost: TrialResult, retry: int, most: int)`, called for each lost attempt.
    """

    def started(self, trial: Trial) -> None: ...

    def ended(self, result: TrialResult) -> None: ...

    def ticked(self, running: Mapping[str, Trial], waiting: int, engine_state: str) -> None: ...


@dataclass
class Stop:
    """Tells a runner to stop.

    Attributes:
        finish: Start nothing new and withdraw what is queued; set by the user's first Ctrl-C.
        kill: Also end what runs; set by the second one.
        is_over_budget: Set by the runner once the sweep's time is used up; has the effect of `finish`.
    """

    finish: bool = False
    kill: bool = False
    is_over_budget: bool = False

    @property
    def is_finishing(self) -> bool:
        return self.finish or self.kill or self.is_over_budget


class SafeObserver:
    """Calls an observer until it raises for the first time.

    Args:
        observer: Has the methods of `Observer`.
    """

    def __init__(self, observer: object) -> None:
        self._observer: object | None = observer

    def started(self, trial: Trial) -> None:
        self._call("started", trial)

    def ended(self, result: TrialResult) -> None:
        self._call("ended", result)

    def ticked(self, running: Mapping[str, Trial], waiting: int, engine_state: str) -> None:
        self._call("ticked", running, waiting, engine_state)

    def tries_again(self, lost: TrialResult, retry: int, most: int) -> None:
        if hasattr(self._observer, "tries_again"):
            self._call("tries_again", lost, retry, most)

    def _call(self, method: str, *facts: object) -> None:
        if self._observer is None:
            return
        try:
            call: Callable[..., None] = getattr(self._observer, method)
            call(*facts)
        except (Exception, SystemExit) as error:  # rich raises SystemExit when a pipe is closed
            self._observer = None
            with contextlib.suppress(Exception):
                text = one_line(f"{type(error).__name__}: {error}", 300)
                sys.stderr.write(f"flopwatch: the display failed ({text}); the sweep goes on without it\n")


_EVERY_SECONDS = 1.0  # between two writes of `runner.json`
_MOST_NAMES = 100  # running trials named in `runner.json`


@dataclass(frozen=True, slots=True)
class RunnerState:
    """What `runner.json` holds.

    Attributes:
        pid: The runner's.
        host: Where it runs.
        process_start: When that process started, by its host's kernel: a pid may be reused.
        engine_state: The engine's own text, such as `3 queued`.
        running: Seconds since the start of each running trial, by name; the first hundred.
        running_count: How many run.
        waiting: How many are not placed yet.
        stopping: Empty while it starts trials; `finish`, `kill`, `budget`; `over` when the runner has exited.
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
    """What the last runner wrote; None when there is nothing readable."""
    try:
        state = read_record(RunnerState, read_json(sweep / RUNNER))
    except BrokenRecordError:
        return None
    # Without its start time, the pid may belong to another process by now, and a signal would hit that one.
    is_marked = bool(state.process_start) or not process_start(os.getpid())
    return state if state.pid > 0 and is_marked else None


def is_here(state: RunnerState) -> bool:
    return state.host == os.uname().nodename


def is_alive(state: RunnerState) -> bool | None:
    """Whether that process still runs; None when it belongs to another host."""
    if state.stopping == "over":
        return False
    return process_start(state.pid) == state.process_start if is_here(state) else None


def process_start(pid: int) -> str:
    """When the kernel started a process, in ticks since boot; empty when it is gone, or without /proc."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return ""
    return "" if after_name[0] == b"Z" else after_name[19].decode()


class RunnerFile:
    """An observer that writes `runner.json` about once a second, and passes every call on to another observer.

    Args:
        sweep: The sweep's folder.
        clock: Monotonic seconds.
    """

    def __init__(self, sweep: Path, clock: Clock = monotonic_seconds) -> None:
        self._file, self._clock = sweep / RUNNER, clock
        self._next: Observer | None = None
        self._stop = Stop()
        self._since: dict[str, float] = {}
        self._next_write = 0.0
        self._about: dict[str, Any] = {
            "pid": os.getpid(),
            "host": os.uname().nodename,
            "process_start": process_start(os.getpid()),
        }

    def passing_to(self, observer: Observer | None, stop: Stop) -> "RunnerFile":
        self._next, self._stop = SafeObserver(observer), stop
        return self

    def started(self, trial: Trial) -> None:
        self._since[trial.name] = self._clock()
        if self._next is not None:
            self._next.started(trial)

    def ended(self, result: TrialResult) -> None:
        self._since.pop(result.name, None)
        if self._next is not None:
            self._next.ended(result)

    def tries_again(self, lost: TrialResult, retry: int, most: int) -> None:
        self._since.pop(lost.name, None)
        if self._next is not None and hasattr(self._next, "tries_again"):
            self._next.tries_again(lost, retry, most)

    def ticked(self, running: Mapping[str, Trial], waiting: int, engine_state: str) -> None:
        if self._clock() >= self._next_write:
            now = self._clock()
            names = [name for name, _ in zip(running, range(_MOST_NAMES), strict=False)]
            since = {name: round(now - self._since.setdefault(name, now), 1) for name in names}
            self.write(engine_state, since, len(running), waiting)
        if self._next is not None:
            self._next.ticked(running, waiting, engine_state)

    def write(
        self,
        engine_state: str,
        running: Mapping[str, float] | None = None,
        running_count: int = 0,
        waiting: int = 0,
        stopping: str | None = None,
    ) -> None:
        """Write the file; a full disk or a deleted folder is ignored."""
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
def runner_file(sweep: Path) -> Iterator[RunnerFile]:
    """Keep `runner.json` up to date; at the end it says that the runner has exited."""
    file = RunnerFile(sweep)
    file.write("getting ready")
    try:
        yield file
    finally:
        file.write("", stopping="over")


_SILENCE_SECONDS = 90.0
"""A runner on another host writes every second; a file system may show that a minute late."""


class Follower:
    """Follows a sweep that another process runs, by its folder alone.

    Args:
        sweep: The folder.
        clock: Measures for how long the runner has not written.
    """

    def __init__(self, sweep: Path, clock: Clock = monotonic_seconds) -> None:
        self._sweep, self._clock = sweep, clock
        self._file = sweep / RESULTS
        self._offset = self._file.stat().st_size if self._file.is_file() else 0
        self._trials = _listed_trials(sweep)
        results = read_results(sweep)
        settled = {name: result for name, result in results.items() if result.outcome not in UNSETTLED}
        kept = {name: result for name, result in settled.items() if name in self._trials}
        todo = tuple(trial for name, trial in self._trials.items() if name not in kept)
        self.plan = Plan(tuple(self._trials.values()), todo, kept)
        self._last: RunnerState | None = None
        self._heard = clock()

    def new_results(self) -> Iterator[TrialResult]:
        """Results since the last call; an incomplete last line is left for the next call."""
        try:
            with opened_regular(self._file) as stream:
                stream.seek(self._offset)
                content = stream.read()
        except (FileNotFoundError, UnreadableError):
            return
        whole, newline, _ = content.rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        for line in whole.splitlines():
            try:
                yield result_from(json.loads(line))
            except (ValueError, RecursionError, BrokenRecordError, NewerFormatError):
                continue  # the next run of the sweep reports damaged lines

    def running(self, state: RunnerState | None) -> dict[str, Trial]:
        names = (state.running or {}) if state is not None else {}
        return {name: self._trials[name] for name in names if name in self._trials}

    def runner(self) -> RunnerState | None:
        """The last state the runner wrote; None when there is no runner, or none any more."""
        state = read_runner(self._sweep)
        if state != self._last:
            self._last, self._heard = state, self._clock()
        if state is None or is_alive(state) is False:
            return None
        is_silent = is_alive(state) is None and self._clock() - self._heard > _SILENCE_SECONDS
        return None if is_silent else state


def _listed_trials(sweep: Path) -> dict[str, Trial]:
    found = {}
    for name, entry in read_trial_list(sweep).trials.items():
        with contextlib.suppress(BrokenRecordError, KeyError):
            found[name] = Trial(sweep, name, str(entry.get("key")), TrialSpec.from_json(entry["spec"]))
    return found
