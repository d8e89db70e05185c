"""Identify the process that writes a log, and check whether it still runs. Works on Linux; elsewhere it is unknown."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_STATE_FIELD, _START_FIELD = 0, 19
"""Indices in /proc/PID/stat after the command's name (man 5 proc_pid_stat, fields 3 and 22)."""
_DEAD_STATES = ("Z", "X")


def identify_process() -> dict[str, Any]:
    """What identifies this process among all others; empty where that is unknown.

    A process ID alone is not enough: IDs are reused, and other machines and containers have the same ones.
    """
    try:
        return {
            "pid": os.getpid(),
            "start_ticks": int(_stat_fields(os.getpid())[_START_FIELD]),
            "boot_id": _boot_id(),
            "pid_namespace": os.readlink("/proc/self/ns/pid"),
        }
    except (OSError, ValueError, IndexError):
        return {}


def is_gone(process: Mapping[str, Any]) -> bool:
    """True only if the process has certainly ended, which only the same machine and container can see.

    >>> is_gone(identify_process())
    False
    """
    try:
        is_seen_from_here = process["boot_id"] == _boot_id() and process["pid_namespace"] == os.readlink(
            "/proc/self/ns/pid"
        )
        return bool(is_seen_from_here and _has_ended(int(process["pid"]), int(process["start_ticks"])))
    except (OSError, ValueError, IndexError, KeyError, TypeError):
        return False


def _has_ended(pid: int, start_ticks: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    fields = _stat_fields(pid)
    return fields[_STATE_FIELD] in _DEAD_STATES or int(fields[_START_FIELD]) != start_ticks


def _stat_fields(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
