"""Reports the progress of a sweep: to observers in the runner's process, and in `runner.json` for other processes.

The runner is the process of `flopwatch sweep`. An observer that raises an exception does not end the sweep: the
exception is printed once and the observer is not called again.
"""

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from flopwatch import files
from flopwatch.clock import Clock, monotonic_seconds
from flopwatch.decode import BrokenRecordError, read_or_none, read_record
from flopwatch.files import read_json, write_json
from flopwatch.process import start_ticks
from flopwatch.records.sweep_results import new_results, read_results, read_trial_list
from flopwatch.records.trial import UNSETTLED, TrialResult, TrialSpec
from flopwatch.records.trial_files import RESULTS, RUNNER
from flopwatch.sweep.claims import BEAT_SECONDS, waits_for_space
from flopwatch.sweep.folder import FolderGoneError, Trial, check_held, folder_of
from flopwatch.sweep.runner.plan import Plan
from flopwatch.text import one_line


class Observer(Protocol):
    """The methods that the runner calls when a trial starts or ends, and several times a second (`ticked`).

    The observer of the command line draws the live table. An observer may also have a method
    `tries_again(lost: TrialResult, retry: int, most: int)`, which the runner calls before it retries a trial, and
    `repeats(result: TrialResult, repeat: int, most: int)`, before it repeats a trial whose interval is too wide.
    """

    def started(self, trial: Trial) -> None: ...

    def ended(self, result: TrialResult) -> None: ...

    def ticked(self, running: Mapping[str, Trial], waiting: int, engine_state: str) -> None: ...


@dataclass
class Stop:
    """Flags that make a runner stop.

    Attributes:
        finish: Start no more trials and withdraw queued ones. The user's first Ctrl-C sets it.
        kill: Kill the running trials too. The second Ctrl-C sets it.
        is_over_budget: The runner sets it when the sweep's time budget is used up. It has the effect of `finish`.
    """

    finish: bool = False
    kill: bool = False
    is_over_budget: bool = False

    @property
    def is_finishing(self) -> bool:
        return self.finish or self.kill or self.is_over_budget


class SafeObserver:
    """Passes events on to an observer until that observer raises an exception. Without an observer it does nothing."""

    def __init__(self, observer: object | None = None) -> None:
        self._observer = observer

    def tell(self, event: str, *facts: Any) -> None:
        try:
            if (call := getattr(self._observer, event, None)) is not None:
                call(*facts)
        except (Exception, SystemExit) as error:  # rich raises SystemExit if its output pipe is closed
            self._observer = None
            with contextlib.suppress(Exception):
                text = one_line(f"{type(error).__name__}: {error}", 300)
                sys.stderr.write(f"flopwatch: the display failed ({text}); the sweep continues without a display\n")


_WRITE_SECONDS = 1.0  # This is the time between two writes of `runner.json`.
_MOST_NAMES = 100  # `runner.json` lists at most this many running trials.


@dataclass(frozen=True, slots=True)
class RunnerState:
    """The content of `runner.json`.

    Attributes:
        start_ticks: When the runner started. It shows whether `pid` is still the runner's; None without /proc.
        engine_state: What `Engine.state` returned, such as `3 queued`.
        running: For at most 100 running trials, by name: seconds since the trial started.
        stopping: Why the runner starts no more trials: `finish`, `kill`, `budget`, or `over` if it has exited. Empty
            while it starts trials.
    """

    pid: int = 0
    host: str = ""
    start_ticks: int | None = None
    engine_state: str = ""
    running: Mapping[str, float] | None = None
    running_count: int = 0
    waiting: int = 0
    stopping: str = ""


def read_runner(sweep: Path) -> RunnerState | None:
    state = read_or_none(RunnerState, read_json(sweep / RUNNER))
    if state is None:
        return None
    # Ignore a state without the runner's start time, because another process may have the same pid by now.
    is_marked = state.start_ticks is not None or start_ticks(os.getpid()) is None
    return state if state.pid > 0 and is_marked else None


def is_here(state: RunnerState) -> bool:
    return state.host == os.uname().nodename


def is_alive(state: RunnerState) -> bool | None:
    if state.stopping == "over":
        return False
    return start_ticks(state.pid) == state.start_ticks if is_here(state) else None


class FullDisk:
    """Says that trials wait for space on a full disk, which neither their logs nor `runner.json` can say then."""

    def __init__(self, clock: Clock = monotonic_seconds) -> None:
        self._clock, self._next_look, self._text = clock, 0.0, ""

    def __call__(self, running: Mapping[str, Trial]) -> str:
        """Return `waiting: ` with the system's message and the trial's folder; "" if no trial waits."""
        if self._clock() >= self._next_look:
            self._next_look = self._clock() + BEAT_SECONDS
            folders = map(folder_of, islice(running.values(), _MOST_NAMES))
            self._text = next(
                (f"waiting: {why} ({folder})" for folder in folders if (why := waits_for_space(folder))), ""
            )
        return self._text


class RunnerFile(SafeObserver):
    """Writes `runner.json` about once a second, and passes every event on to an observer.

    As a context it writes the file when it begins; when it ends, it writes it with `stopping` set to `over`.
    """

    def __init__(self, sweep: Path, clock: Clock = monotonic_seconds) -> None:
        super().__init__()
        self._file, self._clock = sweep / RUNNER, clock
        self._stop = Stop()
        self._since: dict[str, float] = {}
        self._next_write = 0.0
        self._full_disk = FullDisk(clock)
        self._state = RunnerState(os.getpid(), os.uname().nodename, start_ticks(os.getpid()), running={})

    def __enter__(self) -> "RunnerFile":
        self._write(engine_state="getting ready")
        return self

    def __exit__(self, *error: object) -> None:
        self._write(stopping="over")

    def passing_to(self, observer: Observer | None, stop: Stop) -> "RunnerFile":
        self._observer, self._stop = observer, stop
        return self

    def tell(self, event: str, *facts: Any) -> None:
        if event == "ticked":
            facts = self._ticked(*facts)
        elif event == "started":
            self._since[facts[0].name] = self._clock()
        else:
            self._since.pop(facts[0].name, None)
        super().tell(event, *facts)

    def _ticked(self, running: Mapping[str, Trial], waiting: int, engine_state: str) -> tuple[Any, ...]:
        now = self._clock()
        engine_state = self._full_disk(running) or engine_state
        if now >= self._next_write:
            names = islice(running, _MOST_NAMES)
            since = {name: round(now - self._since.setdefault(name, now), 1) for name in names}
            stop = self._stop
            stopping = "kill" if stop.kill else "finish" if stop.finish else "budget" if stop.is_over_budget else ""
            self._write(
                engine_state=engine_state,
                running=since,
                running_count=len(running),
                waiting=waiting,
                stopping=stopping,
            )
        return running, waiting, engine_state

    def _write(self, **state: Any) -> None:
        """Write `runner.json`. If the disk is full or the folder was deleted, write nothing and raise nothing."""
        self._next_write = self._clock() + _WRITE_SECONDS
        with contextlib.suppress(OSError, FolderGoneError):
            check_held(self._file.parent)
            write_json(self._file, asdict(replace(self._state, **state)))


_SILENCE_SECONDS = 90.0
"""A runner on another host counts as dead if its `runner.json` has not changed for this time. The runner writes the
file every second, but a network file system may show the change up to a minute late."""


class Follower:
    """Follows a sweep that another process runs, by reading the sweep's folder."""

    def __init__(self, sweep: Path, clock: Clock = monotonic_seconds) -> None:
        self._sweep, self._clock = sweep, clock
        file = sweep / RESULTS
        self._results = files.LineFollower(file, file.stat().st_size if file.is_file() else 0)
        self._trials: dict[str, Trial] = {}
        for name, entry in read_trial_list(sweep).trials.items():
            with contextlib.suppress(BrokenRecordError, KeyError):
                spec = read_record(TrialSpec, entry["spec"])
                self._trials[name] = Trial(sweep, name, str(entry.get("key")), spec)
        results = {name: result for name, result in read_results(sweep).items() if name in self._trials}
        kept = {name: result for name, result in results.items() if result.outcome not in UNSETTLED}
        todo = tuple(trial for name, trial in self._trials.items() if name not in kept)
        self.plan = Plan(tuple(self._trials.values()), todo, kept)
        self._last: RunnerState | None = None
        self._heard = clock()
        self._full_disk = FullDisk(clock)

    def new_results(self) -> Iterator[TrialResult]:
        return new_results(self._results)

    def running(self, state: RunnerState | None) -> dict[str, Trial]:
        names = (state.running or {}) if state is not None else {}
        return {name: self._trials[name] for name in names if name in self._trials}

    def runner(self) -> RunnerState | None:
        state = read_runner(self._sweep)
        if state != self._last:
            self._last, self._heard = state, self._clock()
        if state is None or is_alive(state) is False:
            return None
        if is_alive(state) is None and self._clock() - self._heard > _SILENCE_SECONDS:
            return None
        # The runner cannot write the file on a full disk, so this process looks for trials that wait for space.
        waits = self._full_disk(self.running(state))
        return replace(state, engine_state=waits) if waits else state
