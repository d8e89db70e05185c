"""Controls the nodes of a trial with several processes. This is the supervisor's side.

On each node an agent (`node_agent.py`) runs torchrun. The supervisor starts the agent of the first node. Slurm's srun
or Ray tasks start those of the other nodes. Each agent keeps a TCP connection to the supervisor, over which both sides
send one JSON object per line. Standard library only. Only trials with several processes import this module, because
importing sockets takes 10 ms.
"""

import contextlib
import hmac
import json
import os
import secrets
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from flopwatch.records.trial import TrialJob
from flopwatch.sweep.host.memory import HostPeak, MemoryLimit, largest_peak
from flopwatch.sweep.host.processes import start_worker
from flopwatch.sweep.supervisor.classify import JobEnd, RankEnd, first_cause, is_certain

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


def encoded(message: Message) -> bytes:
    return (json.dumps(message) + "\n").encode()


def keep_alive(connection: socket.socket) -> None:
    """Make the kernel close the connection within two minutes if the peer's host fails."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6}.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


@dataclass
class _Peer:
    """A connection to an agent. `node` is None until the agent has sent the secret."""

    connection: socket.socket
    buffer: bytes = b""
    node: int | None = None
    host: str = ""
    port: int | None = None
    is_ready: bool = False
    is_gone: bool = False
    stacks: dict[str, str] | None = None
    ended: Message | None = None

    def note(self, message: Message) -> None:
        if "port" in message:
            self.port, self.is_ready = message["port"], True
        self.stacks = message.get("stacks", self.stacks)
        self.ended = message.get("ended", self.ended)

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
        return [
            *(sys.executable, "-m", "flopwatch.sweep.supervisor.node_agent"),
            *(str(trial_dir), str(node), f"{host}:{self.port}"),
        ]

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
        if not self._has_begun and len(agents) == self.nodes and all(peer.is_ready for peer in agents.values()):
            self._has_begun = True
            for peer in agents.values():
                peer.send({"begin": agents[0].port})
        for srun in self.processes[1:]:
            if srun.poll() and not self._has_begun:
                self.give_up(f"srun exited with code {srun.returncode}; its error message is at the end of the log")

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection = self._listener.accept()[0]
                if sum(peer.node is None and not peer.is_gone for peer in self._peers) >= _MOST_STRANGERS:
                    connection.close()
                    continue
                connection.setblocking(False)
                keep_alive(connection)
                self._peers.append(_Peer(connection))

    def _receive(self, peer: _Peer) -> None:
        try:
            data = peer.connection.recv(1 << 16)
            *lines, peer.buffer = (peer.buffer + data).split(b"\n")
            for line in lines:
                if not isinstance(message := json.loads(line), dict):
                    raise ValueError("the peer sent a line that is not a JSON object")
                if peer.node is None:
                    self._authenticate(peer, message)
                else:
                    peer.note(message)
        except BlockingIOError:
            return
        except (OSError, ValueError, RecursionError):
            data = b""
        if not data or len(peer.buffer) > (_LONGEST_GREETING if peer.node is None else _LONGEST_LINE):
            peer.close()

    def _authenticate(self, peer: _Peer, message: Message) -> None:
        token, node = str(message.get("token")), message.get("node")
        is_ours = hmac.compare_digest(token.encode(errors="replace"), self.token.encode())
        if is_ours and "gone" in message:
            self._gone = message
            peer.close()
        elif is_ours and isinstance(node, int) and 0 <= node < self.nodes and node not in self._agents():
            peer.node, peer.host = node, str(message.get("host"))
        else:
            peer.close()

    def _agents(self) -> dict[int, _Peer]:
        return {peer.node: peer for peer in self._peers if peer.node is not None}

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
        agents = self._agents()
        for peer in agents.values():
            peer.send({"stacks": True})
        self._poll_until(
            lambda: all(peer.stacks is not None or peer.is_gone for peer in agents.values()), _STACKS_SECONDS
        )
        stacks = {int(rank): text for peer in agents.values() for rank, text in (peer.stacks or {}).items()}
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
        agents = self._agents().values()
        return (
            bool(self._gone)
            or (first is not None and is_certain(first))
            or all(peer.is_gone or peer.ended for peer in agents)
        )

    def _poll_until(self, condition: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not condition() and time.monotonic() < deadline:
            self.poll(0.05)

    def _ends(self) -> list[RankEnd]:
        return [
            RankEnd(int(rank), peer.host, report["status"], report["exception"])
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
        gone = {node: peer.host for node, peer in agents.items() if peer.is_gone and not peer.ended}
        if self._gone:
            gone.setdefault(self._gone["gone"], self._gone["why"])
        if gone:
            names = ", ".join(f"{node} ({host})" for node, host in gone.items())
            hosts = [agents[node].host for node in gone if node in agents]
            return JobEnd(
                lost=f"node {names} of {self.nodes} was lost", lost_host=hosts[0] if hosts else "", oom_kills=oom_kills
            )
        if missing := self._missing():
            names = ", ".join(map(str, missing))
            return JobEnd(lost=f"node {names} of {self.nodes} did not connect within {_CONNECT_SECONDS:.0f} s")
        error = next((report["error"] for report in reports if report.get("error")), "")
        return JobEnd(first, error="" if first else error, oom_kills=oom_kills)


def listener(host: str) -> socket.socket:
    return socket.create_server((host, 0), backlog=128)


def start_nodes(
    folder: Path, job: TrialJob, limit: MemoryLimit, output: int
) -> tuple[JobNodes, "subprocess.Popen[bytes]"]:
    """Start the agent of the first node on this host, and under Slurm the agents of the other nodes with srun."""
    spec, nodes = job.spec, JobNodes(job.spec.nodes)
    secret = {TOKEN: nodes.token}
    agent = start_worker(folder, job, limit, output, nodes.agent_command(folder, 0), secret)
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
        nodes.processes.append(start_worker(folder, job, limit, output, command, secret))
    except OSError as error:
        nodes.give_up(f"cannot start srun on the first node of the Slurm job: {error}")
    return nodes, agent
