"""How a supervisor gets its guard: the process that was started becomes the guard, its child goes on as supervisor."""

import os
import signal
import sys
from pathlib import Path

from flopwatch.sweep import process_tree

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
