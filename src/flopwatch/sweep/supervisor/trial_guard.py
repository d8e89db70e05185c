"""What a supervisor's first process becomes: `python -I -S trial_guard.py SUPERVISOR_PID PIPE SWEEP NAME`.

The supervisor is its child. The guard hands signals on, and whatever loses its parent below it becomes its own child.
When the supervisor is killed, or has been silent on the pipe for longer than it may, the guard kills the trial's whole
tree, in whatever session it is, and only then ends: so no engine hears of an end while something still runs. When the
guard itself is killed (Ray sends SIGKILL to the children of its workers, measured with ray 2.60), the supervisor gets
a SIGTERM from the kernel and ends the trial in order.
Standard library only and no import of flopwatch: it starts in 20 ms and holds 6 MB.
"""

import os
import select
import signal
import sys
import time

_LOOK_SECONDS = 1.0
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main(supervisor: int, pipe: int, trial: list[str]) -> None:
    def hand_on(number: int, frame: object) -> None:
        os.kill(supervisor, signal.SIGTERM)  # it is not reaped before these are ignored: the number is its own

    for number in _FORWARDED:
        signal.signal(number, hand_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
    silence = _wait(supervisor, pipe)
    for number in _FORWARDED:
        signal.signal(number, signal.SIG_IGN)
    status = os.waitstatus_to_exitcode(os.waitpid(supervisor, 0)[1])
    if status == 0:
        os._exit(0)
    # The same process goes on as another program, so that the orphans stay its children.
    clear = ["-m", "flopwatch.sweep.supervisor.leftovers", *trial, str(supervisor), str(status), silence]
    os.execv(sys.executable, [sys.executable, *clear])


def _wait(supervisor: int, pipe: int) -> str:
    """Until the supervisor has closed its end, which is when it ended. Returns why it was killed, or nothing."""
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    allowed: float | None = None
    heard, told = _now(), b""
    while True:
        if poll.poll(_LOOK_SECONDS * 1000):
            read = os.read(pipe, 4096)
            if not read:
                return ""
            heard = _now()
            if allowed is None:
                told += read
                allowed = _first_line(told)
        elif allowed is not None and _now() - heard > allowed:
            os.kill(supervisor, signal.SIGKILL)
            return f"its supervisor had not moved for {_now() - heard:.0f} s (stopped, or its file system hangs)"


def _first_line(told: bytes) -> float | None:
    """The supervisor begins with the seconds it may be silent."""
    return float(told.split(b"\n")[0]) if b"\n" in told else None


def _now() -> float:
    return time.monotonic()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
