"""One session of a run, from start to end of a process. It adds to the totals that earlier sessions logged."""

import os
import platform
import socket
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch

from flopwatch import process
from flopwatch.clock import Clock, cell_start_unix_time
from flopwatch.errors import FlopwatchError, InputError
from flopwatch.hardware import DeviceFacts, read_device
from flopwatch.monitor import output as notices
from flopwatch.monitor.measured_step import Ledger, MeasuredStep
from flopwatch.monitor.output import Notify
from flopwatch.records.metrics import APART, OF_STEPS, carried_seconds, typical_seconds
from flopwatch.records.run import PARTIAL_ROW, Number
from flopwatch.records.time_uses import LOST
from flopwatch.runs import rows_from_end
from flopwatch.runs.log_file import TornLineError, lines_from_end, parse_object, row_step, to_record
from flopwatch.version import __version__

_MOST_LINES_SEARCHED = 20_000
"""How many lines of a log are searched for the start of its last session, which takes 0.1 s."""

_monitored_process: int | None = None


class WallClock:
    """Unix time computed from the monitor's clock, so that a change of the system time does not affect the totals.

    Attributes:
        session_start_unix_time: When the process started; in a notebook, when the cell began that creates the monitor,
            because a person may think for hours before it; if the process had an earlier monitor, when this one was
            created.
    """

    def __init__(self, clock: Clock) -> None:
        global _monitored_process
        self._clock = clock
        made = time.time()
        self._offset_seconds = made - clock()
        is_first = _monitored_process != os.getpid()
        _monitored_process = os.getpid()
        started = (cell_start_unix_time() or process.start_unix_time()) if is_first else None
        self.session_start_unix_time = made if started is None else min(started, made)

    def unix_time(self) -> float:
        return self.at(self._clock())

    def go_on_from(self, unix_time: float) -> None:
        """Advance the clock to the end of the earlier session, if this host's clock is behind that time."""
        self._offset_seconds += max(unix_time - self.unix_time(), 0.0)

    def at(self, clock_seconds: float) -> float:
        """Convert a time of the monitor's clock to Unix time."""
        return self._offset_seconds + clock_seconds


def describe_environment(device: torch.device) -> dict[str, Any]:
    elastic = _torchelastic()
    facts = _device_facts(device)
    return {
        **({} if elastic is None else {"torchelastic": elastic}),
        "flopwatch": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "process": process.own_identity(),
        "device": str(device),
        **({} if facts is None else {"device_name": facts.name, "device_units": facts.unit_count}),
        "threads": torch.get_num_threads(),
    }


def _device_facts(device: torch.device) -> DeviceFacts | None:
    """What identifies the device in the file of measured peaks; None if torch does not say it."""
    try:
        return read_device(device)
    except InputError:
        return None


def _torchelastic() -> dict[str, Any] | None:
    """The torchrun job of this process and how often it was restarted; None without torchrun."""
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
    """Return rank and world size from the process group or, without one, from the variables that torchrun sets."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return int(os.environ.get("RANK", "0") or 0), int(os.environ.get("WORLD_SIZE", "1") or 1)


def device_memory_gib(device: torch.device) -> dict[str, float]:
    """Peak memory of a CUDA device so far, from torch's allocator, which answers without waiting for the device."""
    if device.type != "cuda":
        return {}
    return {
        "perf/memory_allocated_gib": torch.cuda.max_memory_allocated(device) / 2**30,
        "perf/memory_reserved_gib": torch.cuda.max_memory_reserved(device) / 2**30,
    }


class ResumePoint(NamedTuple):
    """The last logged step before the one at which a run continues, and the totals up to that step.

    `is_estimated` is True if there are several ranks and the step is not the last of its logging window. The totals are
    then partly an estimate, because the log contains the sums of all ranks only for whole windows.
    """

    step: int
    ledger: Ledger
    is_estimated: bool = False


class LastRecord(NamedTuple):
    """Time of the newest record of an earlier session, and the totals at that time."""

    unix_time: float
    ledger: Ledger


def find_resume_point(log: Path, first_step: int) -> ResumePoint | None:
    """Find the newest logged totals before `first_step`; None when the run starts from the beginning.

    A training that goes back to a checkpoint repeats steps, which must not count twice. If the checkpoint lies inside
    a logging window, the window's steps before `first_step` are added from the columns of its log row.
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
    """Estimate the sums over all ranks for the steps `rest`, from their share of the window on the logging rank."""
    shares: dict[str, int] = {}
    for name, total in of_all_ranks.items():
        own, own_rest = (sum(getattr(step, name) or 0 for step in steps) for steps in (window, rest))
        if own:
            shares[name] = round(Fraction(total * own_rest, own))
    return shares


def find_last_record(log: Path) -> LastRecord | None:
    """Find the newest record of earlier sessions, even one whose steps this session repeats; None if there is none."""
    newest: dict[str, Any] | None = None
    for record in _timed_records(log):
        newest = newest or record
        if record.get("ledger"):
            return _as_last_record(newest, Ledger.from_json(record["ledger"]))
    return None


def continue_times(ledger: Ledger, last: LastRecord | None, session_start_unix_time: float) -> float:
    """Add the time lost between two sessions to the ledger: repeated steps, and the time without a process.

    Args:
        ledger: The totals at the step after which the run resumes; its times are updated.
        last: The newest record of the log. It is ignored if it belongs to another run or is older than the ledger.
        session_start_unix_time: When this process started.

    Returns:
        Unix time at which this session begins, never before the end of the earlier session.
    """
    newest = _later_of(_end_of(ledger), last, ledger.first_start_unix_time)
    if newest is None:
        return session_start_unix_time
    ledger.first_start_unix_time = newest.ledger.first_start_unix_time
    ledger.seconds = carried_seconds(ledger.seconds, newest.ledger.seconds)
    begins = max(session_start_unix_time, newest.unix_time)
    ledger.spend("restart", begins - newest.unix_time)
    return begins


def is_same_job(log: Path, environment: Mapping[str, Any]) -> bool:
    """Whether torchelastic has restarted the job that wrote the log's last session.

    A job that was killed before its first checkpoint starts at step 0 again, so its steps do not show the restart.
    """
    now = environment.get("torchelastic")
    if not now or not now["restart_count"] or not log.is_file():
        return False
    start = next((record for record in _timed_records(log) if record["type"] == "run"), {})
    before = start.get("environment", {}).get("torchelastic")
    # torchrun's agent keeps its pid when it restarts workers. `run_id` alone is not enough: its default is "none".
    same = before and all(before[name] == now[name] for name in ("run_id", "agent_pid"))
    return bool(same and before["restart_count"] < now["restart_count"])


def process_writing(log: Path) -> int | None:
    """The process of the log's last session, if it runs and has not ended the session; None otherwise."""
    try:
        newest = islice(lines_from_end(log), _MOST_LINES_SEARCHED) if log.is_file() else ()
        records = (parse_object(line) for line in newest if row_step(line) is None)
        last = next((record for record in records if record.get("type") in ("run", "summary")), {})
    except (OSError, TornLineError):
        return None
    writer = last.get("environment", {}).get("process", {})
    return writer["pid"] if process.is_alive(writer) else None


def _end_of(ledger: Ledger) -> LastRecord | None:
    wall, first_start = ledger.seconds.get("wall"), ledger.first_start_unix_time
    return None if wall is None or first_start is None else LastRecord(first_start + wall, ledger)


def _later_of(
    own: LastRecord | None, last: LastRecord | None, first_start_unix_time: float | None
) -> LastRecord | None:
    if last is None or first_start_unix_time not in (None, last.ledger.first_start_unix_time):
        return own
    return last if own is None or last.unix_time >= own.unix_time else own


def _as_last_record(newest: Mapping[str, Any], ledger: Ledger) -> LastRecord:
    """Return the totals and the newest record's time: first start plus wall time if known, else its `unix_time`."""
    is_summary = newest["type"] == "summary"
    if is_summary:  # a summary also contains the time of phases after the last row
        names = (*OF_STEPS, "wall", *LOST)
        keys = {name: f"time/{name}_seconds" for name in names}
        ledger.seconds |= {name: newest["values"][key] for name, key in keys.items() if key in newest["values"]}
    has_wall = "time/wall_seconds" in newest["values"] if is_summary else bool(newest.get("ledger"))
    own = _end_of(ledger) if has_wall else None
    return own or LastRecord(newest["unix_time"], ledger)


def _timed_records(log: Path) -> Iterator[dict[str, Any]]:
    """Yield the records that have a time (starts of sessions, rows and summaries), newest first."""
    if not log.is_file():
        return
    for line in lines_from_end(log):
        with suppress(TornLineError):
            record = parse_object(line)
            if record.get("type") in ("run", "row", PARTIAL_ROW, "summary"):
                to_record({**record, "type": "row"} if record["type"] == PARTIAL_ROW else record)
                yield record


def _steps(row: Mapping[str, Any] | None) -> list[MeasuredStep]:
    columns = dict(row["steps"]) if row is not None else {}
    columns["is_warm_up"] = columns.pop("warm_up", [False] * len(columns.get("step", ())))
    peak = ((row or {}).get("peak") or {}).get("flops_per_s")
    for name in ("model", "hardware"):
        if peak and f"{name}_flops" in columns:
            columns[f"{name}_peak_seconds"] = [None if n is None else n / peak for n in columns[f"{name}_flops"]]
    names = [name for name in columns if name in MeasuredStep._fields]
    return [
        MeasuredStep(**dict(zip(names, cells, strict=True)))
        for cells in zip(*(columns[name] for name in names), strict=True)
    ]


_UNREADABLE_LOG = (FlopwatchError, OSError, ValueError, KeyError, TypeError, AttributeError)
"""Exceptions that may be raised when a damaged log, or another file, is read as a log."""
_TYPICAL_STEPS = 64
"""A step is stalled if it takes much longer than the median of the last 64 steps."""


class Totals(NamedTuple):
    """The run's totals in two forms: `values` by metric key, and `ledger` as the log and checkpoints store it."""

    values: dict[str, Number]
    ledger: dict[str, Any]


class Session:
    """One session (process) of a run. Its totals, the ledger, continue those of the log or of a checkpoint.

    Attributes:
        resumed_after: The last step in the totals that this session continues; None if the run starts here.
        stalled_seconds: Time that steps of this session have lost to stalls.
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
        self._continue_from(Ledger.from_json(state["ledger"]))
        self.resumed_after = state.get("ledger_step", state["step"])

    def begin(
        self,
        first_step: int,
        environment: Mapping[str, Any],
        first_step_began: float | None,
        seconds_before_first_step: float,
    ) -> dict[str, Any]:
        """Begin the session, after its first step has ended; return the run's totals before that step as JSON.

        The totals continue those of the log if the log has later steps than the checkpoint.

        Args:
            first_step: Number of the first step.
            environment: Description of this process; shows whether torchelastic has restarted the job.
            first_step_began: When the first step was opened, by the monitor's clock; None if it was not opened.
            seconds_before_first_step: Time of phases, such as evaluation, before the first step; not start-up time.
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

    @property
    def undivided_steps(self) -> int:
        """Counted steps of which it is not known how much time counting has taken."""
        return self._ledger.undivided_steps

    def add_seconds(self, phase: str, seconds: float) -> None:
        self._ledger.add_seconds(phase, seconds)

    def expect(self, steps: Sequence[MeasuredStep]) -> None:
        """Announce steps that `book` will add later. Until then, their time is left out of the wall time of rows."""
        self._unbooked_seconds += _seconds_of(steps)
        self._last_work.extend(_typical_work(steps))

    def book(
        self,
        steps: Sequence[MeasuredStep],
        amounts: Mapping[str, int],
        later_seconds: float,
        at_peak: Mapping[str, float] | None = None,
    ) -> Totals:
        """Add a window to the totals.

        Args:
            steps: The window's steps, which were announced with `expect`.
            amounts: Samples, tokens and FLOPs of all ranks; empty if the steps themselves contain them.
            later_seconds: Seconds of the steps after this window, which the row's wall time must not include.
            at_peak: What all ranks used of their devices' peak; None if the steps themselves show it.
        """
        self._unbooked_seconds -= _seconds_of(steps)
        self._ledger.add_amounts(amounts)
        if at_peak is not None:
            known = {name: amounts.get(f"{name}_flops") for name in ("model", "hardware", "recompute")}
            self._ledger.add_timed_flops({name: flops for name, flops in known.items() if flops is not None})
        stalled_before = self._ledger.seconds.get("stall", 0.0)
        self._ledger.add_steps(steps, typical_seconds(self._last_work), at_peak)
        self.stalled_seconds += self._ledger.seconds.get("stall", 0.0) - stalled_before
        self._ledger.set_wall(self._wall_clock.unix_time() - self._unbooked_seconds - later_seconds)
        return _totals_of(self._ledger)

    def totals(self, *, are_last: bool = False) -> Totals:
        """Return the totals up to the newest row. Only the wall time includes the time since that row."""
        if are_last:  # no more counted steps will follow, with which the first could be compared
            self._ledger.divide_counted(typical_seconds(self._last_work))
        self._ledger.set_wall(self._wall_clock.unix_time())
        return _totals_of(self._ledger)

    def totals_with(self, steps: Sequence[MeasuredStep]) -> Totals:
        """Return what the totals would be with these steps, without adding them."""
        ledger = deepcopy(self._ledger)
        ledger.add_steps(steps, typical_seconds([*self._last_work, *_typical_work(steps)]))
        ledger.set_wall(self._wall_clock.unix_time())
        return _totals_of(ledger)

    def _continue_from(self, ledger: Ledger) -> None:
        """Continue the totals of an earlier session (`ledger`), and add the time that this session spent in phases."""
        booked, before = self._ledger.seconds, self._carried_seconds
        try:
            last = find_last_record(self._log_path)
        except _UNREADABLE_LOG:  # the totals go on, but without the time between the sessions
            last = None
        self._began_unix_time = continue_times(ledger, last, self._wall_clock.session_start_unix_time)
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
            self._notify(*notices.notice("log_not_resumed", log=self._log_path, why=error))
        if self.resumed_after is not None and self.resumed_after + 1 < first_step:
            self._notify(*notices.notice("steps_lost", last_step=self.resumed_after, first_step=first_step))

    def _continue_at(self, point: ResumePoint, first_step: int) -> None:
        self._continue_from(point.ledger)
        self.resumed_after = point.step
        if point.is_estimated:
            self._notify(*notices.notice("totals_estimated", first_step=first_step))


def _totals_of(ledger: Ledger) -> Totals:
    return Totals(ledger.values(), ledger.to_json())


def _seconds_of(steps: Sequence[MeasuredStep]) -> float:
    return sum(step.seconds or 0.0 for step in steps)


def _typical_work(steps: Sequence[MeasuredStep]) -> list[float]:
    return [step.work_seconds for step in steps if step.work_seconds is not None and not step.is_warm_up]
