"""The agents of a trial's nodes and their supervisor: who is listened to, when all begin, and who is the cause."""

import json
import socket
import threading
import time

import pytest

from flopwatch.sweep.supervisor.ranks import TOKEN, JobNodes

SECRET = "s3cret"


@pytest.fixture
def nodes():
    nodes = JobNodes(2, {TOKEN: SECRET})
    nodes.opened = []
    yield nodes
    for connection in nodes.opened:
        connection.close()
    nodes.close()


def connected(nodes, *messages):
    connection = socket.create_connection(("127.0.0.1", nodes.port), timeout=5)
    nodes.opened.append(connection)
    for message in messages:
        connection.sendall(message if isinstance(message, bytes) else (json.dumps(message) + "\n").encode())
    return connection


def agent(nodes, node, token=SECRET):
    port = {"port": 4711 if node == 0 else None}
    return connected(nodes, {"token": token, "node": node, "host": f"n{node}"}, port)


def attend(nodes):
    # At least so many times, because a busy machine may take the whole while for one.
    ends, times = time.monotonic() + 0.3, 0
    while time.monotonic() < ends or times < 20:
        nodes.poll(0.02)
        times += 1


def test_all_are_told_where_to_meet_once_all_have_come(nodes):
    first = agent(nodes, 0)
    attend(nodes)
    first.settimeout(0.1)
    with pytest.raises(TimeoutError):
        first.recv(100)
    second = agent(nodes, 1)
    attend(nodes)
    assert first.recv(100) == second.recv(100) == b'{"begin": 4711}\n'
    assert not nodes.is_over


@pytest.mark.slow
@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\xff\xfe\x00\n",
        b"[" * 3_000 + b"\n",
        b"[" * 200_000 + b"\n",
        b"x" * 100_000,
        {"token": "wrong", "node": 1},
        {"token": "\ud800", "node": 1},
        {"token": None, "gone": 1, "why": "", "is_lost": True},
        {"token": SECRET, "node": 7},
        {"token": SECRET, "node": "1"},
    ],
)
def test_a_stranger_is_not_listened_to_and_disturbs_nobody(nodes, said):
    own = agent(nodes, 0)
    try:
        stranger = connected(nodes, said)
        attend(nodes)
        assert stranger.recv(100) == b""
    except (ConnectionError, BrokenPipeError):
        pass  # hung up on while it still spoke
    other = agent(nodes, 1)
    attend(nodes)
    assert own.recv(100) == other.recv(100) == b'{"begin": 4711}\n'
    assert not nodes.is_over


def obedient(*agents):
    """Agents that go when they are told to; what they heard."""
    heard = []

    def obey(connection):
        said = b""
        while b"end" not in said:
            said += connection.recv(100)
        heard.append(said)
        connection.close()

    for connection in agents:
        threading.Thread(target=obey, args=[connection], daemon=True).start()
    return heard


def ended(nodes, connection, **ranks):
    told = {rank[1:]: {"status": status, "exception": exception} for rank, (status, exception) in ranks.items()}
    connection.sendall((json.dumps({"ended": {"code": 1, "ranks": told}}) + "\n").encode())


def test_the_cause_is_waited_for_when_a_process_has_only_lost_its_peer(nodes):
    first, second = agent(nodes, 0), agent(nodes, 1)
    attend(nodes)
    ended(nodes, first, r0=(1, {"type": "RuntimeError", "lost_peer": True, "unix_time": 1.0}))
    attend(nodes)
    assert nodes.is_over
    ended(nodes, second, r1=(-9, None))
    obedient(first, second)
    end = nodes.finish(at_once=False)
    assert (end.first.rank, end.first.host, end.first.status) == (1, "n1", -9)


def test_a_node_that_goes_without_a_word_is_lost_and_named(nodes):
    first, second = agent(nodes, 0), agent(nodes, 1)
    attend(nodes)
    second.close()
    ended(nodes, first, r0=(1, {"type": "RuntimeError", "lost_peer": True, "unix_time": 1.0}))
    obedient(first)
    end = nodes.finish()
    assert end.lost == "node 1 (n1) of 2 was lost"
    assert end.lost_host == "n1"


def test_every_agent_is_told_to_end(nodes):
    agents = [agent(nodes, 0), agent(nodes, 1)]
    attend(nodes)
    heard = obedient(*agents)
    nodes.finish(at_once=True)
    assert heard == [b'{"begin": 4711}\n{"end": true}\n'] * 2
