"""One start of a run: owns the run's totals, continues those of earlier starts, and knows the wall time."""

import os
import platform
import socket
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import torch

from flopwatch.clock import Clock
from flopwatch.errors import FlopwatchError
from flopwatch.monitor import output as notices
from flopwatch.monitor.measured_step import Ledger, MeasuredStep
from flopwatch.monitor.output import Notify
from flopwatch.records.metrics import APART, LOST, carried_seconds, typical_seconds
from flopwatch.records.run import PARTIAL_ROW, Number
from flopwatch.runs import read_around, rows_from_end
from flopwatch.runs.lines import TornLineError, lines_from_end, parse_object
from flopwatch.runs.state import identify_process
from flopwatch.version import __version__

# The wall clock of a session: when its process started, and what time it is. The edge to the operating system.


_START_FIELD = 19
"""Index in /proc/self/stat, after the command's name, of the start in ticks since boot (proc_pid_stat(5), field 22)."""

_monitored_process: int | None = None


class WallClock:
    """Unix time that runs with the monitor's clock, so that neither a set clock nor a fake one breaks the sums.

    Attributes:
        session_start_unix_time: The start of the process. For a later monitor of the same process, such as a second
            run in a notebook, when it was made: the time before belongs to others.
    """

    def __init__(self, clock: Clock) -> None:
        global _monitored_process
        self._clock = clock
        made = time.time()
        self._offset_seconds = made - clock()
        is_first = _monitored_process != os.getpid()
        _monitored_process = os.getpid()
        started = process_start_unix_time() if is_first else None
        self.session_start_unix_time = made if started is None else min(started, made)

    def unix_time(self) -> float:
        return self.at(self._clock())

    def go_on_from(self, unix_time: float) -> None:
        """Advance the clock to a moment that an earlier session has logged, if this host's clock lags behind it."""
        self._offset_seconds += max(unix_time - self.unix_time(), 0.0)

    def at(self, clock_seconds: float) -> float:
        """Unix time of a moment of the monitor's clock."""
        return self._offset_seconds + clock_seconds


def process_start_unix_time() -> float | None:
    """When this process started, to 10 ms; None where the system does not provide it.

    Not `psutil.create_time`: it adds ticks to a boot time that the kernel gives in whole seconds.
    """
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[_START_FIELD])
        age_seconds = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return _start_by_psutil()
    return time.time() - age_seconds


def _start_by_psutil() -> float | None:
    try:
        import psutil
    except ImportError:
        return None
    return float(psutil.Process().create_time())


# What a reader needs to know to repeat a run: versions, host, device, rank.


def describe_environment(device: torch.device) -> dict[str, Any]:
    elastic = _torchelastic()
    return {
        **({} if elastic is None else {"torchelastic": elastic}),
        "flopwatch": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "process": identify_process(),
        "device": str(device),
        "threads": torch.get_num_threads(),
    }


def _torchelastic() -> dict[str, Any] | None:
    """Which job of torchrun this process belongs to, and which attempt it is; None without torchrun."""
    run_id = os.environ.get("TORCHELASTIC_RUN_ID")
    if run_id is None:
        return None
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    return {
        "run_id": run_id,
        "restart_count": int(restarts) if restarts.isdigit() else 0,
        "agent_pid": os.getppid(),
    }


def rank_and_world_size() -> tuple[int, int]:
    """From the process group; without one, from the variables that torchrun sets."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return int(os.environ.get("RANK", "0") or 0), int(os.environ.get("WORLD_SIZE", "1") or 1)


def device_memory_gib(device: torch.device) -> dict[str, float]:
    """Most memory held and reserved so far; read from the allocator, not from the device."""
    if device.type != "cuda":
        return {}
    return {
        "perf/memory_allocated_gib": torch.cuda.max_memory_allocated(device) / 2**30,
        "perf/memory_reserved_gib": torch.cuda.max_memory_reserved(device) / 2**30,
    }


# Where an earlier session of the same run left off.


class ResumePoint(NamedTuple):
    """The last step that counts, and the totals up to it.

    `is_estimated` is True when a window of several ranks had to be cut: the log has single steps only for the logging
    rank, and for all ranks only whole windows.
    """

    step: int
    ledger: Ledger
    is_estimated: bool = False


class LastSign(NamedTuple):
    """Time of the newest record of an earlier session, and the totals at that time."""

    unix_time: float
    ledger: Ledger


def find_resume_point(log: Path, first_step: int) -> ResumePoint | None:
    """What was logged before `first_step`; None when the run starts afresh.

    A training that goes back to a checkpoint repeats steps, which must not count twice. Where the
    checkpoint lies inside a window, its first steps are taken from the window's columns.
    """
    if first_step <= 1 or not log.is_file():
        return None
    later: Mapping[str, Any] | None = None
    for row in rows_from_end(log):
        if row["step"] < first_step and row.get("ledger"):
            ledger = Ledger.from_json(row["ledger"])
            window = _steps(later)
            rest = [step for step in window if row["step"] < step.step < first_step]
            typical = typical_seconds([s.work_seconds for s in window if s.work_seconds and not s.is_warm_up])
            of_all_ranks = later.get("all_ranks") if later is not None and rest else None
            if of_all_ranks:
                ledger.add_amounts(_share_of_window(of_all_ranks, window, rest))
                unknown: dict[str, Any] = dict.fromkeys(of_all_ranks)
                rest = [step._replace(**unknown) for step in rest]
            ledger.add_steps(rest, typical)
            return ResumePoint(rest[-1].step if rest else row["step"], ledger, bool(of_all_ranks))
        later = row
    return None


def _share_of_window(
    of_all_ranks: Mapping[str, int], window: Sequence[MeasuredStep], rest: Sequence[MeasuredStep]
) -> dict[str, int]:
    """Amounts of all ranks for the first steps of a window, in proportion to the logging rank's own steps."""
    shares: dict[str, int] = {}
    for name, total in of_all_ranks.items():
        own, own_rest = (sum(getattr(step, name) or 0 for step in steps) for steps in (window, rest))
        if own:
            shares[name] = round(Fraction(total * own_rest, own))
    return shares


def find_last_sign(log: Path) -> LastSign | None:
    """The newest record of earlier sessions, also of steps that are repeated; None when there is none."""
    newest: dict[str, Any] | None = None
    for record in _timed_records(log):
        newest = newest or record
        if record.get("ledger"):
            return _as_sign(newest, Ledger.from_json(record["ledger"]), log)
    return None


def continue_times(ledger: Ledger, last: LastSign | None, session_start_unix_time: float) -> float:
    """Book the time between the earlier session and this one: repeated steps, and the time without a process.

    Args:
        ledger: The totals at the step the run resumes after; its times become those the session begins with.
        last: What the log has last. One of another run, or older than the ledger itself, is not used.
        session_start_unix_time: When this process started.

    Returns:
        When this session's time begins: not before the earlier one ended, which may have been in the same process.
    """
    sign = _later_of(_own_sign(ledger), last, ledger.first_start_unix_time)
    if sign is None:
        return session_start_unix_time
    ledger.first_start_unix_time = sign.ledger.first_start_unix_time
    ledger.seconds = carried_seconds(ledger.seconds, sign.ledger.seconds)
    begins = max(session_start_unix_time, sign.unix_time)
    ledger.spend("restart", begins - sign.unix_time)
    return begins


def is_same_job(log: Path, environment: Mapping[str, Any]) -> bool:
    """Whether torchelastic has restarted the job that wrote the log's last session.

    A job killed before its first checkpoint starts at step 0 again, as a new run does; only torchelastic shows which.
    """
    now = environment.get("torchelastic")
    if not now or not now["restart_count"] or not log.is_file():
        return False
    start = next((record for record in _timed_records(log) if record["type"] == "run"), {})
    before = start.get("environment", {}).get("torchelastic")
    # The agent outlives its workers; the id alone is "none" for every job that was not given one.
    same = before and all(before[name] == now[name] for name in ("run_id", "agent_pid"))
    return bool(same and before["restart_count"] < now["restart_count"])


def _own_sign(ledger: Ledger) -> LastSign | None:
    wall, first_start = ledger.seconds.get("wall"), ledger.first_start_unix_time
    return None if wall is None or first_start is None else LastSign(first_start + wall, ledger)


def _later_of(own: LastSign | None, last: LastSign | None, first_start_unix_time: float | None) -> LastSign | None:
    is_same_run = last is not None and first_start_unix_time in (None, last.ledger.first_start_unix_time)
    if last is None or not is_same_run:
        return own
    return last if own is None or last.unix_time >= own.unix_time else own


def _as_sign(newest: Mapping[str, Any], ledger: Ledger, log: Path) -> LastSign:
    """The moment is taken from the ledger's wall time where there is one, else from the record."""
    is_summary = newest["type"] == "summary"
    if is_summary:  # phases after the last row
        ledger.seconds |= _seconds_in(newest["values"])
    tells_wall = "time/wall_seconds" in newest["values"] if is_summary else bool(newest.get("ledger"))
    own = _own_sign(ledger) if tells_wall else None
    if ledger.first_start_unix_time is None:  # an old log without it: the first record is the best known start
        starts = read_around(log).starts
        ledger.first_start_unix_time = starts[0].unix_time if starts else None
    return own or LastSign(newest["unix_time"], ledger)


def _seconds_in(values: Mapping[str, Any]) -> dict[str, float]:
    names = ("train", "input_wait", "warm_up", "wall", *LOST)
    return {name: values[f"time/{name}_seconds"] for name in names if f"time/{name}_seconds" in values}


def _timed_records(log: Path) -> Iterator[dict[str, Any]]:
    """Sessions, rows and summaries, newest first."""
    if not log.is_file():
        return
    for line in lines_from_end(log):
        try:
            record = parse_object(line)
        except TornLineError:
            continue
        if record.get("type") in ("run", "row", PARTIAL_ROW, "summary"):
            yield record


def _steps(row: Mapping[str, Any] | None) -> list[MeasuredStep]:
    columns = dict(row["steps"]) if row is not None else {}
    columns["is_warm_up"] = columns.pop("warm_up", [False] * len(columns.get("step", ())))
    names = [name for name in columns if name in MeasuredStep._fields]
    return [
        MeasuredStep(**dict(zip(names, cells, strict=True)))
        for cells in zip(*(columns[name] for name in names), strict=True)
    ]


_UNREADABLE_LOG = (FlopwatchError, OSError, ValueError, KeyError)
"""What reading a damaged or foreign log can raise."""
_TYPICAL_STEPS = 64
"""A stalled step is compared with the median of so many steps."""


class Totals(NamedTuple):
    """The run's totals at one moment.

    Attributes:
        values: Under the keys of `flopwatch.records.metrics`.
        ledger: As a log and a checkpoint keep them.
    """

    values: dict[str, Number]
    ledger: dict[str, Any]


class Session:
    """One start of a run: the only owner of the run's ledger, which continues that of a log or a checkpoint.

    Attributes:
        resumed_after: The last step whose totals were taken over; None for a fresh start.
        stalled_seconds: What the steps of this session have lost to stalls.
    """

    def __init__(self, log_path: Path, clock: Clock, notify: Notify) -> None:
        self._log_path = log_path
        self._clock = clock
        self._notify = notify
        self._wall_clock = WallClock(clock)
        self._began_unix_time = self._wall_clock.session_start_unix_time
        self._ledger = Ledger()
        self._carried_seconds: dict[str, float] = {}
        self._unbooked_seconds = 0.0
        self._last_work: deque[float] = deque(maxlen=_TYPICAL_STEPS)
        self.resumed_after: int | None = None
        self.stalled_seconds = 0.0

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue the totals of a checkpoint."""
        self._continue_from(Ledger.from_json(state["ledger"]))
        self.resumed_after = state.get("ledger_step", state["step"])

    def begin(
        self,
        first_step: int,
        environment: Mapping[str, Any],
        first_step_began: float | None,
        seconds_before_first_step: float,
    ) -> dict[str, Any]:
        """The first step has ended. A log that knows more than the checkpoint is preferred.

        Args:
            first_step: Its number.
            environment: Of this process; shows whether torchelastic has restarted the job.
            first_step_began: By the monitor's clock; None when it was not opened.
            seconds_before_first_step: Spent in phases before it, which are booked already.

        Returns:
            The ledger with which the session starts.
        """
        if self.resumed_after is None or self.resumed_after + 1 < first_step:
            self._resume_from_log(first_step, environment)
        ledger = self._ledger
        if self.resumed_after is None and ledger.first_start_unix_time is None:
            ledger.first_start_unix_time = self._began_unix_time
        began = self._clock() if first_step_began is None else first_step_began
        seconds = self._wall_clock.at(began) - self._began_unix_time - seconds_before_first_step
        ledger.spend("start_up", max(seconds, 0.0))
        ledger.set_wall(self._wall_clock.at(began))
        return ledger.to_json()

    def add_seconds(self, phase: str, seconds: float) -> None:
        """Book time outside steps to a phase."""
        self._ledger.add_seconds(phase, seconds)

    def expect(self, steps: Sequence[MeasuredStep]) -> None:
        """Announce steps that will be booked later; until then no row's wall time includes them."""
        self._unbooked_seconds += _seconds_of(steps)
        self._last_work.extend(_typical_work(steps))

    def book(self, steps: Sequence[MeasuredStep], amounts: Mapping[str, int], later_seconds: float) -> Totals:
        """Add a window to the totals.

        Args:
            steps: The window's steps, as they were given to `expect`.
            amounts: Samples, tokens and FLOPs of all ranks, where the steps do not hold them.
            later_seconds: Time of later steps, which is not in the wall time of this row.
        """
        self._unbooked_seconds -= _seconds_of(steps)
        self._ledger.add_amounts(amounts)
        stalled_before = self._ledger.seconds.get("stall", 0.0)
        self._ledger.add_steps(steps, typical_seconds(self._last_work))
        self.stalled_seconds += self._ledger.seconds.get("stall", 0.0) - stalled_before
        self._ledger.set_wall(self._wall_clock.unix_time() - self._unbooked_seconds - later_seconds)
        return _totals_of(self._ledger)

    def totals(self) -> Totals:
        """The totals up to the last booked step, with the wall time up to now."""
        self._ledger.set_wall(self._wall_clock.unix_time())
        return _totals_of(self._ledger)

    def totals_with(self, steps: Sequence[MeasuredStep]) -> Totals:
        """What the totals would be with these steps; they are not booked."""
        ledger = deepcopy(self._ledger)
        ledger.add_steps(steps, typical_seconds([*self._last_work, *_typical_work(steps)]))
        ledger.set_wall(self._wall_clock.unix_time())
        return _totals_of(ledger)

    def _continue_from(self, ledger: Ledger) -> None:
        """Take over an earlier session's totals; phases of this one that are already booked stay booked."""
        booked, before = self._ledger.seconds, self._carried_seconds
        try:
            sign = find_last_sign(self._log_path)
        except _UNREADABLE_LOG:  # then only the time between the sessions is unknown
            sign = None
        self._began_unix_time = continue_times(ledger, sign, self._wall_clock.session_start_unix_time)
        self._wall_clock.go_on_from(self._began_unix_time)
        self._carried_seconds = dict(ledger.seconds)
        for phase, seconds in booked.items():
            if phase in APART:
                ledger.add_seconds(phase, seconds - before.get(phase, 0.0))
        self._ledger = ledger

    def _resume_from_log(self, first_step: int, environment: Mapping[str, Any]) -> None:
        try:
            point = find_resume_point(self._log_path, first_step)
            if point is not None and (self.resumed_after is None or point.step > self.resumed_after):
                self._continue_at(point, first_step)
            elif self.resumed_after is None and is_same_job(self._log_path, environment):
                self._continue_from(Ledger())
        except _UNREADABLE_LOG as error:
            self._notify(*notices.log_not_resumed(self._log_path, error))
        if self.resumed_after is not None and self.resumed_after + 1 < first_step:
            self._notify(*notices.steps_lost(self.resumed_after, first_step))

    def _continue_at(self, point: ResumePoint, first_step: int) -> None:
        self._continue_from(point.ledger)
        self.resumed_after = point.step
        if point.is_estimated:
            self._notify(*notices.totals_estimated(first_step))


def _totals_of(ledger: Ledger) -> Totals:
    return Totals(ledger.values(), ledger.to_json())


def _seconds_of(steps: Sequence[MeasuredStep]) -> float:
    return sum(step.seconds or 0.0 for step in steps)


def _typical_work(steps: Sequence[MeasuredStep]) -> list[float]:
    return [step.work_seconds for step in steps if step.work_seconds is not None and not step.is_warm_up]
