"""Who looks at a sweep can never end it: an observer that fails is told of once and not called again."""

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

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
    """Is told what happens; the command line draws its table from it. One that raises is not called again."""

    def started(self, trial: Trial) -> None: ...

    def ended(self, result: TrialResult) -> None: ...

    def ticked(self, running: Mapping[str, Trial], waiting: int, engine_state: str) -> None: ...


@runtime_checkable
class RetryObserver(Protocol):
    """An observer that also wants to know of attempts that were lost."""

    def tries_again(self, lost: TrialResult, retry: int, most: int) -> None: ...


@dataclass
class Stop:
    """Set from outside. `finish` starts nothing new and withdraws what is queued, `kill` also ends what runs.

    Attributes:
        finish: Asked for by a person.
        kill: Likewise.
        is_over_budget: Set by the runner once the sweep's time is used up; does what `finish` does.
    """

    finish: bool = False
    kill: bool = False
    is_over_budget: bool = False

    @property
    def is_finishing(self) -> bool:
        return self.finish or self.kill or self.is_over_budget


class SafeObserver:
    """Passes on to an observer what happens, as long as that one does not raise.

    Args:
        observer: With the methods of `Observer`.
    """

    def __init__(self, observer: object) -> None:
        self._observer: object | None = observer

    def started(self, trial: Trial) -> None:
        self._tell("started", trial)

    def ended(self, result: TrialResult) -> None:
        self._tell("ended", result)

    def ticked(self, running: Mapping[str, Trial], waiting: int, engine_state: str) -> None:
        self._tell("ticked", running, waiting, engine_state)

    def tries_again(self, lost: TrialResult, retry: int, most: int) -> None:
        if hasattr(self._observer, "tries_again"):
            self._tell("tries_again", lost, retry, most)

    def _tell(self, what: str, *facts: object) -> None:
        if self._observer is None:
            return
        try:
            call: Callable[..., None] = getattr(self._observer, what)
            call(*facts)
        except (Exception, SystemExit) as error:  # rich answers a closed pipe with SystemExit
            self._observer = None
            with contextlib.suppress(Exception):
                said = one_line(f"{type(error).__name__}: {error}", 300)
                sys.stderr.write(f"flopwatch: what shows the sweep failed ({said}); the sweep goes on unseen\n")


# `DIR/runner.json`: which process runs the sweep, and how it stands. Others look at it; nothing depends on it.


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
        state = read_record(RunnerState, read_json(sweep / RUNNER))
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


class RunnerFile:
    """An observer that writes the file about once a second and tells the observer behind it everything.

    Args:
        sweep: The sweep's folder.
        clock: Decides how often.
    """

    def __init__(self, sweep: Path, clock: Clock = monotonic_seconds) -> None:
        self._file, self._clock = sweep / RUNNER, clock
        self._behind: Observer | None = None
        self._stop = Stop()
        self._since: dict[str, float] = {}
        self._next_write = 0.0
        self._about: dict[str, Any] = {
            "pid": os.getpid(),
            "host": os.uname().nodename,
            "process_start": process_start(os.getpid()),
        }

    def before(self, observer: Observer, stop: Stop) -> "RunnerFile":
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
def runner_file(sweep: Path) -> Iterator[RunnerFile]:
    """Writes who runs the sweep from here on, and at the end that nobody does."""
    noted = RunnerFile(sweep)
    noted.write("getting ready")
    try:
        yield noted
    finally:
        noted.write("", stopping="over")


# Follows a sweep that another process runs, by its folder alone.


_SILENCE_SECONDS = 90.0
"""A runner on another host writes every second; file systems show that up to a minute late."""


class Follower:
    """What happens in a sweep's folder.

    Args:
        sweep: The folder.
        clock: Measures the runner's silence.
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
        """Ends since the last call; a line that is only half there waits for the next."""
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
                continue  # the next run of the sweep tells of it

    def running(self, state: RunnerState | None) -> dict[str, Trial]:
        names = (state.running or {}) if state is not None else {}
        return {name: self._trials[name] for name in names if name in self._trials}

    def runner(self) -> RunnerState | None:
        """What the runner told last; None when there is none, or none any more."""
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
