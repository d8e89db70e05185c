"""Guards a supervisor: `python -I -S trial_guard.py SUPERVISOR_PID PIPE SWEEP NAME`.

The process that an engine starts becomes the guard, and the supervisor is its child (`__main__.py`). The guard forwards
signals, and adopts every process of the trial that loses its parent. When the supervisor is killed, or silent on the
pipe for longer than allowed, the guard kills the trial's whole tree, in every session, and only then exits: so no
engine sees the end of a trial while one of its processes still runs. When the guard itself is killed (Ray sends SIGKILL
to the children of its workers, seen with ray 2.60), the kernel sends the supervisor SIGTERM, and it ends the trial.
Standard library only, without flopwatch: it starts in 20 ms and holds 6 MB.
"""

import os
import select
import signal
import sys
import time

_POLL_SECONDS = 1.0  # how late a silent supervisor may be noticed
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main(supervisor: int, pipe: int, trial: list[str]) -> None:
    def forward(number: int, frame: object) -> None:
        os.kill(supervisor, signal.SIGTERM)  # safe: the pid is reaped only after these handlers are removed

    for number in _FORWARDED:
        signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
    silence = _wait(supervisor, pipe)
    for number in _FORWARDED:
        signal.signal(number, signal.SIG_IGN)
    status = os.waitstatus_to_exitcode(os.waitpid(supervisor, 0)[1])
    if status == 0:
        os._exit(0)
    # exec, not a child: the adopted orphans must stay children of this process.
    clear = ["-m", "flopwatch.sweep.supervisor.leftovers", *trial, str(supervisor), str(status), silence]
    os.execv(sys.executable, [sys.executable, *clear])


def _wait(supervisor: int, pipe: int) -> str:
    """Wait until the supervisor's end of the pipe closes. Returns why we killed it, or an empty text."""
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    allowed: float | None = None
    heard, received = _now(), b""
    while True:
        if poll.poll(_POLL_SECONDS * 1000):
            read = os.read(pipe, 4096)
            if not read:
                return ""
            heard = _now()
            if allowed is None:
                received += read
                allowed = _first_line(received)
        elif allowed is not None and _now() - heard > allowed:
            os.kill(supervisor, signal.SIGKILL)
            return f"its supervisor did not respond for {_now() - heard:.0f} s (stopped, or its file system hangs)"


def _first_line(received: bytes) -> float | None:
    """The supervisor first writes the seconds it may be silent."""
    return float(received.split(b"\n")[0]) if b"\n" in received else None


def _now() -> float:
    return time.monotonic()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
