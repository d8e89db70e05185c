"""Protects a command from the SIGKILL of Ray: `python -I -S ray_guard.py PARENT_PID COMMAND...`.

When Ray ends a worker, it sends SIGKILL to the worker's child processes (seen with Ray 2.60). If a supervisor were such
a child, the processes of its trial would stay behind. Therefore this process is the Ray worker's child, and the command
is a child of this process. When this process is killed, the command receives SIGTERM and can end its trial.

This script imports only the standard library, not flopwatch, so that it starts in 20 ms.
"""

import ctypes
import os
import signal
import subprocess
import sys

_PR_SET_PDEATHSIG = 1


def main(parent: int, command: list[str]) -> int:
    sockets = [int(os.environ[name]) for name in ("FLOPWATCH_NODE_LISTENER",) if name in os.environ]
    environment = {**os.environ, "FLOPWATCH_PARENT_PID": str(os.getpid())}
    child = subprocess.Popen(command, env=environment, pass_fds=sockets)

    def terminate_child(number: int, frame: object) -> None:
        child.terminate()

    signal.signal(signal.SIGTERM, terminate_child)
    signal.signal(signal.SIGINT, terminate_child)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:  # the parent ended before prctl was called
        child.terminate()
    status = child.wait()
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
