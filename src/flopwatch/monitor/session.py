"""One start of a run: what it takes over from earlier ones, and when it began."""

import os
import platform
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from flopwatch.clock import Clock
from flopwatch.errors import FlopwatchError
from flopwatch.monitor import notices
from flopwatch.monitor.intake.step_clock import StepClock
from flopwatch.monitor.ledger import Ledger, ResumePoint, continue_times, find_last_sign, find_resume_point, is_same_job
from flopwatch.monitor.notices import Tell
from flopwatch.monitor.rows import RowMaker
from flopwatch.records.metrics import APART
from flopwatch.runs.process import identify_process
from flopwatch.version import __version__

# The wall clock of a session: when its process started, and what time it is. The edge to the operating system.


_START_FIELD = 19
"""Of /proc/self/stat after the command's name: ticks since boot (man 5 proc_pid_stat, field 22)."""

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
        """An earlier session has seen this moment: a clock that lags behind it, on another host, is moved there."""
        self._offset_seconds += max(unix_time - self.unix_time(), 0.0)

    def at(self, clock_seconds: float) -> float:
        """Unix time of a moment of the monitor's clock."""
        return self._offset_seconds + clock_seconds


def process_start_unix_time() -> float | None:
    """When this process started, to 10 ms; None where the system does not tell.

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
    """From the process group, else from what torchrun sets."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return int(os.environ.get("RANK", "0") or 0), int(os.environ.get("WORLD_SIZE", "1") or 1)


def device_memory_gib(device: torch.device) -> dict[str, float]:
    """Most memory held and reserved so far; asks the allocator, not the device."""
    if device.type != "cuda":
        return {}
    return {
        "perf/memory_allocated_gib": torch.cuda.max_memory_allocated(device) / 2**30,
        "perf/memory_reserved_gib": torch.cuda.max_memory_reserved(device) / 2**30,
    }


_OF_NO_USE = (FlopwatchError, OSError, ValueError, KeyError)
"""What reading a log can raise."""


class Session:
    """Continues the ledger of a log or a checkpoint, and books the time until the first step.

    Attributes:
        resumed_after: The last step whose totals were taken over; None for a fresh start.
        unix_time: What time it is.
    """

    def __init__(self, log_path: Path, clock: Clock, rows: RowMaker, tell: Tell) -> None:
        self._log_path = log_path
        self._clock = clock
        self._rows = rows
        self._tell = tell
        self._wall_clock = WallClock(clock)
        self.unix_time: Callable[[], float] = self._wall_clock.unix_time
        rows.unix_time = self.unix_time
        self._began_unix_time = self._wall_clock.session_start_unix_time
        self._carried_seconds: dict[str, float] = {}
        self.resumed_after: int | None = None

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue the totals of a checkpoint."""
        self._continue_from(Ledger.from_json(state["ledger"]))
        self.resumed_after = state.get("ledger_step", state["step"])

    def begin(self, first_step: int, environment: Mapping[str, Any], step_clock: StepClock) -> None:
        """The first step has been seen. A log that knows more than the checkpoint is preferred."""
        if self.resumed_after is None or self.resumed_after + 1 < first_step:
            self._resume_from_log(first_step, environment)
        ledger = self._rows.ledger
        if self.resumed_after is None and ledger.first_start_unix_time is None:
            ledger.first_start_unix_time = self._began_unix_time
        began = self._clock() if step_clock.first_step_began is None else step_clock.first_step_began
        seconds = self._wall_clock.at(began) - self._began_unix_time - step_clock.seconds_before_first_step
        ledger.spend("start_up", max(seconds, 0.0))
        ledger.tell_wall(self._wall_clock.at(began))

    def _continue_from(self, ledger: Ledger) -> None:
        """Take over an earlier session's totals; phases of this one that are already booked stay booked."""
        booked, before = self._rows.ledger.seconds, self._carried_seconds
        try:
            sign = find_last_sign(self._log_path)
        except _OF_NO_USE:  # the totals are worth more than the time lost since
            sign = None
        self._began_unix_time = continue_times(ledger, sign, self._wall_clock.session_start_unix_time)
        self._wall_clock.go_on_from(self._began_unix_time)
        self._carried_seconds = dict(ledger.seconds)
        for phase, seconds in booked.items():
            if phase in APART:
                ledger.add_seconds(phase, seconds - before.get(phase, 0.0))
        self._rows.ledger = ledger

    def _resume_from_log(self, first_step: int, environment: Mapping[str, Any]) -> None:
        try:
            point = find_resume_point(self._log_path, first_step)
            if point is not None and (self.resumed_after is None or point.step > self.resumed_after):
                self._continue_at(point, first_step)
            elif self.resumed_after is None and is_same_job(self._log_path, environment):
                self._continue_from(Ledger())
        except _OF_NO_USE as error:
            self._tell(*notices.log_not_resumed(self._log_path, error))
        if self.resumed_after is not None and self.resumed_after + 1 < first_step:
            self._tell(*notices.steps_lost(self.resumed_after, first_step))

    def _continue_at(self, point: ResumePoint, first_step: int) -> None:
        self._continue_from(point.ledger)
        self.resumed_after = point.step
        if point.is_estimated:
            self._tell(*notices.totals_estimated(first_step))
