"""Clears what an attempt of a trial left on this host: processes and cgroups of a supervisor that was killed or stuck.

The process that an engine starts becomes the guard of its trial, and the supervisor is its child (`become_guarded`).
The guard forwards signals to the supervisor, and every process of the trial that loses its parent becomes a child of
the guard. If the supervisor is killed, or writes nothing to their pipe for longer than allowed, the guard kills all
processes of the trial and exits only after that. So an engine never sees the end of a trial while one of its processes
still runs. A supervisor also clears what earlier attempts left, before it starts its worker.

If the guard itself is killed, the kernel sends SIGTERM to the supervisor, which then ends the trial.
"""

import contextlib
import os
import select
import signal
import sys
import time
import zlib
from pathlib import Path
from typing import NoReturn

from flopwatch.files import read_object, write_json
from flopwatch.process import pid_scope
from flopwatch.records.trial_files import GUARD, STARTED
from flopwatch.sweep.host.memory import group_places
from flopwatch.sweep.host.processes import adopt_orphans, die_with_parent, kill_descendants, kill_marked

_POLL_SECONDS = 1.0  # time between two checks whether the supervisor has been silent for too long
_GROUP_PATIENCE_SECONDS = 5.0  # A killed process stays in its cgroup until the kernel has freed its memory.
_MOST_FILES = 4096  # The guard closes all file descriptors below this number. A supervisor has a few dozen.
_FORWARDED = (signal.SIGTERM, signal.SIGINT, getattr(signal, "SIGHUP", signal.SIGTERM))  # Windows has no SIGHUP


def become_guarded(trial_dir: Path) -> int | None:
    """Fork: this process becomes the guard and its child continues as the supervisor.

    The child starts a new session, so that a signal to the guard's process group does not kill the supervisor, which
    must end its trial first.

    Returns:
        The file descriptor of the pipe to the guard; None on systems other than Linux, where no guard is used.
    """
    if sys.platform != "linux":
        return None
    adopt_orphans()  # only for the guard, because a child does not inherit this setting
    reads, writes = os.pipe()
    parent = os.getpid()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)  # until the guard has installed its handlers
    child = os.fork()
    if child:
        os.closerange(3, reads)  # otherwise the guard would keep the supervisor's sockets open
        os.closerange(reads + 1, _MOST_FILES)
        _guard(child, reads, trial_dir)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    os.close(reads)
    os.setsid()
    die_with_parent(signal.SIGTERM)
    if os.getppid() != parent:  # the guard process ended before `die_with_parent` was called
        os.kill(os.getpid(), signal.SIGTERM)
    os.set_blocking(writes, False)
    return writes


def _guard(supervisor: int, pipe: int, trial_dir: Path) -> NoReturn:
    for number in _FORWARDED:
        # No other process can get the supervisor's pid yet, because waitpid is called after these handlers are removed.
        signal.signal(number, lambda number, frame: os.kill(supervisor, signal.SIGTERM))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
    why_killed = _wait(supervisor, pipe)
    for number in _FORWARDED:
        signal.signal(number, signal.SIG_IGN)
    status = os.waitstatus_to_exitcode(os.waitpid(supervisor, 0)[1])
    if status:
        kill_descendants(os.getpid())
        claimed = read_object(trial_dir / STARTED)
        if claimed.get("pid") == supervisor and claimed.get("boot_id") == pid_scope().get("boot_id", ""):
            clear_attempts(trial_dir, attempt := claimed.get("attempt", ""))
            if why_killed:
                with contextlib.suppress(OSError):
                    write_json(trial_dir / GUARD, {"attempt": attempt, "reason": why_killed})
    if status < 0:  # the engine reads the status of this process
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -status not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(abs(status))


def _wait(supervisor: int, pipe: int) -> str:
    """Wait until the supervisor has ended. Return why the guard killed it, or "" if it ended by itself."""
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    allowed: float | None = None
    heard, received = time.monotonic(), b""
    while True:
        if poll.poll(_POLL_SECONDS * 1000):
            read = os.read(pipe, 4096)
            if not read:
                return ""
            heard = time.monotonic()
            if allowed is None:  # the supervisor's first line says how many seconds of silence are allowed
                received += read
                allowed = float(received.split(b"\n")[0]) if b"\n" in received else None
        elif allowed is not None and time.monotonic() - heard > allowed:
            os.kill(supervisor, signal.SIGKILL)
            return f"the trial's supervisor did not respond for {time.monotonic() - heard:.0f} s and was killed"


def group_name(trial_dir: Path, attempt: str = "") -> str:
    """The last part of the name of an attempt's cgroup; without an attempt, its beginning for all of them."""
    return f"{zlib.crc32(os.fsencode(trial_dir)):08x}-{trial_dir.name[-40:]}-{attempt[:12]}"


def clear_attempts(trial_dir: Path, attempt: str = "") -> None:
    """Kill what is left of this trial on this host; with `attempt`, of it only, because the next may already run."""
    kill_marked(trial_dir, attempt=attempt)
    name = group_name(trial_dir, attempt)
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
