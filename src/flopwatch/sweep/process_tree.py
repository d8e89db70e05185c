"""Processes of a trial: found and killed, those that left the session or lost their parent too.

Linux tells everything through /proc and prctl; elsewhere only the process group is known.
"""

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

TRIAL_MARK = "FLOPWATCH_TRIAL_DIR"
"""Environment variable every process of a trial inherits; tells whose an orphan is."""

ATTEMPT_MARK = "FLOPWATCH_TRIAL_ATTEMPT"
"""Another one, so that the guard of an earlier attempt leaves a later one alone."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_IS_LINUX = sys.platform == "linux"


def die_with_parent(signal_number: int) -> None:
    """Have the kernel send us this signal when the thread that started us ends."""
    _prctl(_PR_SET_PDEATHSIG, signal_number)


def dies_with(parent: int) -> Callable[[], None]:
    """For a child, before it becomes another program: it never outlives the process that starts it."""

    def bind() -> None:
        die_with_parent(signal.SIGKILL)
        if os.getppid() != parent:  # it died before the line above
            os._exit(1)

    return bind


def adopt_orphans() -> None:
    """Become the parent of every descendant that loses its own: what called `setsid` stays in reach."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if _IS_LINUX:
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def descendants(pid: int) -> list[int]:
    """Children, their children, and so on; zombies are left out."""
    children: dict[int, list[int]] = {}
    for process, parent, state in _all_processes():
        if state != "Z":
            children.setdefault(parent, []).append(process)
    found, queue = [], [pid]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


def is_running(pid: int) -> bool:
    """True unless it is gone or a zombie."""
    if not _IS_LINUX:
        with contextlib.suppress(OSError):
            os.kill(pid, 0)
            return True
        return False
    entry = _read_stat(pid)
    return entry is not None and entry[2] != "Z"


def marked_processes(trial_dir: Path, attempt: str = "") -> list[int]:
    """Every process that carries this trial's mark, whoever is its parent; with an attempt, of that attempt only."""
    marks = {os.fsencode(f"{TRIAL_MARK}={trial_dir}")}
    if attempt:
        marks.add(f"{ATTEMPT_MARK}={attempt}".encode())
    found = []
    for entry in _process_entries():
        with contextlib.suppress(OSError):
            content = (entry / "environ").read_bytes()
            if marks <= set(content.split(b"\0")):
                found.append(int(entry.name))
    # A shell may have the variable from somebody who looked into a trial, and may have started us.
    spared = _own_line()
    return [pid for pid in found if pid not in spared]


def _own_line() -> set[int]:
    """Our own process, its parent, and so on."""
    line, pid = set(), os.getpid()
    while pid > 0 and pid not in line:
        line.add(pid)
        entry = _read_stat(pid)
        pid = entry[1] if entry is not None else 0
    return line


def kill_descendants(pid: int, patience_seconds: float = 10.0) -> list[int]:
    """SIGKILL everything below, again until nothing is left; returns what would not go (stuck in the kernel)."""
    return _kill_until_gone(lambda: descendants(pid), patience_seconds)


def kill_marked(trial_dir: Path, patience_seconds: float = 10.0, attempt: str = "") -> list[int]:
    """SIGKILL every process that carries the trial's mark; returns what would not go."""
    return _kill_until_gone(lambda: marked_processes(trial_dir, attempt), patience_seconds)


def _kill_until_gone(find: Callable[[], list[int]], patience_seconds: float) -> list[int]:
    deadline = time.monotonic() + patience_seconds
    while left := find():
        for process in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        reap_children()
        if time.monotonic() > deadline:
            return list(left)
        time.sleep(0.002)
    return []


def reap_children() -> None:
    """Take the exit status of adopted orphans, so that no zombie stays."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _all_processes() -> list[tuple[int, int, str]]:
    names = os.listdir("/proc") if _IS_LINUX else []
    found = (_read_stat(int(name)) for name in names if name.isdigit())
    return [entry for entry in found if entry is not None]


def _process_entries() -> list[Path]:
    if not _IS_LINUX:
        return []
    return [entry for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _read_stat(pid: int) -> tuple[int, int, str] | None:
    """Process, parent, state. The name stands in brackets and may hold anything, so the last bracket counts."""
    try:
        state, parent = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()[:2]
    except (OSError, ValueError):
        return None
    return pid, int(parent), state.decode()


def _read(path: str) -> bytes:
    """A small file of the kernel's, five times quicker than through pathlib."""
    handle = os.open(path, os.O_RDONLY)
    try:
        return os.read(handle, 4096)
    finally:
        os.close(handle)
