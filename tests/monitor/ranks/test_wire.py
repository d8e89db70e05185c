"""What connects to a rank is a rank of the same run, or nothing is read from it and nobody waits for it."""

import socket
import threading
from contextlib import suppress

import pytest

from flopwatch.errors import FlopwatchError
from flopwatch.monitor.ranks import wire

SECONDS = 30.0


@pytest.fixture
def sockets():
    opened = wire.Sockets()
    yield opened
    opened.close()


@pytest.fixture
def listener(sockets):
    return wire.listen("127.0.0.1", sockets)


def connect(listener: socket.socket, sockets: wire.Sockets) -> socket.socket:
    connection = sockets.add(socket.create_connection(listener.getsockname()))
    connection.settimeout(SECONDS)
    return connection


def first_child(listener, token, sockets) -> tuple[int, socket.socket] | None:
    return next(wire.arrivals(listener, token, [3], SECONDS, sockets), None)


def is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


def sent(listener, sockets, message):
    connection = connect(listener, sockets)
    connection.sendall(message)
    return connection


def gone(listener, sockets):
    connection = connect(listener, sockets)
    connection.close()
    return connection


def silent_address(sockets) -> tuple[str, int]:
    """An address that answers no attempt to connect, as that of a host which is switched off."""
    full = sockets.add(socket.create_server(("127.0.0.1", 0), backlog=0))
    host, port = full.getsockname()
    with suppress(TimeoutError):
        while True:  # until its queue is full
            sockets.add(socket.create_connection((host, port), timeout=0.2))
    return host, port


STRANGERS = {
    "silent": connect,
    "garbage": lambda listener, sockets: sent(listener, sockets, b"GET / HTTP/1.1\r\n\r\n" * 10),
    "half a greeting": lambda listener, sockets: sent(listener, sockets, b"flopw/1\n"),
    "wrong token": lambda listener, sockets: (
        wire.call(wire.address_of(listener), wire.new_token(), 3, sockets).connection
    ),
    "gone again": gone,
}


@pytest.mark.parametrize("stranger", STRANGERS)
def test_strangers_are_closed_and_keep_no_child_waiting(listener, sockets, stranger, monkeypatch):
    monkeypatch.setattr(wire, "_GREETING_SECONDS", 2 * SECONDS)  # a silent one would block all others by then
    token = wire.new_token()
    unwelcome = [STRANGERS[stranger](listener, sockets) for _ in range(3)]
    call = wire.call(wire.address_of(listener), token, 3, sockets)

    arriving = wire.arrivals(listener, token, [3], SECONDS, sockets)
    rank, connection = next(arriving)
    wire.send_sized(connection, b"the plan")
    assert list(arriving) == []

    assert rank == 3
    assert wire.receive_sized(call.answered()) == b"the plan"
    assert stranger == "gone again" or all(is_closed(each) for each in unwelcome)


def test_silence_is_ended_after_a_while(listener, sockets, monkeypatch):
    monkeypatch.setattr(wire, "_GREETING_SECONDS", 0.1)
    silent = connect(listener, sockets)
    threading.Thread(target=first_child, args=(listener, "", sockets), daemon=True).start()
    assert is_closed(silent)


def test_many_silent_connections_do_not_pile_up(listener, sockets, monkeypatch):
    monkeypatch.setattr(wire, "_MOST_STRANGERS", 2)
    silent = [connect(listener, sockets) for _ in range(5)]
    threading.Thread(target=first_child, args=(listener, "", sockets), daemon=True).start()
    assert all(is_closed(each) for each in silent[:3])


@pytest.mark.parametrize("rank", [2, 4])
def test_a_rank_that_reports_to_another_one_is_refused(listener, sockets, rank):
    token = wire.new_token()
    call = wire.call(wire.address_of(listener), token, rank, sockets)
    threading.Thread(target=first_child, args=(listener, token, sockets), daemon=True).start()
    with pytest.raises(ConnectionError):
        call.answered()


def test_a_child_reads_no_plan_from_a_program_without_the_token(sockets):
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        call = wire.call(wire.address_of(impostor), wire.new_token(), 3, sockets)
        other, _ = impostor.accept()
        with other:
            other.sendall(bytes(1000))
            with pytest.raises(FlopwatchError, match="not part of this run"):
                call.answered()


@pytest.mark.parametrize("waits", ["for a message", "for an answer", "for children", "for a connection"])
def test_a_wait_ends_when_the_sockets_end(listener, sockets, waits):
    call = wire.call(wire.address_of(listener), wire.new_token(), 3, sockets)
    silent = silent_address(sockets)
    ended = []

    def wait():
        try:
            if waits == "for a message":
                wire.receive(call.connection, 512)
            elif waits == "for an answer":
                call.is_ringing(10 * SECONDS)
                call.answered()
            elif waits == "for a connection":
                wire.connect(*silent, 10 * SECONDS, sockets)
            else:
                assert first_child(listener, "", sockets) is None
        except ConnectionError:
            pass
        ended.append(waits)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    thread.join(0.2)
    assert not ended
    sockets.end()
    thread.join(SECONDS / 2)
    assert ended == [waits]


def test_a_connection_made_after_the_end_does_not_wait(listener, sockets):
    sockets.end()
    with pytest.raises(ConnectionError):
        wire.call(wire.address_of(listener), wire.new_token(), 3, sockets).answered()


def test_a_default_timeout_of_the_program_does_not_end_a_connection(monkeypatch, sockets):
    socket.setdefaulttimeout(0.01)
    try:
        listener = wire.listen("127.0.0.1", sockets)
        token = wire.new_token()
        call = wire.call(wire.address_of(listener), token, 3, sockets)
        _, connection = first_child(listener, token, sockets)
        assert (call.connection.gettimeout(), connection.gettimeout()) == (None, None)
    finally:
        socket.setdefaulttimeout(None)


def test_if_the_store_is_at_a_loopback_address_all_ranks_are_on_this_host():
    assert next(wire._own_addresses("127.0.0.1")) == "127.0.0.1"


def test_the_address_is_that_of_the_interface_that_gloo_is_told_to_use(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eth0")
    assert next(wire._own_addresses("192.0.2.7")) == "127.0.0.1"


def test_an_interface_that_does_not_exist_is_passed_over(monkeypatch, sockets):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nothing0")
    assert wire.address_of(wire.listen("127.0.0.1", sockets)).startswith("127.0.0.1:")


def test_a_host_whose_name_leads_to_itself_is_reached_at_its_address_in_the_network(monkeypatch):
    outside = wire._route_to(*wire._ANYWHERE)
    if outside is None:
        pytest.skip("this machine has no network")
    look_up = socket.getaddrinfo
    monkeypatch.setattr(  # as in /etc/hosts of Debian
        socket,
        "getaddrinfo",
        lambda host, *more, **options: look_up("127.0.1.1" if host == "node0" else host, *more, **options),
    )
    assert wire._route_to("node0", 1) == "127.0.0.1"
    assert next(wire._own_addresses("node0")) == outside
