"""The wall clock of a session: when its process started, and what time it is. The edge to the operating system."""

import os
import time
from pathlib import Path

from flopwatch.clock import Clock

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
