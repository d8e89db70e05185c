"""Opens the key-value store of the training's process group over a connection that can be shut down.

A `TCPStore` waits for the store's answers in C++ code, which cannot be interrupted. If the interpreter exits meanwhile,
Python ends the thread inside C++ code, which aborts the process. The monitor therefore has a connection of its own,
which is forwarded through sockets of this process: when these are shut down, the call in torch fails at once. On a
connection of its own, the monitor's calls also do not delay those of the training.
"""

import datetime as dt
import os
import secrets
import selectors
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch.distributed import FileStore, HashStore, PrefixStore, TCPStore  # type: ignore[attr-defined]

from flopwatch.errors import FlopwatchError
from flopwatch.monitor.ranks import wire
from flopwatch.monitor.ranks.wire import Sockets
from flopwatch.torch_internals.modules import default_store
from flopwatch.version import __version__

_CONNECT_SECONDS = 30.0
OPEN_SECONDS = 10.0
_OPEN_TRIES_SECONDS = 1.0, 3.0, OPEN_SECONDS
"""Limits of torch's first, second and third try to connect to a listening socket of this process.

The first limit is short: if the store dies or the process exits meanwhile, torch retries for up to three times the
limit in C++ code that cannot be interrupted, and the process cannot exit before. The last one is long, because torch
looks up the name of the address before it connects, which takes 5 s if a packet to the name server is lost.
"""
_ANSWER_TIMEOUT = dt.timedelta(hours=1)
"""The limit of a call to the store. It can be long, because shutting the sockets down ends a call earlier."""
_COPY_BYTES = 65536


def is_possible() -> bool:
    return dist.is_available() and dist.is_initialized()


@dataclass(frozen=True, slots=True)
class JobStore:
    """Where the job's store is.

    Attributes:
        host: The host of a `TCPStore`; None for a store that is used directly.
        port: Its port.
        direct: A store that needs no connection, such as a `FileStore`; None for a `TCPStore`.
        world_size: Number of ranks, part of the prefix of all keys. It must stay the same when the training has
            destroyed its process group, which a monitor that closes at exit outlives.
    """

    host: str | None
    port: int = 0
    direct: Any = None
    world_size: int = field(default_factory=lambda: dist.get_world_size() if dist.is_initialized() else 0)

    @contextmanager
    def open(self, sockets: Sockets) -> Iterator[Any]:
        """Open the store for the keys of the monitors; `sockets.end()` ends every call that waits for the store."""
        prefix = _prefix(os.environ, self.world_size)
        if self.host is None:
            yield PrefixStore(prefix, self.direct)
            return
        store, near, far = _open_tcp_store(self.host, self.port, sockets)
        try:
            yield PrefixStore(prefix, store)
            is_set(store, prefix)  # waits for an answer, unlike `set`, so the last `set` has arrived
        finally:
            wire.shut_down(near, far)  # its thread closes them


def _open_tcp_store(host: str, port: int, sockets: Sockets) -> tuple[Any, socket.socket, socket.socket]:
    for seconds in _OPEN_TRIES_SECONDS:
        near, far = _open_forwarder(host, port, sockets)
        near_host, near_port = near.getsockname()
        limit = dt.timedelta(seconds=seconds)
        try:
            store = TCPStore(near_host, near_port, is_master=False, wait_for_workers=False, timeout=limit)
        except RuntimeError:
            wire.shut_down(near, far)
            if seconds == OPEN_SECONDS or sockets.ended.is_set():
                raise
        else:
            store.set_timeout(_ANSWER_TIMEOUT)
            return store, near, far
    raise AssertionError("unreachable")


def find_job_store() -> JobStore:
    """Find the store of the default process group, which all ranks of the training share."""
    try:
        outer = store = default_store()
    except FlopwatchError:  # this torch has no such function, so use the address that torchrun sets
        return _by_environment(os.environ)
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if isinstance(store, TCPStore):
        return JobStore(store.host, store.port)
    if isinstance(store, FileStore | HashStore):
        return JobStore(None, direct=outer)
    raise FlopwatchError(f"the process group's store is a {type(store).__name__}, which flopwatch cannot use")


def _by_environment(environment: Mapping[str, str]) -> JobStore:
    host, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT", "")
    if not host or not port.isdigit():
        raise FlopwatchError("the store of the process group cannot be found in this release of torch")
    return JobStore(host, int(port))


def _prefix(environment: Mapping[str, str], world_size: int) -> str:
    """The prefix of all keys. torchrun may keep a store across restarts, so it differs after each restart.

    It also differs between releases of flopwatch, because the layout of their reports may differ.

    >>> _prefix({"TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_RESTART_COUNT": "2"}, 8).replace(__version__, "1.0")
    'flopwatch/1.0/a/2/8'
    """
    names = "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"
    return "/".join(["flopwatch", __version__, *(environment.get(name, "") for name in names), str(world_size)])


def probe(store: Any) -> None:
    """Raise an error unless the store keeps what is written to it. For torch's `FakeStore`, every key exists."""
    key, value = f"probe/{secrets.token_hex(8)}", secrets.token_bytes(8).hex()
    is_there_before = is_set(store, key)
    store.set(key, value)
    is_kept = not is_there_before and is_set(store, key) and store.get(key) == value.encode()
    store.delete_key(key)
    if not is_kept:
        raise FlopwatchError("the store of the process group does not keep what is written to it")


def is_set(store: Any, key: str) -> bool:
    """Whether the store has the key. `get` would wait for a key that is not there."""
    return bool(store.check([key]))


def _open_forwarder(host: str, port: int, sockets: Sockets) -> tuple[socket.socket, socket.socket]:
    """Connect to the store, and listen on a socket of this process for the connection of torch."""
    far = wire.connect(host, port, _CONNECT_SECONDS, sockets)
    near = sockets.add(socket.create_server(("127.0.0.1", 0), backlog=1))
    threading.Thread(target=_forward, args=(near, far, sockets), name="flopwatch-store", daemon=True).start()
    return near, far


def _forward(near: socket.socket, far: socket.socket, sockets: Sockets) -> None:
    """Copy bytes between torch and the store until one of them closes the connection, or one is shut down."""
    used = [near, far]
    with suppress(OSError), selectors.DefaultSelector() as selector:
        used.append(torchs := sockets.add(near.accept()[0]))
        selector.register(torchs, selectors.EVENT_READ, far)
        selector.register(far, selectors.EVENT_READ, torchs)
        while True:
            for ready, _ in selector.select():
                received = ready.fileobj.recv(_COPY_BYTES)  # type: ignore[union-attr]
                if not received:
                    raise ConnectionError
                ready.data.sendall(received)
    sockets.drop(*used)
