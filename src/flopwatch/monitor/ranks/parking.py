"""What becomes of a thread that is inside torch when the process ends.

Before Python 3.14, a thread that returns to an interpreter that is shutting down is ended by `pthread_exit`. C++
answers that with `std::terminate`, so the whole process would abort after a training that went well. Python 3.14 lets
such a thread pause forever (https://github.com/python/cpython/pull/105805); `park` does the same for older versions.
"""

import ctypes
import signal
import sys
import threading
from pathlib import Path


def park(thread: threading.Thread) -> bool:
    """Have a thread that waits in the kernel stay there until the process is gone; True when it will.

    To be called at the very end, from a thread that holds the interpreter's lock, so that the other one does not.
    """
    if sys.version_info >= (3, 14) or thread.ident is None or not _is_asleep(thread):
        return False
    number = _signal_that_pauses()
    if number is None:
        return False
    signal.pthread_kill(thread.ident, number)
    return True


def _is_asleep(thread: threading.Thread) -> bool:
    """One that runs might hold a lock that the end of the process needs, such as malloc's."""
    try:
        stat = Path(f"/proc/self/task/{thread.native_id}/stat").read_text()
    except OSError:  # not Linux, or the thread has just ended
        return False
    return stat.rpartition(")")[2].split()[0] == "S"


def _signal_that_pauses() -> int | None:
    """A signal nobody uses, with libc's `pause` for its handler: no Python, which the thread could not run."""
    libc = ctypes.CDLL(None)
    libc.signal.restype, libc.signal.argtypes = ctypes.c_void_p, [ctypes.c_int, ctypes.c_void_p]
    for number in range(signal.SIGRTMAX, signal.SIGRTMIN - 1, -1):
        before = libc.signal(number, ctypes.cast(libc.pause, ctypes.c_void_p))
        if before is None:  # SIG_DFL
            return number
        libc.signal(number, before)
    return None
