"""Runs torchrun on one node of a trial.

`python -m flopwatch.sweep.supervisor.node_agent TRIAL_DIR NODE HOST[,HOST]:PORT`

It keeps a connection to the trial's supervisor: the nodes find each other over it, and this node reports over it how
its processes ended. When the connection closes, because the supervisor closed it or its host failed, the agent kills
every process here. So no process of a trial outlives its supervisor, whichever engine placed the nodes.
"""

import contextlib
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

from flopwatch.records.trial import TrialSpec
from flopwatch.records.trial_files import read_json
from flopwatch.sweep.claims import FILE, read_progress
from flopwatch.sweep.host import processes as process_tree
from flopwatch.sweep.host.memory_limit import limit_memory
from flopwatch.sweep.host.processes import PARENT, STACKS
from flopwatch.sweep.host.tree_memory import HostPeak, TreeMemory
from flopwatch.sweep.supervisor.classify import exception_file
from flopwatch.sweep.supervisor.job_nodes import TOKEN, Message, keep_alive, read_lines_of, written
from flopwatch.sweep.supervisor.measurements import AFTER_THE_STEPS, of_rank

# Host memory of the processes on a further node of a trial, followed as the supervisor follows those on its own.


_TICK_SECONDS = 0.2


class NodeMemory:
    """Looks several times a second, in a thread beside torchrun, and ends processes that hold more than they may.

    Args:
        trial_dir: The trial's folder.
        rank: The first process of this node, whose heartbeat says where the trial is.
        limit_bytes: What the node's processes may hold together; None is no limit.
    """

    def __init__(self, trial_dir: Path, rank: int, limit_bytes: int | None) -> None:
        self._trial_dir, self._file, self._limit_bytes = trial_dir, of_rank(FILE, rank), limit_bytes
        self._memory = TreeMemory(limit_bytes)
        self._steps_peak = HostPeak()
        self.over_limit: dict[str, Any] | None = None

    def start(self) -> None:
        threading.Thread(target=self._follow, daemon=True).start()

    def _follow(self) -> None:
        while self.over_limit is None:
            time.sleep(_TICK_SECONDS)
            self._memory.look()
            if read_progress(self._trial_dir, self._file).phase not in AFTER_THE_STEPS:
                self._steps_peak = self._memory.peak
            if held := self._memory.over_limit_bytes():
                self.over_limit = self._told(held)
                process_tree.kill_descendants(os.getpid())

    def _told(self, held: int) -> dict[str, Any]:
        most = (self._limit_bytes or 0) / 2**20
        said = f"its processes held {held / 2**20:,.0f} MiB together, its limit is {most:,.0f} MiB"
        return {"type": "HostLimitError", "message": said, "outcome": "oom_host", "unix_time": time.time()}

    def report(self) -> dict[str, Any]:
        return {"host_bytes": self._steps_peak.bytes, "host_method": self._steps_peak.method}


_CONNECT_SECONDS = 120.0
_STACKS_SECONDS = 2.0
_STACKS_LENGTH = 20_000


class _Supervisor:
    """The connection to it."""

    def __init__(self, hosts: list[str], port: int) -> None:
        self.host, self._socket = _connected(hosts, port)
        self.begins: queue.Queue[int] = queue.Queue()

    def tell(self, message: Message) -> None:
        with contextlib.suppress(OSError):  # it is gone, and the thread below ends us
            self._socket.sendall(written(message))

    def obey(self, agent: "_Agent") -> None:
        """In a thread: the main one belongs to torchrun."""
        for message in read_lines_of(self._socket):
            if "begin" in message:
                self.begins.put(message["begin"])
            elif "stacks" in message:
                self.tell({"stacks": agent.stacks()})
            elif "end" in message:
                break
        process_tree.kill_descendants(os.getpid())
        os._exit(1)


class _Agent:
    def __init__(self, trial_dir: Path, node: int) -> None:
        self._trial_dir, self._node = trial_dir, node
        job = _job(trial_dir)
        self.spec, self.attempt = TrialSpec.from_json(job["spec"]), str(job.get("attempt", ""))
        self._ranks = range(node * self.spec.processes, (node + 1) * self.spec.processes)
        self.memory = NodeMemory(trial_dir, self._ranks[0], self.spec.limits.memory_bytes)

    def torchrun(self, master: str, port: int) -> Message:
        """Every process of this node, to the end of all: how they ended."""
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
            except Exception as error:  # the nodes could not meet
                return {"code": 1, "ranks": {}, "error": f"{type(error).__name__}: {error}"[:2000]}
        return {"code": 0, "ranks": {}}

    def _arguments(self, master: str, port: int, folder: str) -> list[str]:
        return [
            *(f"--nnodes={self.spec.nodes}", f"--nproc-per-node={self.spec.processes}", f"--node-rank={self._node}"),
            *(f"--master-addr={master}", f"--master-port={port}", "--max-restarts=0", f"--log-dir={folder}"),
            *("-m", "flopwatch.sweep.worker.main", str(self._trial_dir), "--rank"),
        ]

    def _failures(self, statuses: dict[int, int]) -> Message:
        told = {rank: read_json(self._trial_dir / exception_file(rank)) for rank in self._ranks}
        if self.memory.over_limit is not None:
            told[self._ranks[0]] = self.memory.over_limit
        ranks = {
            rank: {"status": statuses.get(rank, 0), "exception": told[rank]}
            for rank in self._ranks
            if rank in statuses or told[rank] is not None
        }
        return {"code": 1, "ranks": ranks}

    def stacks(self) -> dict[int, str]:
        """What every thread of every process here does, by faulthandler."""
        for pid in process_tree.descendants(os.getpid()):
            if _handles(pid, signal.SIGUSR1):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGUSR1)
        files = {rank: self._trial_dir / of_rank(STACKS, rank) for rank in self._ranks}
        deadline, sizes = time.monotonic() + _STACKS_SECONDS, [-1]
        while time.monotonic() < deadline:
            time.sleep(0.1)
            before, sizes = sizes, [file.stat().st_size if file.exists() else 0 for file in files.values()]
            if before == sizes and all(sizes):  # they have stopped growing
                break
        return {
            rank: file.read_text(errors="replace")[:_STACKS_LENGTH] for rank, file in files.items() if file.exists()
        }


def main(trial_dir: Path, node: int, hosts: list[str], port: int) -> int:
    process_tree.adopt_orphans()
    if PARENT in os.environ:  # a guard, on a node where an engine has placed us
        process_tree.die_with_parent(signal.SIGTERM)
    agent, supervisor = _Agent(trial_dir, node), _Supervisor(hosts, port)
    supervisor.tell({"token": os.environ.pop(TOKEN), "node": node, "host": _host()})
    threading.Thread(target=supervisor.obey, args=[agent], daemon=True).start()
    limit = limit_memory(agent.spec.limits.memory_bytes if node else None, trial_dir.name[-40:])
    if node:  # on the first one the supervisor sees to it
        limit.join()
        agent.memory.start()
    os.environ |= {process_tree.TRIAL_MARK: str(trial_dir), process_tree.ATTEMPT_MARK: agent.attempt}
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // agent.spec.processes)))

    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    # Ranks meet at a port the kernel gives us; torchrun, in this process, uses the same store (multi_tenant).
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, multi_tenant=True) if node == 0 else None
    supervisor.tell({"port": store.port if store else None})
    ended = agent.torchrun("127.0.0.1" if node == 0 else supervisor.host, supervisor.begins.get())
    supervisor.tell({"ended": {**ended, "oom_kills": limit.oom_kills(), **agent.memory.report()}})
    process_tree.kill_descendants(os.getpid())
    limit.close()
    return int(ended["code"])


def _job(trial_dir: Path) -> dict[str, Any]:
    """What `spec.json` holds. On a shared file system the folder may come into sight here later than elsewhere."""
    deadline = time.monotonic() + _CONNECT_SECONDS
    while not isinstance(job := read_json(trial_dir / "spec.json"), dict):
        if time.monotonic() > deadline:
            raise FileNotFoundError(
                f"{trial_dir / 'spec.json'} is not seen on {_host()}; do the nodes share the folder?"
            )
        time.sleep(0.2)
    return job


def _connected(hosts: list[str], port: int) -> tuple[str, socket.socket]:
    """By the first of its names that leads to it: not every cluster's names can be looked up everywhere."""
    deadline = time.monotonic() + _CONNECT_SECONDS
    while True:
        for host in hosts:
            with contextlib.suppress(OSError):
                found = socket.create_connection((host, port), timeout=10)
                found.settimeout(None)
                keep_alive(found)
                return host, found
        if time.monotonic() > deadline:
            raise ConnectionError(f"the trial's supervisor cannot be reached at {', '.join(hosts)}, port {port}")
        time.sleep(0.2)


def _handles(pid: int, number: int) -> bool:
    """Whether a signal would be handled; it would end a process that does not."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        status = Path(f"/proc/{pid}/status").read_text()
        return bool(int(status.split("SigCgt:")[1].split()[0], 16) >> (number - 1) & 1)
    return False


def _host() -> str:
    """As Slurm calls it, where it is Slurm's: a later attempt may have to keep away from it."""
    return os.environ.get("SLURMD_NODENAME") or os.uname().nodename


def _node(text: str, environment: Any = os.environ) -> int:
    """Its number; srun numbers those that come after the first node."""
    return 1 + int(environment["SLURM_PROCID"]) if text == "slurm" else int(text)


def _hosts(text: str, environment: Any = os.environ) -> list[str]:
    told = environment.get("SLURM_LAUNCH_NODE_IPADDR")
    return [*text.split(","), *([told] if told else [])]


if __name__ == "__main__":
    _address, _, _port = sys.argv[3].rpartition(":")
    _status = main(Path(sys.argv[1]), _node(sys.argv[2]), _hosts(_address), int(_port))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(_status)
