"""Clears what an attempt of a trial left on this host: processes and cgroups of a supervisor that was killed or stuck.

The process that an engine starts becomes the guard of its trial, and the supervisor is its child (`become_guarded`).
The guard forwards signals to the supervisor, and every process of the trial that loses its parent becomes a child of
the guard. If the supervisor is killed, or writes nothing to their pipe for longer than allowed, the guard kills all
processes of the trial and exits only after that. So an engine never sees the end of a trial while one of its processes
still runs. A supervisor also clears what earlier attempts left, before it starts its worker.

If the guard itself is killed, the kernel sends SIGTERM to the supervisor, which then ends the trial. This happens with
Ray, which sends SIGKILL to the children of its workers (seen with Ray 2.60).
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
    def forward(number: int, frame: object) -> None:
        # No other process can get the supervisor's pid yet, because waitpid is called after these handlers are removed.
        os.kill(supervisor, signal.SIGTERM)

    for number in _FORWARDED:
        signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
    why_killed = _wait(supervisor, pipe)
    for number in _FORWARDED:
        signal.signal(number, signal.SIG_IGN)
    status = os.waitstatus_to_exitcode(os.waitpid(supervisor, 0)[1])
    if status:
        kill_descendants(os.getpid())
        claimed = read_object(trial_dir / STARTED)
        if claimed.get("pid") == supervisor and claimed.get("boot_id") == pid_scope().get("boot_id", ""):
            _clear_attempt(trial_dir, claimed.get("attempt", ""), why_killed)
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


def _clear_attempt(folder: Path, attempt: str, reason: str) -> None:
    """Kill the remaining processes of this attempt, but none of the next attempt, which may already be running."""
    kill_marked(folder, attempt=attempt)
    for group in _groups(group_name(folder, attempt)):
        _remove_group(group)
    if reason:
        with contextlib.suppress(OSError):
            write_json(folder / GUARD, {"attempt": attempt, "reason": reason})


def group_tag(trial_dir: Path) -> str:
    return f"{zlib.crc32(os.fsencode(trial_dir)):08x}-{trial_dir.name[-40:]}"


def group_name(trial_dir: Path, attempt: str) -> str:
    return f"{group_tag(trial_dir)}-{attempt[:12]}"


def clear_earlier_attempts(trial_dir: Path) -> list[int]:
    unkillable = kill_marked(trial_dir)
    for folder in _groups(group_tag(trial_dir)):
        _remove_group(folder)
    return unkillable


def _groups(tag: str) -> list[Path]:
    found = []
    for place in group_places():
        with contextlib.suppress(OSError):
            found += [place / name for name in os.listdir(place) if name.startswith("flopwatch-") and tag in name]
    return found


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
