"""Kills the processes and removes the cgroups that an attempt of a trial left on this host.

A supervisor does this for earlier attempts before it starts its worker. The guard (see `trial_guard.py`) does it for
a supervisor that was killed: `python -m flopwatch.sweep.supervisor.leftovers SWEEP NAME SUPERVISOR_PID STATUS REASON`.
"""

import contextlib
import os
import signal
import sys
import time
import zlib
from pathlib import Path

from flopwatch.files import read_object, write_json
from flopwatch.process import pid_scope
from flopwatch.records.trial_files import GUARD, STARTED, trial_folder
from flopwatch.sweep.host.memory import group_places
from flopwatch.sweep.host.processes import adopt_orphans, die_with_parent, kill_descendants, kill_marked

_GROUP_PATIENCE_SECONDS = 5.0  # A killed process stays in its cgroup until the kernel has freed its memory.
_MOST_FILES = 4096  # The guard closes all file descriptors below this number. A supervisor has a few dozen.
_GUARD = Path(__file__).with_name("trial_guard.py")


def become_guarded(sweep: Path, name: str) -> int | None:
    """Fork: this process becomes the guard (`trial_guard.py`) and its child continues as the supervisor.

    The child starts a new session, so that a signal to the guard's process group does not kill the supervisor, which
    must end its trial first.

    Returns:
        The file descriptor of the pipe to the guard; None on systems other than Linux, where no guard is used.
    """
    if sys.platform != "linux":
        return None
    adopt_orphans()  # only for the guard: exec keeps the setting, but the child (supervisor) does not inherit it
    reads, writes = os.pipe()
    parent = os.getpid()
    # Block signals until the guard has installed its handlers.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
    child = os.fork()
    if child:
        os.set_inheritable(reads, True)
        os.closerange(3, reads)  # otherwise the guard process would keep the supervisor's sockets open
        os.closerange(reads + 1, _MOST_FILES)
        command = [sys.executable, "-I", "-S", str(_GUARD), str(child), str(reads), str(sweep), name]
        os.execv(sys.executable, command)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    os.close(reads)
    os.setsid()
    die_with_parent(signal.SIGTERM)
    if os.getppid() != parent:  # the guard process ended before `die_with_parent` was called
        os.kill(os.getpid(), signal.SIGTERM)
    os.set_blocking(writes, False)
    return writes


def group_tag(trial_dir: Path) -> str:
    """Return the part of a cgroup's name that identifies the trial on this host."""
    return f"{zlib.crc32(os.fsencode(trial_dir)):08x}-{trial_dir.name[-40:]}"


def group_name(trial_dir: Path, attempt: str) -> str:
    return f"{group_tag(trial_dir)}-{attempt[:12]}"


def clear_earlier_attempts(trial_dir: Path) -> list[int]:
    """Kill all processes of this trial on this host and remove its cgroups; return the pids that survived SIGKILL."""
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


def main(sweep: Path, name: str, supervisor: int, status: int, reason: str) -> None:
    """Kill the remaining processes of an attempt, then exit with the exit status of its supervisor.

    The guard (`trial_guard.py`) execs this program, so the trial's orphaned processes are children of this process.
    """
    kill_descendants(os.getpid())
    folder = trial_folder(sweep.resolve(), name)
    claimed = read_object(folder / STARTED)
    here = pid_scope().get("boot_id", "")
    if claimed.get("pid") == supervisor and claimed.get("boot_id") == here:
        _clear_attempt(folder, claimed.get("attempt", ""), reason)
    _exit_like(status)


def _clear_attempt(folder: Path, attempt: str, reason: str) -> None:
    """Kill the remaining processes of this attempt, but none of the next attempt, which may already be running."""
    kill_marked(folder, attempt=attempt)
    for group in _groups(group_name(folder, attempt)):
        _remove_group(group)
    if reason:
        with contextlib.suppress(OSError):
            write_json(folder / GUARD, {"attempt": attempt, "reason": reason})


def _exit_like(status: int) -> None:
    """Exit with the supervisor's status, because the engine reads the status of this process, not the supervisor's."""
    if status < 0:
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -status not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(abs(status))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
