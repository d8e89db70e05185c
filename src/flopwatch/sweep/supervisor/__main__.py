"""Runs one trial of a sweep: `python -m flopwatch.sweep.supervisor SWEEP_FOLDER NAME [ATTEMPT]`.

With ATTEMPT it runs that attempt or nothing: a supervisor that starts after the trial was placed again exits.
"""

import os
import signal
import sys
from pathlib import Path
from typing import TextIO

from flopwatch.sweep.attempts import prepare_after_requeue
from flopwatch.sweep.host.processes import CORES, PARENT, adopt_orphans, die_with_parent
from flopwatch.sweep.supervisor.build_result import signal_name
from flopwatch.sweep.supervisor.supervise import AlreadyStartedError, UnusableSpecError, supervise

_MOST_FILES = 4096
_GUARD = Path(__file__).with_name("trial_guard.py")


def main(arguments: list[str], errors: TextIO = sys.stderr) -> int:
    sweep, name = Path(arguments[0]), arguments[1]
    attempt = arguments[2] if len(arguments) > 2 else None
    die_with_parent(signal.SIGTERM)
    expected = os.environ.get(PARENT)
    if expected is not None and os.getppid() != int(expected):
        return 1  # the engine that started us died before the line above
    guard = _become_guarded(sweep, name)
    stop: list[str] = []

    def note(number: int, frame: object) -> None:
        stop.append(f"the supervisor was told to stop ({signal_name(number)}): its runner or its job ended")

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, note)
    if cores := os.environ.get(CORES):
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    if not prepare_after_requeue(sweep.resolve(), name):
        return 0
    try:
        supervise(sweep, name, cancel=lambda: stop[0] if stop else None, attempt=attempt, guard=guard)
    except AlreadyStartedError as error:
        errors.write(f"flopwatch: {error}; nothing was run\n")
    except UnusableSpecError as error:
        errors.write(f"flopwatch: {error}; nothing was run\n")
        return 1
    return 0


def _become_guarded(sweep: Path, name: str) -> int | None:
    """Fork: this process becomes the guard (`trial_guard.py`), the child returns and continues as the supervisor.

    Returns the pipe on which the guard listens; None on systems without subreapers. The child gets a session of its
    own, so that killing the guard's process group leaves the supervisor alive to clean up.
    """
    if sys.platform != "linux":
        return None
    adopt_orphans()  # survives exec, is not inherited by children
    reads, writes = os.pipe()
    parent = os.getpid()
    # Blocked signals stay pending until the guard's interpreter has started and handles them.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
    child = os.fork()
    if child:
        os.set_inheritable(reads, True)
        os.closerange(3, reads)  # the supervisor's sockets must close when the supervisor exits
        os.closerange(reads + 1, _MOST_FILES)
        command = [sys.executable, "-I", "-S", str(_GUARD), str(child), str(reads), str(sweep), name]
        os.execv(sys.executable, command)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    os.close(reads)
    os.setsid()
    die_with_parent(signal.SIGTERM)
    if os.getppid() != parent:  # the guard died before the line above
        os.kill(os.getpid(), signal.SIGTERM)
    os.set_blocking(writes, False)
    return writes


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
