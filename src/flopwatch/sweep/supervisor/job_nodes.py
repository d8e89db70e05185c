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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from flopwatch.files import write_json
from flopwatch.records.trial import TrialSpec
from flopwatch.records.trial_files import EXCEPTION, trial_folder
from flopwatch.sweep.full_disk import when_there_is_space
from flopwatch.sweep.host.memory import HostPeak, MemoryLimit
from flopwatch.sweep.host.processes import start_worker
from flopwatch.sweep.supervisor.classify import JobEnd, RankEnd, first_cause, is_certain

TOKEN = "FLOPWATCH_NODE_TOKEN"
"""Environment variable with a secret of the trial. The supervisor closes connections that do not send this secret."""

LISTENER = "FLOPWATCH_NODE_LISTENER"
"""Environment variable with the file descriptor of the listening socket, if the engine has opened it already."""

Message: TypeAlias = dict[str, Any]

_LONGEST_LINE = 4 << 20  # in bytes; the longest messages contain the Python stacks of all ranks of a node


def encoded(message: Message) -> bytes:
    return (json.dumps(message) + "\n").encode()


def split_messages(buffer: bytes) -> tuple[list[Message], bytes]:
    r"""Return the complete messages in the buffer, and the rest of the buffer.

    >>> split_messages(b'{"end": true}\n{"be')
    ([{'end': True}], b'{"be')

    Raises:
        ValueError: A line is too long or not a JSON object.
    """
    *lines, rest = buffer.split(b"\n")
    if len(rest) > _LONGEST_LINE:
        raise ValueError(f"the peer sent a line longer than {_LONGEST_LINE} bytes")
    messages = [json.loads(line) for line in lines]
    if not all(isinstance(message, dict) for message in messages):
        raise ValueError("the peer sent a line that is not a JSON object")
    return messages, rest


def keep_alive(connection: socket.socket) -> None:
    """Make the kernel close the connection within two minutes if the peer's host fails."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6}.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def read_lines_of(connection: socket.socket) -> Iterator[Message]:
    """Yield messages as they arrive, until the connection is closed."""
    buffer = b""
    while True:
        try:
            data = connection.recv(1 << 16)
            messages, buffer = split_messages(buffer + data)
        except (OSError, ValueError):
            return
        if not data:
            return
        yield from messages


_LONGEST_GREETING = 4096  # A connection that sends more bytes than this without the secret is closed.
_MOST_STRANGERS = 256  # At most this many connections that have not sent the secret are open at once.
_CONNECT_SECONDS = 600.0  # Slurm and Ray may take minutes to start the agents on all nodes.
_REPORTS_SECONDS = 5.0  # The supervisor waits this long for reports of other nodes, which may show an earlier failure.
_EXIT_SECONDS = 12.0  # The supervisor waits this long for the agents to exit. Killing their processes takes up to 10 s.
_STACKS_SECONDS = 5.0  # The supervisor waits this long for Python stacks. An agent needs up to 2 s to collect them.


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


class JobNodes:
    """Waits until the agents of all nodes have connected, then starts their ranks and collects their reports."""

    def __init__(self, nodes: int, environment: Mapping[str, str] = os.environ) -> None:
        self.nodes = nodes
        self.token = environment.get(TOKEN) or secrets.token_hex(16)
        handle = environment.get(LISTENER)
        self._listener = socket.socket(fileno=int(handle)) if handle else listener("" if nodes > 1 else "127.0.0.1")
        self._listener.setblocking(False)
        self._peers: list[_Peer] = []
        self._made = time.monotonic()
        self.has_begun = False
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
        if not self.has_begun and len(agents) == self.nodes and all(peer.is_ready for peer in agents.values()):
            self.has_begun = True
            for peer in agents.values():
                _send(peer, {"begin": agents[0].port})

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
            messages, peer.buffer = split_messages(peer.buffer + data)
        except BlockingIOError:
            return
        except (OSError, ValueError, RecursionError):
            data, messages = b"", []
        for message in messages:
            if peer.node is None:
                self._authenticate(peer, message)
            else:
                _note(peer, message)
        is_stranger = peer.node is None and len(peer.buffer) > _LONGEST_GREETING
        if not data or is_stranger:
            _close(peer)

    def _authenticate(self, peer: _Peer, message: Message) -> None:
        token, node = str(message.get("token")), message.get("node")
        is_ours = hmac.compare_digest(token.encode(errors="replace"), self.token.encode())
        if is_ours and "gone" in message:
            self._gone = message
            _close(peer)
        elif is_ours and isinstance(node, int) and 0 <= node < self.nodes and node not in self._agents():
            peer.node, peer.host = node, str(message.get("host"))
        else:
            _close(peer)

    def _agents(self) -> dict[int, _Peer]:
        return {peer.node: peer for peer in self._peers if peer.node is not None}

    @property
    def is_over(self) -> bool:
        """Whether a node has failed, disconnected, or not connected in time, so that the trial must end."""
        agents = self._agents().values()
        failed = any(peer.is_gone if peer.ended is None else peer.ended["code"] != 0 for peer in agents)
        return failed or bool(self._gone or self._missing())

    def give_up(self, why: str) -> None:
        """Make `is_over` true, because the other nodes will not connect."""
        self._gone = self._gone or {"gone": 1, "why": why, "is_lost": False}

    def _missing(self) -> list[int]:
        is_late = not self.has_begun and time.monotonic() - self._made > _CONNECT_SECONDS
        return [node for node in range(self.nodes) if node not in self._agents()] if is_late else []

    def stacks(self) -> str:
        """Return the Python stacks of all threads of all ranks as one text."""
        agents = self._agents()
        for peer in agents.values():
            _send(peer, {"stacks": True})
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
        end = replace(self._job_end(), host_peak=self._host_peak())
        for peer in self._peers:
            _send(peer, {"end": True})
        self._poll_until(lambda: all(peer.is_gone for peer in self._agents().values()), _EXIT_SECONDS)
        self.close()
        return end

    def close(self) -> None:
        for peer in self._peers:
            peer.connection.close()
        self._listener.close()

    def _host_peak(self) -> HostPeak:
        found = HostPeak()
        for peer in self._agents().values():
            report = peer.ended or {}
            if isinstance(report.get("host_bytes"), int):
                found = found.at_least(report["host_bytes"], report["host_method"])
        return found

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
    """Open a listening socket at a free port."""
    return socket.create_server((host, 0), backlog=128)


def _note(peer: _Peer, message: Message) -> None:
    if "port" in message:
        peer.port, peer.is_ready = message["port"], True
    if "stacks" in message:
        peer.stacks = message["stacks"]
    if "ended" in message:
        peer.ended = message["ended"]


def _send(peer: _Peer, message: Message) -> None:
    with contextlib.suppress(OSError):
        peer.connection.sendall(encoded(message))


def _close(peer: _Peer) -> None:
    peer.is_gone = True
    peer.connection.close()


_SRUN_SECONDS = 5.0  # srun may need this long to notice that its tasks have ended


@dataclass
class RunningNodes:
    """A running trial: the agent of its first node, and under Slurm the srun process that runs the other agents."""

    trial_dir: Path
    nodes: JobNodes
    agent: "subprocess.Popen[bytes]"
    srun: "subprocess.Popen[bytes] | None" = None

    def is_over(self) -> bool:
        """Read the agents' messages; return whether the trial must end."""
        self.nodes.poll()
        if self.srun is not None and self.srun.poll() and not self.nodes.has_begun:
            self.nodes.give_up(
                f"srun exited with code {self.srun.returncode}; its error message is at the end of the log"
            )
        return self.nodes.is_over

    def finish(self, *, at_once: bool, waits: Callable[[str], None]) -> JobEnd:
        """End all agents, and save the exception of the rank that failed first as `exception.json`.

        `waits` is called while the disk is full.
        """
        end = self.nodes.finish(at_once=at_once)
        if end.first is not None and end.first.exception is not None:
            exception = end.first.exception
            when_there_is_space(lambda: write_json(self.trial_dir / EXCEPTION, exception), waits)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.agent.wait(_SRUN_SECONDS)
        if self.srun is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.srun.wait(_SRUN_SECONDS)
        return end


def start_nodes(
    sweep: Path, name: str, spec: TrialSpec, limit: MemoryLimit, cwd: str | None, output: int
) -> RunningNodes:
    """Start the agent of the first node on this host, and under Slurm the agents of the other nodes with srun."""
    nodes, folder = JobNodes(spec.nodes), trial_folder(sweep, name)
    secret = {TOKEN: nodes.token}
    agent = start_worker(sweep, name, spec, limit, cwd, output, nodes.agent_command(folder, 0), secret)
    running = RunningNodes(folder, nodes, agent)
    if spec.nodes == 1 or os.environ.pop(LISTENER, ""):  # LISTENER is set under Ray, whose tasks start the other agents
        return running
    if "SLURM_JOB_ID" not in os.environ:
        nodes.give_up(f"a trial with {spec.nodes} nodes needs --engine slurm or --engine ray")
        return running
    command = [*srun_command(spec), *nodes.agent_command(folder, "slurm", os.uname().nodename)]
    try:
        running.srun = start_worker(sweep, name, spec, limit, cwd, output, command, secret)
    except OSError as error:
        nodes.give_up(f"cannot start srun on the first node of the Slurm job: {error}")
    return running


def srun_command(spec: TrialSpec) -> list[str]:
    """Return the command that runs one agent on each node of the Slurm job except the first."""
    others = spec.nodes - 1
    cpus = os.environ.get("SLURM_CPUS_PER_TASK")
    return [
        *("srun", f"--nodes={others}", f"--ntasks={others}", "--ntasks-per-node=1", "--relative=1"),
        *("--input=none", "--unbuffered", "--mpi=none", "--kill-on-bad-exit=0"),
        # Since Slurm 22.05, srun does not inherit `--cpus-per-task` from its job.
        *([f"--cpus-per-task={cpus}"] if cpus else []),
    ]
