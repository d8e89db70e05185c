"""What a trial's earlier life left on this host: processes that carry its mark, and its cgroup. Killed and removed.

A supervisor calls it before it starts its worker, under every engine. The guard of a killed supervisor runs it as
`python -m flopwatch.sweep.supervisor.leftovers SWEEP NAME SUPERVISOR_PID STATUS REASON`.
"""

import contextlib
import os
import resource
import signal
import sys
import time
import zlib
from pathlib import Path

from flopwatch.records.reading import read_json
from flopwatch.records.trial_files import trial_folder, write_json
from flopwatch.sweep.claims import STARTED, this_boot
from flopwatch.sweep.host import processes as process_tree
from flopwatch.sweep.host.memory_limit import group_places

# How a supervisor gets its guard: the process that was started becomes the guard, its child goes on as supervisor.


_MOST_FILES = 4096
_GUARD = Path(__file__).with_name("trial_guard.py")


def leave_guard_behind(sweep: Path, name: str) -> int | None:
    """Returns in the child, with the pipe on which the guard listens; None where the system has no such means.

    The child has a session of its own: whoever kills the guard's process group leaves somebody to clean up.
    """
    if sys.platform != "linux":
        return None
    process_tree.adopt_orphans()  # kept when a process becomes another program, not inherited by children
    reads, writes = os.pipe()
    parent = os.getpid()
    # What is sent while the guard's interpreter starts is kept for it.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
    child = os.fork()
    if child:
        os.set_inheritable(reads, True)
        os.closerange(3, reads)  # sockets of the supervisor, which must close when it ends
        os.closerange(reads + 1, _MOST_FILES)
        command = [sys.executable, "-I", "-S", str(_GUARD), str(child), str(reads), str(sweep), name]
        os.execv(sys.executable, command)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    os.close(reads)
    os.setsid()
    process_tree.die_with_parent(signal.SIGTERM)
    if os.getppid() != parent:  # it died before the line above
        os.kill(os.getpid(), signal.SIGTERM)
    os.set_blocking(writes, False)
    return writes


GUARD = "guard.json"
_GROUP_PATIENCE_SECONDS = 5.0


def group_tag(trial_dir: Path) -> str:
    """Names a trial among all trials of this host, in the names of its cgroups."""
    return f"{zlib.crc32(os.fsencode(trial_dir)):08x}-{trial_dir.name[-40:]}"


def group_name(trial_dir: Path, attempt: str) -> str:
    return f"{group_tag(trial_dir)}-{attempt[:12]}"


def clear_earlier_life(trial_dir: Path) -> list[int]:
    """Kill and remove what is left of this trial on this host; returns processes that would not go."""
    stuck = process_tree.kill_marked(trial_dir)
    for folder in _groups(group_tag(trial_dir)):
        _remove_group(folder)
    return stuck


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
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.01)
        else:
            return


def main(sweep: Path, name: str, supervisor: int, status: int, reason: str) -> None:
    """In place of a guard: everything that lost its parent is a child of this process."""
    process_tree.kill_descendants(os.getpid())
    folder = trial_folder(sweep.resolve(), name)
    claimed = read_json(folder / STARTED)
    if isinstance(claimed, dict) and claimed.get("pid") == supervisor and claimed.get("boot") == this_boot():
        _clear_attempt(folder, claimed.get("attempt", ""), reason)
    _leave_like(status)


def _clear_attempt(folder: Path, attempt: str, reason: str) -> None:
    """Of this attempt only: the next one may be running by now."""
    process_tree.kill_marked(folder, attempt=attempt)
    for group in _groups(group_name(folder, attempt)):
        _remove_group(group)
    if reason:
        with contextlib.suppress(OSError):
            write_json(folder / GUARD, {"attempt": attempt, "reason": reason})


def _leave_like(status: int) -> None:
    """Whoever waits for us sees how the supervisor ended."""
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(-status, signal.SIG_DFL) if -status not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -status)
    os._exit(abs(status))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
