"""Runs between a Ray worker and a supervisor's guard, or a node's agent: `ray_guard.py PARENT_PID COMMAND...`.

When Ray ends a worker, it sends SIGKILL to the worker's children (measured with Ray 2.60). If the guard or the agent
were such a child, the processes they started would stay behind. This process takes the SIGKILL instead, and its child,
which watches its parent, gets SIGTERM. Started with `python -I -S`: standard library only, without flopwatch, in 20 ms.
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
    if os.getppid() != parent:  # the parent died before prctl
        child.terminate()
    status = child.wait()
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
