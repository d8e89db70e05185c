"""What the supervisor of a trial and the agents on its nodes say to each other: one JSON object per line."""

import json
import socket
from collections.abc import Iterator
from typing import Any, TypeAlias

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
