"""Which this process is, when it started, whether flopwatch is switched off in it, and whether another one is alive.

Standard library only.

A process ID alone identifies nothing, because IDs are reused, and other machines and containers use the same ones. All
of it comes from Linux's /proc; on other systems most of it is unknown.
"""

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple


def is_switched_off() -> bool:
    return os.environ.get("FLOPWATCH_DISABLE", "").strip().lower() not in ("", "0", "false", "no", "off")


class Stat(NamedTuple):
    """What /proc/PID/stat says of a process; `start_ticks` is when it started, in clock ticks since boot."""

    state: str
    parent: int
    start_ticks: int

    @property
    def is_dead(self) -> bool:
        return self.state in ("Z", "X")


def read_stat(pid: int) -> Stat | None:
    try:
        # The fields follow the last `)`; the process's name, which is before it, may contain others.
        fields = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
        return Stat(fields[0].decode(), int(fields[1]), int(fields[19]))
    except (ValueError, IndexError):
        return None


def keyed_lines(path: str) -> dict[bytes, bytes]:
    """The text after the colon of each line of a short file such as /proc/PID/status; empty if it cannot be read."""
    lines = (line.partition(b":") for line in _read(path).splitlines())
    return {key: rest for key, _, rest in lines}


def _read(path: str) -> bytes:
    """Read a file of /proc with os.read, five times as fast as pathlib, because this is done for many processes."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:
        return b""
    try:
        return os.read(handle, 8192)
    except OSError:  # the process has ended in between
        return b""
    finally:
        os.close(handle)


def start_ticks(pid: int) -> int | None:
    stat = read_stat(pid)
    return None if stat is None or stat.is_dead else stat.start_ticks


def start_unix_time() -> float | None:
    """When this process started, with an error below 10 ms; None without /proc.

    `psutil.create_time` would be wrong by up to a second, because it uses a boot time in whole seconds.
    """
    ticks = start_ticks(os.getpid())
    if ticks is None:
        return None
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))


def own_identity() -> dict[str, Any]:
    """Values that together identify this process among all processes of this machine; empty without /proc."""
    ticks, scope = start_ticks(os.getpid()), pid_scope()
    return {"pid": os.getpid(), "start_ticks": ticks, **scope} if scope and ticks is not None else {}


def pid_scope() -> dict[str, str]:
    """The boot and the PID namespace (container) of this process, within which a pid is unique; empty without /proc."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return {"boot_id": boot_id, "pid_namespace": os.readlink("/proc/self/ns/pid")}
    except (OSError, ValueError):
        return {}


def is_of_here(identity: Any) -> bool:
    """Whether a process belongs to the present boot of this machine and to this PID namespace."""
    scope = pid_scope()
    is_whole = bool(scope) and isinstance(identity, Mapping)  # it may be anything if it comes from a damaged file
    return is_whole and all(identity.get(key) == value for key, value in scope.items())


def is_alive(identity: Any) -> bool | None:
    """Whether a process is alive; None if it belongs to another machine or container, or if it is unknown.

    >>> is_alive(own_identity()), is_alive({})
    (True, None)
    """
    if not is_of_here(identity):
        return None
    try:
        pid, ticks = int(identity["pid"]), int(identity["start_ticks"])
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True  # /proc may hide the processes of other users
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None
    return start_ticks(pid) == ticks


def descendants(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for process in all_pids():
        stat = read_stat(process)
        if stat is not None and not stat.is_dead:
            children.setdefault(stat.parent, []).append(process)
    found, queue = [], [pid]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


def all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()] if sys.platform == "linux" else []
