"""The line between two hosts delays, loses and can be cut, and leaves nothing behind."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from testbeds import slow_link as slow_link_module
from testbeds.slow_link import ADDRESSES, need_slow_link, slow_link

pytestmark = pytest.mark.slow

PORT = 9000
ANSWER = f"""
import socket
here = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
here.bind(("{ADDRESSES["a"]}", {PORT}))
print("ready", flush=True)
while True:
    message, sender = here.recvfrom(100)
    here.sendto(message, sender)
"""
ASK = f"""
import json, socket, sys, time
here = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
here.settimeout(float(sys.argv[2]))
seconds = []
for number in range(int(sys.argv[1])):
    began = time.perf_counter()
    here.sendto(b"%d" % number, ("{ADDRESSES["a"]}", {PORT}))
    try:
        while here.recv(100) != b"%d" % number:
            pass
        seconds.append(time.perf_counter() - began)
    except TimeoutError:
        pass
print(json.dumps(seconds))
"""


def round_trips(link, count, patience_seconds):
    """Seconds of those that came back."""
    command = [sys.executable, "-c", ASK, str(count), str(patience_seconds)]
    done = subprocess.run(link.command_in("b", command), capture_output=True, text=True, check=True, timeout=60)
    return json.loads(done.stdout)


@pytest.fixture
def answering():
    """Starts what answers on host a; yields the function."""
    started = []

    def answer(link):
        command = link.command_in("a", [sys.executable, "-c", ANSWER])
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        assert started[-1].stdout.readline() == "ready\n"

    yield answer
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_round_trip_takes_at_least_twice_the_delay_and_some_packets_are_lost(answering):
    need_slow_link()
    with slow_link(delay_ms=10, loss=0.3, seed=1) as link:
        answering(link)
        seconds = round_trips(link, 20, patience_seconds=0.2)
        assert 0 < len(seconds) < 20
        assert min(seconds) >= 0.02
        assert link.counts()["lost"] > 0


def test_nothing_arrives_while_the_line_is_cut_and_it_does_again_when_mended(answering):
    need_slow_link()
    with slow_link() as link:
        answering(link)
        assert len(round_trips(link, 3, patience_seconds=5)) == 3
        link.cut()
        assert round_trips(link, 2, patience_seconds=0.2) == []
        link.mend()
        assert len(round_trips(link, 3, patience_seconds=5)) == 3


def test_the_hosts_are_gone_afterwards():
    need_slow_link()
    with slow_link() as link:
        paths = [Path(path) for path in link.namespaces.values()]
        assert all(path.exists() for path in paths)
    assert link.process.returncode == 0
    assert not any(path.exists() for path in paths)


@pytest.fixture
def asked_anew():
    slow_link_module.why_not.cache_clear()
    yield
    slow_link_module.why_not.cache_clear()
