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
from flopwatch.sweep.claim import Claim, Holder
from flopwatch.sweep.engines.slurm import why_jobs_wait
from flopwatch.sweep.folder import FolderGoneError, Trial, check_held, runner_claim
from flopwatch.sweep.progress import full_disk
from flopwatch.sweep.runner.plan import Plan
from flopwatch.text import one_line


class Observer(Protocol):
    """The methods that the runner calls when a trial starts or ends, and several times a second (`ticked`).

    An observer may also have a method `tries_again(lost: TrialResult, retry: int, most: int)`, which the runner calls
    before it retries a trial.
    """

    def started(self, trial: Trial) -> None: ...

    def ended(self, result: TrialResult) -> None: ...

    def ticked(self, running: Mapping[str, Trial], waiting: int, engine_state: str) -> None: ...


@dataclass
class Stop:
    """Flags that make a runner stop."""

    finish: bool = False  # start no more trials and withdraw queued ones, as after the first Ctrl-C
    kill: bool = False  # kill the running trials too, as after the second Ctrl-C
    is_over_budget: bool = False  # set by the runner when the time budget is used up; has the effect of `finish`

    @property
    def why(self) -> str:
        """As `RunnerState.stopping`."""
        return "kill" if self.kill else "finish" if self.finish else "budget" if self.is_over_budget else ""

    @property
    def is_finishing(self) -> bool:
        return self.why != ""


class SafeObserver:
    """Passes events on to an observer until that observer raises an exception. Without an observer it does nothing."""

    def __init__(self, observer: object | None = None) -> None:
        self._observer = observer

    def tell(self, event: str, *facts: Any) -> None:
        try:
            if (call := getattr(self._observer, event, None)) is not None:
                call(*facts)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - rich raises SystemExit if its output pipe is closed
            self._observer = None
            with contextlib.suppress(AttributeError, OSError, ValueError):  # stderr may be None, full or closed
                text = one_line(f"{type(error).__name__}: {error}", 300)
                sys.stderr.write(f"flopwatch: the display failed ({text}); the sweep continues without a display\n")


_WRITE_SECONDS = 1.0  # This is the time between two writes of `runner.json`.
_MOST_NAMES = 100  # `runner.json` lists at most this many running trials.


@dataclass(frozen=True, slots=True)
class RunnerState:
    """The content of `runner.json`. `stopping` is empty while the runner starts trials."""

    pid: int = 0
    host: str = ""
    start_ticks: int | None = None  # shows whether `pid` is still the runner's; None without /proc
    engine_state: str = ""
    running: Mapping[str, float] | None = None  # for at most 100 trials, by name: seconds since it started
    running_count: int = 0
    waiting: int = 0
    stopping: str = ""  # `finish`, `kill`, `budget`, or `over` if the runner has exited


def find_runner(sweep: Path, watched: dict[Path, Claim] | None = None) -> tuple[RunnerState, Holder] | None:
    """What the process that runs the sweep says, and what is known about its life; None if no process runs it.

    `watched` keeps claims between several calls, because a runner on another host is judged by how it touches
    its claim.
    """
    claim = runner_claim(sweep)
    holder = ({} if watched is None else watched).setdefault(claim.file, claim).holder()
    state = read_or_none(RunnerState, read_json(sweep / RUNNER))
    if state is None or state.stopping == "over" or not holder.may_be_alive:
        return None
    # The file may be an earlier runner's, because not every process that holds the folder writes it: a fit does not.
    is_of_holder = (state.pid, state.start_ticks) == (holder.facts.get("pid"), holder.facts.get("start_ticks"))
    return (state, holder) if is_of_holder else None


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
        engine_state = full_disk(self._file.parent) or engine_state
        if now >= self._next_write:
            names = islice(running, _MOST_NAMES)
            since = {name: round(now - self._since.setdefault(name, now), 1) for name in names}
            trials = {"running": since, "running_count": len(running), "waiting": waiting}
            self._write(engine_state=engine_state, stopping=self._stop.why, **trials)
        return running, waiting, engine_state

    def _write(self, **state: Any) -> None:
        """Write `runner.json`. If the disk is full or the folder was deleted, write nothing and raise nothing."""
        self._next_write = self._clock() + _WRITE_SECONDS
        with contextlib.suppress(OSError, FolderGoneError):
            check_held(self._file.parent)
            write_json(self._file, asdict(replace(self._state, **state)))


class Follower:
    """Follows a sweep that another process runs, by reading the sweep's folder."""

    def __init__(self, sweep: Path, clock: Clock = monotonic_seconds) -> None:
        self._sweep = sweep
        file = sweep / RESULTS
        self._results = files.LineFollower(file, file.stat().st_size if file.is_file() else 0)
        self._trials: dict[str, Trial] = {}
        listed = read_trial_list(sweep)
        self.jobs_wait = why_jobs_wait(sweep) if listed.engine == "slurm" else ""  # asked once, to spare Slurm
        for name, entry in listed.trials.items():
            with contextlib.suppress(BrokenRecordError, KeyError):
                spec = read_record(TrialSpec, entry["spec"])
                self._trials[name] = Trial(sweep, name, str(entry.get("key")), spec)
        results = {name: result for name, result in read_results(sweep).items() if name in self._trials}
        kept = {name: result for name, result in results.items() if result.outcome not in UNSETTLED}
        todo = tuple(trial for name, trial in self._trials.items() if name not in kept)
        self.plan = Plan(tuple(self._trials.values()), todo, kept)
        self._watched: dict[Path, Claim] = {}
        self._stopping = ""

    def new_results(self) -> Iterator[TrialResult]:
        return new_results(self._results)

    def running(self, state: RunnerState) -> dict[str, Trial]:
        return {name: self._trials[name] for name in state.running or {} if name in self._trials}

    def stopping(self) -> str:
        """Why the runner starts no more trials, in words; empty while it does."""
        return {
            "kill": "ending running trials",
            "finish": "finishing running trials",
            "budget": "the time budget is used up; finishing running trials",
        }.get(self._stopping, "")

    def runner(self) -> RunnerState | None:
        if (found := find_runner(self._sweep, self._watched)) is None:
            return None
        state, _ = found
        self._stopping = state.stopping
        waits = full_disk(self._sweep)  # the runner cannot write its file then
        return replace(state, engine_state=waits) if waits else state
