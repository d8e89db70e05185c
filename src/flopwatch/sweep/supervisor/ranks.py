"""Trials of several processes: the supervisor's side, and the agents that run torchrun on each node.

`python -m flopwatch.sweep.supervisor.ranks TRIAL_DIR NODE HOST[,HOST]:PORT` runs an agent. The supervisor starts the
agent of the first node; Slurm's srun or Ray tasks start those of the other nodes. Each agent keeps a TCP connection to
the supervisor, over which both send one JSON object per line. From it, the agent receives the port at which the ranks
connect to each other, and it reports how the ranks of its node ended. If the connection is closed, the agent kills all
processes of the trial on its node. So, with every engine, no process of a trial outlives the supervisor.

Only trials of several processes import this module, because importing sockets takes 10 ms. The supervisor's side uses
the standard library only; the agent imports torch when it has connected.
"""

import contextlib
import hmac
import json
import os
import queue
import secrets
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

from flopwatch.decode import read_or_none
from flopwatch.files import read_json
from flopwatch.process import descendants
from flopwatch.records.trial import AFTER_THE_STEPS, TrialJob
from flopwatch.records.trial_files import HEARTBEAT, SPEC, STACKS, exception_file, of_rank
from flopwatch.sweep.host import processes as process_tree
from flopwatch.sweep.host.memory import HostPeak, MemoryLimit, TreeMemory, largest_peak, limit_memory
from flopwatch.sweep.progress import read_progress
from flopwatch.sweep.supervisor.classify import JobEnd, RankEnd, first_cause, is_certain
from flopwatch.sweep.supervisor.guard import become_guarded

TOKEN = "FLOPWATCH_NODE_TOKEN"
"""Environment variable with a secret of the trial. The supervisor closes connections that do not send this secret."""

LISTENER = "FLOPWATCH_NODE_LISTENER"
"""Environment variable with the file descriptor of the listening socket, if the engine has opened it already."""

Message: TypeAlias = dict[str, Any]

_LONGEST_LINE = 4 << 20  # in bytes; the longest messages contain the Python stacks of all ranks of a node
_LONGEST_GREETING = 4096  # A connection that sends more bytes than this without the secret is closed.
_MOST_STRANGERS = 256  # At most this many connections that have not sent the secret are open at once.
_CONNECT_SECONDS = 600.0  # Slurm and Ray may take minutes to start the agents on all nodes.
_REPORTS_SECONDS = 5.0  # The supervisor waits this long for reports of other nodes, which may show an earlier failure.
_EXIT_SECONDS = 12.0  # The supervisor waits this long for the agents to exit. Killing their processes takes up to 10 s.
_STACKS_SECONDS = 5.0  # The supervisor waits this long for Python stacks. An agent needs up to 2 s to collect them.
_SRUN_SECONDS = 5.0  # srun may need this long to notice that its tasks have ended
_REACH_SECONDS = 120.0  # for an agent: a shared file system or name server may be slow right after a node starts
_TICK_SECONDS = 0.2  # time between two samples of a node's memory, the same as in `supervise.py`


def encoded(message: Message) -> bytes:
    return (json.dumps(message) + "\n").encode()


def listener(host: str) -> socket.socket:
    return socket.create_server((host, 0), backlog=128)


def _keep_alive(connection: socket.socket) -> None:
    """Make the kernel close the connection within two minutes if the peer's host fails."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6}.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


@dataclass
class _Peer:
    """A connection to an agent. `told` is all that the agent has sent; empty until it has sent the secret."""

    connection: socket.socket
    buffer: bytes = b""
    told: Message = field(default_factory=dict)
    is_gone: bool = False

    @property
    def ended(self) -> Message | None:
        return self.told.get("ended")

    def send(self, message: Message) -> None:
        with contextlib.suppress(OSError):
            self.connection.sendall(encoded(message))

    def close(self) -> None:
        self.is_gone = True
        self.connection.close()


class JobNodes:
    """Waits until the agents of all nodes have connected, then starts their ranks and collects their reports.

    `processes` are those that the supervisor itself has started: the agent of the first node, and srun under Slurm.
    """

    def __init__(self, nodes: int, environment: Mapping[str, str] = os.environ) -> None:
        self.nodes = nodes
        self.token = environment.get(TOKEN) or secrets.token_hex(16)
        handle = environment.get(LISTENER)
        self._listener = socket.socket(fileno=int(handle)) if handle else listener("" if nodes > 1 else "127.0.0.1")
        self._listener.setblocking(False)
        self.processes: list[subprocess.Popen[bytes]] = []
        self._peers: list[_Peer] = []
        self._made = time.monotonic()
        self._has_begun = False
        self._gone: Message = {}

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def agent_command(self, trial_dir: Path, node: int | str, host: str = "127.0.0.1") -> list[str]:
        address = f"{host}:{self.port}"
        return [sys.executable, "-m", "flopwatch.sweep.supervisor.ranks", str(trial_dir), str(node), address]

    def poll(self, seconds: float = 0.0) -> None:
        """Read the agents' messages. When all agents are ready, send them the port at which their ranks connect."""
        waiting = [self._listener, *(peer.connection for peer in self._peers if not peer.is_gone)]
        ready = select.select(waiting, [], [], seconds)[0]
        if self._listener in ready:
            self._accept()
        for peer in self._peers:
            if peer.connection in ready:
                self._receive(peer)
        agents = self._agents()
        if not self._has_begun and len(agents) == self.nodes and all("port" in peer.told for peer in agents.values()):
            self._has_begun = True
            for peer in agents.values():
                peer.send({"begin": agents[0].told["port"]})
        for srun in self.processes[1:]:
            if srun.poll() and not self._has_begun:
                self.give_up(f"srun exited with code {srun.returncode}; its error message is at the end of the log")

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection = self._listener.accept()[0]
                if sum(not peer.told and not peer.is_gone for peer in self._peers) >= _MOST_STRANGERS:
                    connection.close()
                    continue
                connection.setblocking(False)
                _keep_alive(connection)
                self._peers.append(_Peer(connection))

    def _receive(self, peer: _Peer) -> None:
        try:
            data = peer.connection.recv(1 << 16)
            *lines, peer.buffer = (peer.buffer + data).split(b"\n")
            for line in lines:
                if not isinstance(message := json.loads(line), dict):
                    raise ValueError("the peer sent a line that is not a JSON object")
                if peer.told:
                    peer.told |= message
                else:
                    self._authenticate(peer, message)
        except BlockingIOError:
            return
        except (OSError, ValueError, RecursionError):
            data = b""
        if not data or len(peer.buffer) > (_LONGEST_LINE if peer.told else _LONGEST_GREETING):
            peer.close()

    def _authenticate(self, peer: _Peer, message: Message) -> None:
        token, node = str(message.get("token")), message.get("node")
        is_ours = hmac.compare_digest(token.encode(errors="replace"), self.token.encode())
        if is_ours and isinstance(node, int) and 0 <= node < self.nodes and node not in self._agents():
            peer.told = {"host": "", **message}
            return
        if is_ours and "gone" in message:
            self._gone = message
        peer.close()

    def _agents(self) -> dict[int, _Peer]:
        return {peer.told["node"]: peer for peer in self._peers if peer.told}

    @property
    def is_over(self) -> bool:
        """Whether a node has failed, disconnected, or not connected in time, so that the trial must end."""
        agents = self._agents().values()
        failed = any(peer.is_gone if peer.ended is None else peer.ended["code"] != 0 for peer in agents)
        return failed or bool(self._gone or self._missing())

    def give_up(self, why: str) -> None:
        self._gone = self._gone or {"gone": 1, "why": why, "is_lost": False}

    def _missing(self) -> list[int]:
        is_late = not self._has_begun and time.monotonic() - self._made > _CONNECT_SECONDS
        return [node for node in range(self.nodes) if node not in self._agents()] if is_late else []

    def stacks(self) -> str:
        agents = self._agents().values()
        for peer in agents:
            peer.send({"stacks": True})
        self._poll_until(lambda: all("stacks" in peer.told or peer.is_gone for peer in agents), _STACKS_SECONDS)
        stacks = {int(rank): text for peer in agents for rank, text in peer.told.get("stacks", {}).items()}
        parts = [f"rank {rank}:\n{stacks[rank]}" for rank in sorted(stacks)]
        return "\n".join(parts) or "no stacks: no rank had installed its signal handler yet"

    def finish(self, *, at_once: bool = False) -> JobEnd:
        """End all agents and return how the ranks ended. With `at_once`, do not wait for reports of the nodes."""
        for _ in range(3):  # one poll each to accept a connection, read its agent's report, notice the agent's exit
            self.poll()
        if not at_once:
            self._poll_until(self._is_decided, _REPORTS_SECONDS)
        reports = [peer.ended or {} for peer in self._agents().values()]
        peaks = [HostPeak(report.get("host_bytes"), report.get("host_method")) for report in reports]
        end = replace(self._job_end(), host_peak=largest_peak(HostPeak(), *peaks))
        for peer in self._peers:
            peer.send({"end": True})
        self._poll_until(lambda: all(peer.is_gone for peer in self._agents().values()), _EXIT_SECONDS)
        self.close()
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_SRUN_SECONDS)
        return end

    def close(self) -> None:
        for peer in self._peers:
            peer.connection.close()
        self._listener.close()

    def _is_decided(self) -> bool:
        first = first_cause(self._ends())
        are_all_known = all(peer.is_gone or peer.ended for peer in self._agents().values())
        return bool(self._gone) or (first is not None and is_certain(first)) or are_all_known

    def _poll_until(self, condition: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not condition() and time.monotonic() < deadline:
            self.poll(0.05)

    def _ends(self) -> list[RankEnd]:
        return [
            RankEnd(int(rank), peer.told["host"], report["status"], report["exception"])
            for peer in self._agents().values()
            for rank, report in (peer.ended or {}).get("ranks", {}).items()
        ]

    def _job_end(self) -> JobEnd:
        agents = self._agents()
        reports = [peer.ended for peer in agents.values() if peer.ended is not None]
        first, oom_kills = first_cause(self._ends()), sum(report.get("oom_kills", 0) for report in reports)
        if first is not None and is_certain(first):
            return JobEnd(first, oom_kills=oom_kills)
        if 0 in agents and agents[0].is_gone and not agents[0].ended:
            return JobEnd(oom_kills=oom_kills, is_mute=True)
        if self._gone and not self._gone["is_lost"]:
            return JobEnd(error=f"on node {self._gone['gone']} of {self.nodes}: {self._gone['why']}")
        gone = {node: peer.told["host"] for node, peer in agents.items() if peer.is_gone and not peer.ended}
        if self._gone:
            gone.setdefault(self._gone["gone"], self._gone["why"])
        if gone:
            names = ", ".join(f"{node} ({host})" for node, host in gone.items())
            lost_host = next((agents[node].told["host"] for node in gone if node in agents), "")
            return JobEnd(lost=f"node {names} of {self.nodes} was lost", lost_host=lost_host, oom_kills=oom_kills)
        if missing := self._missing():
            names = ", ".join(map(str, missing))
            return JobEnd(lost=f"node {names} of {self.nodes} did not connect within {_CONNECT_SECONDS:.0f} s")
        error = next((report["error"] for report in reports if report.get("error")), "")
        return JobEnd(first, error="" if first else error, oom_kills=oom_kills)


def start_nodes(
    folder: Path, job: TrialJob, limit: MemoryLimit, output: int
) -> tuple[JobNodes, "subprocess.Popen[bytes]"]:
    """Start the agent of the first node on this host, and under Slurm the agents of the other nodes with srun."""
    spec, nodes = job.spec, JobNodes(job.spec.nodes)
    secret = {TOKEN: nodes.token}
    agent = process_tree.start_worker(folder, job, limit, output, nodes.agent_command(folder, 0), secret)
    nodes.processes.append(agent)
    if spec.nodes == 1 or os.environ.pop(LISTENER, ""):  # LISTENER is set under Ray, whose tasks start the other agents
        return nodes, agent
    if "SLURM_JOB_ID" not in os.environ:
        nodes.give_up(f"a trial with {spec.nodes} nodes needs --engine slurm or --engine ray")
        return nodes, agent
    others, cpus = spec.nodes - 1, os.environ.get("SLURM_CPUS_PER_TASK")
    command = [
        *("srun", f"--nodes={others}", f"--ntasks={others}", "--ntasks-per-node=1", "--relative=1"),
        *("--input=none", "--unbuffered", "--mpi=none", "--kill-on-bad-exit=0"),
        # Since Slurm 22.05, srun does not inherit `--cpus-per-task` from its job.
        *([f"--cpus-per-task={cpus}"] if cpus else []),
        *nodes.agent_command(folder, "slurm", os.uname().nodename),
    ]
    try:
        nodes.processes.append(process_tree.start_worker(folder, job, limit, output, command, secret))
    except OSError as error:
        nodes.give_up(f"cannot start srun on the first node of the Slurm job: {error}")
    return nodes, agent


class _Agent:
    """Runs torchrun for the ranks of one node, and obeys the supervisor.

    On nodes other than the first, where the supervisor does it, a thread samples the memory of the node's processes.
    """

    def __init__(self, trial_dir: Path, node: int, hosts: list[str], port: int) -> None:
        self.trial_dir, self.node = trial_dir, node
        job = _job(trial_dir)
        self.spec, self.attempt = job.spec, job.attempt
        self.ranks = range(node * self.spec.processes, (node + 1) * self.spec.processes)
        self.steps_peak = HostPeak()
        self._over_limit: dict[str, Any] | None = None
        self.host, self._socket = _connected(hosts, port)
        self.begins: queue.Queue[int] = queue.Queue()

    def send(self, message: Message) -> None:
        with contextlib.suppress(OSError):  # if the supervisor has ended, the thread that runs `obey` ends this process
            self._socket.sendall(encoded(message))

    def obey(self) -> None:
        """Execute the supervisor's messages until the connection is closed, then end this process.

        Call it in a thread, because torchrun needs the main thread for its signal handlers.
        """
        with contextlib.suppress(OSError, ValueError):
            for line in self._socket.makefile("rb"):
                message = json.loads(line)
                if "begin" in message:
                    self.begins.put(message["begin"])
                elif "stacks" in message:
                    self.send({"stacks": self._stacks()})
                elif "end" in message:
                    break
        process_tree.kill_descendants(os.getpid())
        os._exit(1)

    def watch_memory(self) -> None:
        """Sample the memory of this node's processes for ever, and kill them if they exceed their limit together."""
        limit_bytes = self.spec.limits.memory_bytes
        memory, heartbeat = TreeMemory(limit_bytes), of_rank(HEARTBEAT, self.ranks[0])
        while self._over_limit is None:
            time.sleep(_TICK_SECONDS)
            memory.sample()
            if read_progress(self.trial_dir, heartbeat).phase not in AFTER_THE_STEPS:
                self.steps_peak = memory.peak
            if held := memory.over_limit_bytes():
                sizes = f"{held / 2**20:,.0f} MiB together; the limit is {(limit_bytes or 0) / 2**20:,.0f} MiB"
                message = f"the processes on this node used {sizes}"
                facts = {"message": message, "outcome": "oom_host", "unix_time": time.time()}
                self._over_limit = {"type": "HostLimitError", **facts}
                process_tree.kill_descendants(os.getpid())

    def torchrun(self, master: str, port: int) -> Message:
        from torch.distributed import run
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

        with tempfile.TemporaryDirectory(prefix="flopwatch-torchrun-") as folder:
            words = [
                *(f"--nnodes={self.spec.nodes}", f"--nproc-per-node={self.spec.processes}", f"--node-rank={self.node}"),
                *(f"--master-addr={master}", f"--master-port={port}", "--max-restarts=0", f"--log-dir={folder}"),
                *("-m", "flopwatch.sweep.worker.main", str(self.trial_dir), "--rank"),
            ]
            try:
                run.run(run.parse_args(words))
            except ChildFailedError as error:
                return self._failures({rank: failure.exitcode for rank, failure in error.failures.items()})
            except SignalException as error:
                return {"code": 128 + error.sigval, "ranks": {}}
            except Exception as error:  # noqa: BLE001 - torchrun has many, as for a failed rendezvous
                return {"code": 1, "ranks": {}, "error": f"{type(error).__name__}: {error}"[:2000]}
        return {"code": 0, "ranks": {}}

    def _failures(self, statuses: dict[int, int]) -> Message:
        exceptions = {rank: read_json(self.trial_dir / exception_file(rank)) for rank in self.ranks}
        if self._over_limit is not None:
            exceptions[self.ranks[0]] = self._over_limit
        ranks = {
            rank: {"status": statuses.get(rank, 0), "exception": exceptions[rank]}
            for rank in self.ranks
            if rank in statuses or exceptions[rank] is not None
        }
        return {"code": 1, "ranks": ranks}

    def _stacks(self) -> dict[int, str]:
        """Return the Python stacks of all threads of each rank on this node, which faulthandler writes on SIGUSR1."""
        for pid in descendants(os.getpid()):
            # Without a handler, the signal would end the process.
            if process_tree.is_in_signal_set(pid, "SigCgt", signal.SIGUSR1):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGUSR1)
        files = [self.trial_dir / of_rank(STACKS, rank) for rank in self.ranks]
        texts = dict(zip(self.ranks, process_tree.written_texts(files), strict=True))
        return {rank: text for rank, text in texts.items() if text}


def run_agent(trial_dir: Path, node: int, hosts: list[str], port: int) -> int:
    if process_tree.PARENT in os.environ:  # a Ray task started this agent
        if not process_tree.ends_with_parent(signal.SIGTERM):
            return 1
        become_guarded(trial_dir)
    process_tree.adopt_orphans()
    agent = _Agent(trial_dir, node, hosts, port)
    agent.send({"token": os.environ.pop(TOKEN), "node": node, "host": _host()})
    threading.Thread(target=agent.obey, daemon=True).start()
    limit = limit_memory(agent.spec.limits.memory_bytes if node else None, trial_dir.name[-40:])
    if node:  # on the first node (0) the supervisor limits and samples memory
        limit.join()
        threading.Thread(target=agent.watch_memory, daemon=True).start()
    os.environ |= {process_tree.TRIAL_MARK: str(trial_dir), process_tree.ATTEMPT_MARK: agent.attempt}
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(process_tree.usable_cores()) // agent.spec.processes)))

    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    # This store listens at a free port. torchrun runs in this process too and uses the same store (multi_tenant).
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, multi_tenant=True) if node == 0 else None
    agent.send({"port": store.port if store else None})
    ended = agent.torchrun("127.0.0.1" if node == 0 else agent.host, agent.begins.get())
    peak = {"host_bytes": agent.steps_peak.bytes, "host_method": agent.steps_peak.method}
    agent.send({"ended": {**ended, "oom_kills": limit.oom_kills(), **peak}})
    process_tree.kill_descendants(os.getpid())
    limit.close()
    return int(ended["code"])


def _job(trial_dir: Path) -> TrialJob:
    """Read `spec.json`. Wait for the file first, because a shared file system may show it late on this host."""
    deadline = time.monotonic() + _REACH_SECONDS
    while (job := read_or_none(TrialJob, read_json(trial_dir / SPEC))) is None:
        if time.monotonic() > deadline:
            raise FileNotFoundError(
                f"{trial_dir / SPEC} is not visible on {_host()}; use a folder that all nodes share"
            )
        time.sleep(0.2)
    return job


def _connected(hosts: list[str], port: int) -> tuple[str, socket.socket]:
    """Connect by the first name that works, because on some clusters not every name resolves on every node."""
    deadline = time.monotonic() + _REACH_SECONDS
    while True:
        for host in hosts:
            with contextlib.suppress(OSError):
                found = socket.create_connection((host, port), timeout=10)
                found.settimeout(None)
                _keep_alive(found)
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
    _status = run_agent(Path(sys.argv[1]), _node, _hosts, int(_port))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(_status)
