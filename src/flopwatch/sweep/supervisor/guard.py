"""Clears what an attempt of a trial left on this host: processes and cgroups of a supervisor that was killed.

The process that an engine starts becomes the guard of its trial, and the supervisor is its child (`become_guarded`).
Every process of the trial that loses its parent becomes a child of the guard. If the supervisor is killed, the guard
kills them all and exits only after that, so an engine never sees the end of a trial while one of its processes still
runs. If the guard itself is killed, the kernel sends SIGTERM to the supervisor, which then ends the trial. A supervisor
also clears what earlier attempts left, before it starts its worker.
"""

import contextlib
import os
import signal
import sys
import time
import zlib
from pathlib import Path
from typing import NoReturn

from flopwatch.files import read_object
from flopwatch.records.trial_files import STARTED
from flopwatch.sweep.host.memory import group_places
from flopwatch.sweep.host.processes import adopt_orphans, die_with_parent, kill_descendants, kill_marked

_GROUP_PATIENCE_SECONDS = 5.0  # A killed process stays in its cgroup until the kernel has freed its memory.
_FORWARDED = (signal.SIGTERM, signal.SIGINT, getattr(signal, "SIGHUP", signal.SIGTERM))  # Windows has no SIGHUP


def become_guarded(trial_dir: Path) -> None:
    """Fork: this process becomes the guard and its child continues as the supervisor. Does nothing outside Linux.

    The child starts a new session, so that a signal to the guard's process group does not kill the supervisor, which
    must end its trial first.
    """
    if sys.platform != "linux":
        return
    adopt_orphans()  # only for the guard, because a child does not inherit this setting
    parent = os.getpid()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)  # until the guard has installed its handlers
    child = os.fork()
    if child:
        _guard(child, trial_dir)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    os.setsid()
    die_with_parent(signal.SIGTERM)
    if os.getppid() != parent:  # the guard ended before `die_with_parent` was called
        os.kill(os.getpid(), signal.SIGTERM)


def _guard(supervisor: int, trial_dir: Path) -> NoReturn:
    for number in _FORWARDED:
        signal.signal(number, lambda number, frame: os.kill(supervisor, signal.SIGTERM))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
    os.waitid(os.P_PID, supervisor, os.WEXITED | os.WNOWAIT)  # its pid stays taken until no handler can use it
    for number in _FORWARDED:
        signal.signal(number, signal.SIG_IGN)
    status = os.waitstatus_to_exitcode(os.waitpid(supervisor, 0)[1])
    if status:
        kill_descendants(os.getpid())
        if read_object(trial_dir / STARTED).get("pid") == supervisor:
            clear_attempts(trial_dir)
    if status < 0:  # the engine reads the status of this process
        import resource  # Windows has no such module

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -status not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(abs(status))


def group_name(trial_dir: Path, attempt: str = "") -> str:
    """The last part of the name of an attempt's cgroup; without an attempt, its beginning for all of them."""
    return f"{zlib.crc32(os.fsencode(trial_dir)):08x}-{trial_dir.name[-40:]}-{attempt[:12]}"


def clear_attempts(trial_dir: Path) -> None:
    """Kill what is left of this trial on this host."""
    kill_marked(trial_dir)
    name = group_name(trial_dir)
    for place in group_places():
        with contextlib.suppress(OSError):
            for group in os.listdir(place):
                if group.startswith("flopwatch-") and name in group:
                    _remove_group(place / group)


def _remove_group(folder: Path) -> None:
    deadline = time.monotonic() + _GROUP_PATIENCE_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, ValueError):
            for pid in (folder / "cgroup.procs").read_text().split():
                os.kill(int(pid), signal.SIGKILL)
        try:
            folder.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.01)
