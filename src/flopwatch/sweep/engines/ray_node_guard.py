"""Stands between a Ray worker and a node's agent: `python -I -S ray_node_guard.py PARENT_PID COMMAND...`.

When Ray ends a worker it sends SIGKILL to the worker's children (measured, ray 2.60), which would take the agent before
it can kill the processes of its node. The guard takes that SIGKILL; the agent, watching its parent, gets a SIGTERM.
Standard library only and no import of flopwatch: it starts in 20 ms.
"""

import ctypes
import os
import signal
import subprocess
import sys

_PR_SET_PDEATHSIG = 1


def main(parent: int, command: list[str]) -> int:
    agent = subprocess.Popen(command, env={**os.environ, "FLOPWATCH_PARENT_PID": str(os.getpid())})

    def tell(number: int, frame: object) -> None:
        agent.terminate()

    signal.signal(signal.SIGTERM, tell)
    signal.signal(signal.SIGINT, tell)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:  # it died before the line above
        agent.terminate()
    status = agent.wait()
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
