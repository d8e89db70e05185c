"""Sends bytes between two ranks over a TCP connection, after each has proved that it belongs to the same run.

All waits are on Python sockets. `Sockets.end` ends them from another thread, and a process may exit during one.
"""

import hashlib
import hmac
import os
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass

from flopwatch.errors import FlopwatchError

_GREETING = struct.Struct("<8sI16s32s")
"""What a child sends first: the protocol's name, its rank, a random number, and a proof that it knows the token."""
_PROTOCOL = b"flopw/1\n"
_PROOF_BYTES = hashlib.sha256().digest_size
_LENGTH = struct.Struct("<Q")
_CONNECT_SECONDS = 10.0
_GREETING_SECONDS = 5.0
"""A connection that has not sent its greeting by then is closed: it is not from a rank of this run."""
_MOST_STRANGERS = 64
"""How many connections without a greeting are kept; when there are more, the oldest is closed."""
_BACKLOG = 128
_TCP_OPTIONS = {
    "TCP_KEEPIDLE": 30,
    "TCP_KEEPALIVE": 30,
    "TCP_KEEPINTVL": 10,
    "TCP_KEEPCNT": 9,
    "TCP_USER_TIMEOUT": 120_000,  # in milliseconds; for data that was sent but not acknowledged
}
"""A host that no longer answers is noticed after two minutes; a shorter interruption loses nothing."""
_SIOCGIFADDR = 0x8915
_ANYWHERE = "192.0.2.1", 9
"""An address reserved for documentation; no packet is sent to it (see `_route_to`)."""


class Sockets:
    """The open sockets of a link. `end` makes every wait on one of them return, in all threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self.ended = threading.Event()

    def add(self, new: socket.socket) -> socket.socket:
        new.settimeout(None)  # a program may have set another default for all new sockets
        with self._lock:
            self._open.add(new)
            if self.ended.is_set():
                shut_down(new)
        return new

    def drop(self, *sockets: socket.socket) -> None:
        """Shut down and close sockets."""
        for each in sockets:
            with self._lock:
                self._open.discard(each)
            shut_down(each)
            each.close()

    def end(self) -> None:
        with self._lock:
            self.ended.set()
            shut_down(*self._open)

    def close(self) -> None:
        """Shut down and close all sockets."""
        with self._lock:
            still_open = list(self._open)
        self.drop(*still_open)

    def forget(self) -> None:
        """In a forked process, close the copied sockets. `shutdown` would end the parent process's connections too."""
        for each in list(self._open):
            each.close()
        self.__init__()  # type: ignore[misc]  # the lock may have been held at the fork
        self.ended.set()


def shut_down(*sockets: socket.socket) -> None:
    """Make every wait on these sockets return."""
    for each in sockets:
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


def connect(host: str, port: int, seconds: float, sockets: Sockets) -> socket.socket:
    """Connect to a host, at most for `seconds` per address.

    `socket.create_connection` does the same, but its socket would not be among `sockets` while it connects, so
    `sockets.end()` would not end the wait for a host that does not answer.
    """
    failure: OSError = ConnectionAbortedError("the monitor is being closed")
    for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        if sockets.ended.is_set():
            break
        try:
            new = sockets.add(socket.socket(family, kind, protocol))
        except OSError as error:  # for example, this host has no IPv6
            failure = error
            continue
        try:
            new.settimeout(seconds)
            new.connect(address)
        except OSError as error:
            failure = error
            sockets.drop(new)
        else:
            return sockets.add(new)
    raise failure


def new_token() -> str:
    """A secret of one run, which its ranks get from the job's store."""
    return secrets.token_hex(32)


def listen(store_host: str | None, sockets: Sockets) -> socket.socket:
    """Listen at an address of this host that the ranks on other hosts can reach."""
    for address in _own_addresses(store_host):
        with suppress(OSError):
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            return sockets.add(socket.create_server((address, 0), family=family, backlog=_BACKLOG))
    raise FlopwatchError("this host has no address at which other ranks could reach it; set GLOO_SOCKET_IFNAME")


def address_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"{host}:{port}"


@dataclass(frozen=True, slots=True)
class Call:
    """A child's connection to its parent, which has not answered the greeting yet."""

    connection: socket.socket
    answer: bytes

    def is_ringing(self, seconds: float) -> bool:
        """Wait for the parent's first byte; True if none has arrived after `seconds`."""
        self.connection.settimeout(seconds)
        try:
            self.connection.recv(1, socket.MSG_PEEK)
        except TimeoutError:
            return True
        finally:
            self.connection.settimeout(None)
        return False

    def answered(self) -> socket.socket:
        """Wait for the parent's answer. Raises an error unless it proves that the parent knows the token."""
        if not hmac.compare_digest(receive(self.connection, _PROOF_BYTES), self.answer):
            raise FlopwatchError("the address of another rank belongs to a program that is not part of this run")
        return self.connection


def call(address: str, token: str, rank: int, sockets: Sockets) -> Call:
    """Connect to the parent and greet it. The kernel keeps the connection until the parent accepts it."""
    host, _, port = address.rpartition(":")
    connection = connect(host, int(port), _CONNECT_SECONDS, sockets)
    _tune(connection)
    nonce = secrets.token_bytes(16)
    send(connection, _GREETING.pack(_PROTOCOL, rank, nonce, _proof(token, "child", rank, nonce)))
    return Call(connection, _proof(token, "parent", rank, nonce))


def arrivals(
    listener: socket.socket, token: str, ranks: Collection[int], seconds: float, sockets: Sockets
) -> Iterator[tuple[int, socket.socket]]:
    """Yield the connection of each of the ranks as it arrives, at most for `seconds`; other connections are closed."""
    missing, ends = set(ranks), time.monotonic() + seconds
    listener.setblocking(False)  # a connection may already be closed when it is accepted
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        strangers: dict[socket.socket, _Stranger] = {}
        while missing and (left := ends - time.monotonic()) > 0 and not sockets.ended.is_set():
            for key, _ in selector.select(min(left, _GREETING_SECONDS)):
                if key.fileobj is listener:
                    _accept(listener, selector, strangers, sockets)
                    continue
                stranger: _Stranger = key.data
                rank = stranger.rank(token)
                if rank is None and stranger.may_still_greet:
                    continue
                selector.unregister(stranger.connection)
                del strangers[stranger.connection]
                if rank in missing and stranger.admit(token):
                    missing.remove(rank)
                    yield rank, stranger.connection
                else:
                    sockets.drop(stranger.connection)
            late = [each for each in strangers.values() if time.monotonic() > each.ends]
            for stranger in [*late, *list(strangers.values())[: max(0, len(strangers) - _MOST_STRANGERS)]]:
                if strangers.pop(stranger.connection, None) is not None:
                    selector.unregister(stranger.connection)
                    sockets.drop(stranger.connection)
        sockets.drop(*strangers)


class _Stranger:
    """A connection that has not proved yet that it is from a child."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.ends = time.monotonic() + _GREETING_SECONDS
        self.may_still_greet = True
        self._received = b""
        self._greeting: tuple[int, bytes] | None = None

    def rank(self, token: str) -> int | None:
        """Read what has arrived; return the rank once its greeting is complete and proves that it knows the token."""
        with suppress(BlockingIOError):
            try:
                received = self.connection.recv(_GREETING.size - len(self._received))
            except ConnectionError:
                received = b""
            self._received += received
            self.may_still_greet = bool(received) and len(self._received) < _GREETING.size
        if len(self._received) < _GREETING.size:
            return None
        protocol, rank, nonce, proof = _GREETING.unpack(self._received)
        if protocol != _PROTOCOL or not hmac.compare_digest(proof, _proof(token, "child", rank, nonce)):
            return None
        self._greeting = rank, nonce
        return int(rank)

    def admit(self, token: str) -> bool:
        """Answer the greeting; False if the connection is already closed."""
        assert self._greeting is not None
        self.connection.settimeout(None)
        _tune(self.connection)
        try:
            send(self.connection, _proof(token, "parent", *self._greeting))
        except OSError:
            return False
        return True


def _accept(
    listener: socket.socket,
    selector: selectors.BaseSelector,
    strangers: dict[socket.socket, _Stranger],
    sockets: Sockets,
) -> None:
    try:
        connection = sockets.add(listener.accept()[0])
    except BlockingIOError:
        return
    except OSError:  # the listener has been shut down, or the process has too many open files
        sockets.ended.wait(0.1)
        return
    connection.setblocking(False)
    stranger = strangers[connection] = _Stranger(connection)
    selector.register(connection, selectors.EVENT_READ, stranger)


def _proof(token: str, sender: str, rank: int, nonce: bytes) -> bytes:
    return hmac.digest(token.encode(), f"{sender} {rank} ".encode() + nonce, "sha256")


def _tune(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _TCP_OPTIONS.items():
        if hasattr(socket, name):  # no system has all of these
            with suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def send(connection: socket.socket, message: bytes) -> None:
    connection.sendall(message)


def receive(connection: socket.socket, size: int) -> bytes:
    """Receive exactly `size` bytes. Blocks the calling thread without holding the GIL."""
    message = connection.recv(size, socket.MSG_WAITALL)
    while len(message) < size:
        if not (more := connection.recv(size - len(message))):
            raise ConnectionError("the other rank has closed the connection")
        message += more
    return message


def send_sized(connection: socket.socket, message: bytes) -> None:
    send(connection, _LENGTH.pack(len(message)))
    send(connection, message)


def receive_sized(connection: socket.socket) -> bytes:
    (size,) = _LENGTH.unpack(receive(connection, _LENGTH.size))
    return receive(connection, size)


def _own_addresses(store_host: str | None) -> Iterator[str]:
    """Addresses of this host, the best first."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if interface:
        with suppress(OSError, ImportError):
            yield _address_of_interface(interface)
    if store_host is not None:
        route = _route_to(store_host, 1)
        # Many systems resolve the name of the host itself to 127.0.1.1, where no other host can reach this one. If the
        # store is at an address such as 127.0.0.1, however, all ranks are on this host.
        if route is not None and _is_loopback(route) and not _is_loopback(store_host):
            route = _route_to(*_ANYWHERE) or route
        if route is not None:
            yield route
    with suppress(OSError):
        yield socket.gethostbyname(socket.gethostname())
    yield "127.0.0.1"


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def _route_to(host: str, port: int) -> str | None:
    """The address from which this host sends to another one. Connecting a UDP socket sends nothing."""
    try:
        for family, kind, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
    except OSError:
        pass
    return None


def _address_of_interface(name: str) -> str:
    """The IPv4 address of a network interface such as `eth0` (Linux)."""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", name[:15].encode())
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
