"""The nodes of a trial with several processes, as its supervisor sees them. Standard library only.

On each node an agent (`node_agent.py`) runs torchrun and keeps a connection to us. The agent of the first node is our
child; the others are placed by the engine.
"""

import contextlib
import hmac
import json
import os
import secrets
import select
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from flopwatch.sweep.host.tree_memory import HostPeak
from flopwatch.sweep.supervisor.classify import JobEnd, RankEnd, first_cause, is_certain

# What the supervisor of a trial and the agents on its nodes say to each other: one JSON object per line.


TOKEN = "FLOPWATCH_NODE_TOKEN"
"""Environment variable with the secret of the trial: whoever else finds the port is not listened to."""

LISTENER = "FLOPWATCH_NODE_LISTENER"
"""Environment variable: the number of an open socket at which agents arrive that the engine has placed already."""

Message: TypeAlias = dict[str, Any]

_LONGEST_LINE = 4 << 20


def written(message: Message) -> bytes:
    return (json.dumps(message) + "\n").encode()


def split_messages(buffer: bytes) -> tuple[list[Message], bytes]:
    r"""The whole messages, and what is left of the next.

    >>> split_messages(b'{"end": true}\n{"be')
    ([{'end': True}], b'{"be')

    Raises:
        ValueError: This is not what an agent or a supervisor says.
    """
    *lines, rest = buffer.split(b"\n")
    if len(rest) > _LONGEST_LINE:
        raise ValueError("a line without an end")
    messages = [json.loads(line) for line in lines]
    if not all(isinstance(message, dict) for message in messages):
        raise ValueError("not an object")
    return messages, rest


def keep_alive(connection: socket.socket) -> None:
    """A host that vanishes without a word is noticed within two minutes."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6}.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def read_lines_of(connection: socket.socket) -> Iterator[Message]:
    """Messages as they come, until the other side is gone."""
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


_LONGEST_GREETING = 4096
_MOST_STRANGERS = 256
_COME_SECONDS = 600.0
_OTHERS_SECONDS = 5.0
_GO_SECONDS = 12.0
_STACKS_SECONDS = 5.0


@dataclass
class _Peer:
    """A connection; `node` is None until it has told the secret."""

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
    """Waits for the agents of all nodes, has them begin, and ends them.

    Args:
        nodes: How many there are.
        environment: Of the supervisor: an engine that places agents itself leaves a socket and a secret there.
    """

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

    def attend(self, seconds: float = 0.0) -> None:
        """Hear what the agents say; once all have come, tell them where to meet."""
        waiting = [self._listener, *(peer.connection for peer in self._peers if not peer.is_gone)]
        ready = select.select(waiting, [], [], seconds)[0]
        if self._listener in ready:
            self._accept()
        for peer in self._peers:
            if peer.connection in ready:
                self._hear(peer)
        agents = self._agents()
        if not self.has_begun and len(agents) == self.nodes and all(peer.is_ready for peer in agents.values()):
            self.has_begun = True
            for peer in agents.values():
                _tell(peer, {"begin": agents[0].port})

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

    def _hear(self, peer: _Peer) -> None:
        try:
            data = peer.connection.recv(1 << 16)
            messages, peer.buffer = split_messages(peer.buffer + data)
        except BlockingIOError:
            return
        except (OSError, ValueError, RecursionError):
            data, messages = b"", []
        for message in messages:
            if peer.node is None:
                self._welcome(peer, message)
            else:
                _note(peer, message)
        is_stranger = peer.node is None and len(peer.buffer) > _LONGEST_GREETING
        if not data or is_stranger:
            _leave(peer)

    def _welcome(self, peer: _Peer, message: Message) -> None:
        told, node = str(message.get("token")), message.get("node")
        is_ours = hmac.compare_digest(told.encode(errors="replace"), self.token.encode())
        if is_ours and "gone" in message:
            self._gone = message
            _leave(peer)
        elif is_ours and isinstance(node, int) and 0 <= node < self.nodes and node not in self._agents():
            peer.node, peer.host = node, str(message.get("host"))
        else:
            _leave(peer)

    def _agents(self) -> dict[int, _Peer]:
        return {peer.node: peer for peer in self._peers if peer.node is not None}

    @property
    def is_over(self) -> bool:
        """Whether there is nothing more to wait for: a node has failed, is gone, or never came."""
        agents = self._agents().values()
        failed = any(peer.is_gone if peer.ended is None else peer.ended["code"] != 0 for peer in agents)
        return failed or bool(self._gone or self._missing())

    def give_up(self, why: str) -> None:
        """The other nodes will not come."""
        self._gone = self._gone or {"gone": 1, "why": why, "is_lost": False}

    def _missing(self) -> list[int]:
        is_late = not self.has_begun and time.monotonic() - self._made > _COME_SECONDS
        return [node for node in range(self.nodes) if node not in self._agents()] if is_late else []

    def stacks(self) -> str:
        """What every thread of every process does."""
        agents = self._agents()
        for peer in agents.values():
            _tell(peer, {"stacks": True})
        self._attend_until(
            lambda: all(peer.stacks is not None or peer.is_gone for peer in agents.values()), _STACKS_SECONDS
        )
        told = {int(rank): text for peer in agents.values() for rank, text in (peer.stacks or {}).items()}
        parts = [f"rank {rank}:\n{told[rank]}" for rank in sorted(told)]
        return "\n".join(parts) or "none: no process had come far enough to answer"

    def finish(self, *, at_once: bool = False) -> JobEnd:
        """Hear what the nodes have to say, unless it is known already; end them all and wait until they are gone."""
        for _ in range(3):  # one may have come, told and left since
            self.attend()
        if not at_once:
            self._attend_until(self._is_clear, _OTHERS_SECONDS)
        end = replace(self._job_end(), host_peak=self._host_peak())
        for peer in self._peers:
            _tell(peer, {"end": True})
        self._attend_until(lambda: all(peer.is_gone for peer in self._agents().values()), _GO_SECONDS)
        self.close()
        return end

    def close(self) -> None:
        for peer in self._peers:
            peer.connection.close()
        self._listener.close()

    def _host_peak(self) -> HostPeak:
        found = HostPeak()
        for peer in self._agents().values():
            told = peer.ended or {}
            if isinstance(told.get("host_bytes"), int):
                found = found.at_least(told["host_bytes"], told["host_method"])
        return found

    def _is_clear(self) -> bool:
        first = first_cause(self._ends())
        agents = self._agents().values()
        return (
            bool(self._gone)
            or (first is not None and is_certain(first))
            or all(peer.is_gone or peer.ended for peer in agents)
        )

    def _attend_until(self, is_so: Any, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not is_so() and time.monotonic() < deadline:
            self.attend(0.05)

    def _ends(self) -> list[RankEnd]:
        return [
            RankEnd(int(rank), peer.host, told["status"], told["exception"])
            for peer in self._agents().values()
            for rank, told in (peer.ended or {}).get("ranks", {}).items()
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
                lost=f"node {names} of {self.nodes} is gone", lost_host=hosts[0] if hosts else "", oom_kills=oom_kills
            )
        if missing := self._missing():
            names = ", ".join(map(str, missing))
            return JobEnd(lost=f"node {names} of {self.nodes} did not come within {_COME_SECONDS:.0f} s")
        error = next((report["error"] for report in reports if report.get("error")), "")
        return JobEnd(first, error="" if first else error, oom_kills=oom_kills)


def listener(host: str) -> socket.socket:
    """At a port the kernel chooses."""
    return socket.create_server((host, 0), backlog=128)


def _note(peer: _Peer, message: Message) -> None:
    if "port" in message:
        peer.port, peer.is_ready = message["port"], True
    if "stacks" in message:
        peer.stacks = message["stacks"]
    if "ended" in message:
        peer.ended = message["ended"]


def _tell(peer: _Peer, message: Message) -> None:
    with contextlib.suppress(OSError):
        peer.connection.sendall(written(message))


def _leave(peer: _Peer) -> None:
    peer.is_gone = True
    peer.connection.close()
