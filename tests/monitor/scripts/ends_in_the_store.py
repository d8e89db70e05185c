"""A process that ends while its rank's thread waits for an answer of the store, which breaks off at the worst moment.

python ends_in_the_store.py forgotten|finished
"""

import os
import signal
import subprocess
import sys
import time

import torch.distributed as dist

from flopwatch.monitor.ranks.exchange import RankLink
from flopwatch.monitor.ranks.job_store import RunKey

STORE = """
import time
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(600)
"""


class BreaksOff:
    """Its end comes when the interpreter is being taken down, and that of the store with it."""

    def __init__(self, pid: int) -> None:
        self.end = os.kill, pid, signal.SIGKILL, time.sleep

    def __del__(self) -> None:
        kill, pid, number, sleep = self.end
        kill(pid, number)
        sleep(0.5)


def main(ending: str) -> None:
    host = subprocess.Popen([sys.executable, "-c", STORE], stdout=subprocess.PIPE, text=True)
    assert host.stdout is not None
    store = dist.TCPStore("127.0.0.1", int(host.stdout.readline()), is_master=False)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    link = RankLink(RunKey(logging_rank=0, number=1, log="test"), rank=1, world_size=2)
    time.sleep(0.5)
    host.send_signal(signal.SIGSTOP)
    time.sleep(1.0)  # by now it looks for the plan
    assert not link.is_over
    if ending == "finished":
        assert not link.finish(0.1)
    sys.modules["breaks_off"] = BreaksOff(host.pid)  # type: ignore[assignment]
    sys.stdout.write("the end\n")


if __name__ == "__main__":
    main(sys.argv[1])
