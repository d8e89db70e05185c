"""Runs torchrun on one node of a trial with several processes.

`python -m flopwatch.sweep.supervisor.node_agent TRIAL_DIR NODE HOST[,HOST]:PORT`

The agent keeps a connection to the trial's supervisor. Over it, the agent receives the port at which the ranks connect
to each other, and reports how the ranks of its node ended. If the connection is closed, the agent kills all processes
of the trial on this node. So, with every engine, no process of a trial outlives the supervisor.
"""

import contextlib
import json
import os
import queue
import signal
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from flopwatch.decode import read_or_none
from flopwatch.files import read_json
from flopwatch.process import descendants
from flopwatch.records.trial import AFTER_THE_STEPS, TrialJob
from flopwatch.records.trial_files import HEARTBEAT, SPEC, STACKS, exception_file, of_rank
from flopwatch.sweep.host import processes as process_tree
from flopwatch.sweep.host.memory import HostPeak, TreeMemory, limit_memory
from flopwatch.sweep.host.processes import PARENT
from flopwatch.sweep.progress import read_progress
from flopwatch.sweep.supervisor.guard import become_guarded
from flopwatch.sweep.supervisor.job_nodes import TOKEN, Message, encoded, keep_alive

_TICK_SECONDS = 0.2  # time between two samples of the memory, the same as in `supervise.py`


class NodeMemory:
    """Samples the host memory of this node's ranks in a thread, and kills the ranks if they exceed their limit.

    On the first node the supervisor does this. `rank` is the node's first rank; the trial's phase is read from its
    heartbeat file. `limit_bytes` is for all processes of the node together; None means no limit.
    """

    def __init__(self, trial_dir: Path, rank: int, limit_bytes: int | None) -> None:
        self._trial_dir, self._file, self._limit_bytes = trial_dir, of_rank(HEARTBEAT, rank), limit_bytes
        self._memory = TreeMemory(limit_bytes)
        self._steps_peak = HostPeak()
        self.over_limit: dict[str, Any] | None = None

    def start(self) -> None:
        threading.Thread(target=self._sample, daemon=True).start()

    def _sample(self) -> None:
        while self.over_limit is None:
            time.sleep(_TICK_SECONDS)
            self._memory.sample()
            if read_progress(self._trial_dir, self._file).phase not in AFTER_THE_STEPS:
                self._steps_peak = self._memory.peak
            if held := self._memory.over_limit_bytes():
                self.over_limit = self._exception(held)
                process_tree.kill_descendants(os.getpid())

    def _exception(self, held: int) -> dict[str, Any]:
        most = (self._limit_bytes or 0) / 2**20
        message = f"the processes on this node used {held / 2**20:,.0f} MiB together; the limit is {most:,.0f} MiB"
        return {"type": "HostLimitError", "message": message, "outcome": "oom_host", "unix_time": time.time()}

    def report(self) -> dict[str, Any]:
        return {"host_bytes": self._steps_peak.bytes, "host_method": self._steps_peak.method}


_CONNECT_SECONDS = 120.0  # A shared file system or name server may be slow right after a node starts.


class _Supervisor:
    def __init__(self, hosts: list[str], port: int) -> None:
        self.host, self._socket = _connected(hosts, port)
        self.begins: queue.Queue[int] = queue.Queue()

    def send(self, message: Message) -> None:
        with contextlib.suppress(OSError):  # if the supervisor has ended, the thread that runs `obey` ends this process
            self._socket.sendall(encoded(message))

    def obey(self, agent: "_Agent") -> None:
        """Execute the supervisor's messages until the connection is closed, then end this process.

        Call it in a thread, because torchrun needs the main thread for its signal handlers.
        """
        with contextlib.suppress(OSError, ValueError):
            for line in self._socket.makefile("rb"):
                message = json.loads(line)
                if "begin" in message:
                    self.begins.put(message["begin"])
                elif "stacks" in message:
                    self.send({"stacks": agent.stacks()})
                elif "end" in message:
                    break
        process_tree.kill_descendants(os.getpid())
        os._exit(1)


class _Agent:
    def __init__(self, trial_dir: Path, node: int) -> None:
        self._trial_dir, self._node = trial_dir, node
        job = _job(trial_dir)
        self.spec, self.attempt = job.spec, job.attempt
        self._ranks = range(node * self.spec.processes, (node + 1) * self.spec.processes)
        self.memory = NodeMemory(trial_dir, self._ranks[0], self.spec.limits.memory_bytes)

    def torchrun(self, master: str, port: int) -> Message:
        from torch.distributed import run
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

        with tempfile.TemporaryDirectory(prefix="flopwatch-torchrun-") as folder:
            try:
                run.run(run.parse_args(self._arguments(master, port, folder)))
            except ChildFailedError as error:
                return self._failures({rank: failure.exitcode for rank, failure in error.failures.items()})
            except SignalException as error:
                return {"code": 128 + error.sigval, "ranks": {}}
            except Exception as error:  # such as a failed rendezvous
                return {"code": 1, "ranks": {}, "error": f"{type(error).__name__}: {error}"[:2000]}
        return {"code": 0, "ranks": {}}

    def _arguments(self, master: str, port: int, folder: str) -> list[str]:
        return [
            *(f"--nnodes={self.spec.nodes}", f"--nproc-per-node={self.spec.processes}", f"--node-rank={self._node}"),
            *(f"--master-addr={master}", f"--master-port={port}", "--max-restarts=0", f"--log-dir={folder}"),
            *("-m", "flopwatch.sweep.worker.main", str(self._trial_dir), "--rank"),
        ]

    def _failures(self, statuses: dict[int, int]) -> Message:
        exceptions = {rank: read_json(self._trial_dir / exception_file(rank)) for rank in self._ranks}
        if self.memory.over_limit is not None:
            exceptions[self._ranks[0]] = self.memory.over_limit
        ranks = {
            rank: {"status": statuses.get(rank, 0), "exception": exceptions[rank]}
            for rank in self._ranks
            if rank in statuses or exceptions[rank] is not None
        }
        return {"code": 1, "ranks": ranks}

    def stacks(self) -> dict[int, str]:
        """Return the Python stacks of all threads of each rank on this node, which faulthandler writes on SIGUSR1."""
        for pid in descendants(os.getpid()):
            # Without a handler, the signal would end the process.
            if process_tree.is_in_signal_set(pid, "SigCgt", signal.SIGUSR1):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGUSR1)
        files = [self._trial_dir / of_rank(STACKS, rank) for rank in self._ranks]
        texts = dict(zip(self._ranks, process_tree.written_texts(files), strict=True))
        return {rank: text for rank, text in texts.items() if text}


def main(trial_dir: Path, node: int, hosts: list[str], port: int) -> int:
    if PARENT in os.environ:  # a Ray task started this agent
        if not process_tree.ends_with_parent(signal.SIGTERM):
            return 1
        become_guarded(trial_dir)
    process_tree.adopt_orphans()
    agent, supervisor = _Agent(trial_dir, node), _Supervisor(hosts, port)
    supervisor.send({"token": os.environ.pop(TOKEN), "node": node, "host": _host()})
    threading.Thread(target=supervisor.obey, args=[agent], daemon=True).start()
    limit = limit_memory(agent.spec.limits.memory_bytes if node else None, trial_dir.name[-40:])
    if node:  # on the first node (0) the supervisor limits and samples memory
        limit.join()
        agent.memory.start()
    os.environ |= {process_tree.TRIAL_MARK: str(trial_dir), process_tree.ATTEMPT_MARK: agent.attempt}
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(process_tree.usable_cores()) // agent.spec.processes)))

    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    # This store listens at a free port. torchrun runs in this process too and uses the same store (multi_tenant).
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, multi_tenant=True) if node == 0 else None
    supervisor.send({"port": store.port if store else None})
    ended = agent.torchrun("127.0.0.1" if node == 0 else supervisor.host, supervisor.begins.get())
    supervisor.send({"ended": {**ended, "oom_kills": limit.oom_kills(), **agent.memory.report()}})
    process_tree.kill_descendants(os.getpid())
    limit.close()
    return int(ended["code"])


def _job(trial_dir: Path) -> TrialJob:
    """Read `spec.json`. Wait for the file first, because a shared file system may show it late on this host."""
    deadline = time.monotonic() + _CONNECT_SECONDS
    while (job := read_or_none(TrialJob, read_json(trial_dir / SPEC))) is None:
        if time.monotonic() > deadline:
            raise FileNotFoundError(
                f"{trial_dir / SPEC} is not visible on {_host()}; use a folder that all nodes share"
            )
        time.sleep(0.2)
    return job


def _connected(hosts: list[str], port: int) -> tuple[str, socket.socket]:
    """Connect by the first name that works, because on some clusters not every name resolves on every node."""
    deadline = time.monotonic() + _CONNECT_SECONDS
    while True:
        for host in hosts:
            with contextlib.suppress(OSError):
                found = socket.create_connection((host, port), timeout=10)
                found.settimeout(None)
                keep_alive(found)
                return host, found
        if time.monotonic() > deadline:
            where = f"{', '.join(hosts)}, port {port}"
            raise ConnectionError(f"cannot reach the supervisor at {where}; check the network between the nodes")
        time.sleep(0.2)


def _host() -> str:
    """Return the host's name, but under Slurm the name of the node, so that a later attempt can exclude the node."""
    return os.environ.get("SLURMD_NODENAME") or os.uname().nodename


if __name__ == "__main__":
    # srun starts the agents of all nodes but the first, so its process 0 is node 1.
    _node = 1 + int(os.environ["SLURM_PROCID"]) if sys.argv[2] == "slurm" else int(sys.argv[2])
    _names, _, _port = sys.argv[3].rpartition(":")
    _hosts = [*_names.split(","), *filter(None, [os.environ.get("SLURM_LAUNCH_NODE_IPADDR")])]
    _status = main(Path(sys.argv[1]), _node, _hosts, int(_port))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(_status)
