"""Cleans up after a supervisor that is killed or stuck: `python -I -S trial_guard.py SUPERVISOR_PID PIPE SWEEP NAME`.

The process that an engine starts becomes this guard, and the supervisor is its child (see `become_guarded`). The guard
forwards signals to the supervisor, and every process of the trial that loses its parent becomes a child of the guard.
If the supervisor is killed, or writes nothing to the pipe for longer than allowed, the guard kills all processes of the
trial and exits only after that. So an engine never sees the end of a trial while one of its processes still runs.

If the guard itself is killed, the kernel sends SIGTERM to the supervisor, which then ends the trial. This
happens with Ray, which sends SIGKILL to the children of its workers (seen with Ray 2.60).

The guard imports only the standard library, not flopwatch, so that it starts in 20 ms and uses 6 MB.
"""

import os
import select
import signal
import sys
import time

_POLL_SECONDS = 1.0  # time between two checks whether the supervisor has been silent for too long


def main(supervisor: int, pipe: int, trial: list[str]) -> None:
    forwarded = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

    def forward(number: int, frame: object) -> None:
        # No other process can get the supervisor's pid yet, because waitpid is called after these handlers are removed.
        os.kill(supervisor, signal.SIGTERM)

    for number in forwarded:
        signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, forwarded)
    silence = _wait(supervisor, pipe)
    for number in forwarded:
        signal.signal(number, signal.SIG_IGN)
    status = os.waitstatus_to_exitcode(os.waitpid(supervisor, 0)[1])
    if status == 0:
        os._exit(0)
    # Use exec, so that the trial's processes stay children of this process.
    clear = ["-m", "flopwatch.sweep.supervisor.leftovers", *trial, str(supervisor), str(status), silence]
    os.execv(sys.executable, [sys.executable, *clear])


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


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
