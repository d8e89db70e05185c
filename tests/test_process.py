"""Whether a process is alive is said only of processes of this boot and this container, and never raises."""

import os
import subprocess
import sys

import pytest

from flopwatch import process

pytestmark = pytest.mark.skipif(not process.pid_scope(), reason="needs /proc")


def identity_of(pid):
    return {"pid": pid, "start_ticks": process.start_ticks(pid), **process.pid_scope()}


@pytest.mark.parametrize(
    ("value", "is_off"),
    [
        ("1", True),
        ("true", True),
        ("yes", True),
        ("0", False),
        ("", False),
        ("False", False),
        ("no", False),
        ("OFF", False),
    ],
)
def test_a_variable_that_says_no_does_not_switch_flopwatch_off(monkeypatch, value, is_off):
    monkeypatch.setenv("FLOPWATCH_DISABLE", value)
    assert process.is_switched_off() is is_off


def test_a_process_is_alive_until_it_is_reaped_and_dead_as_a_zombie():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    identity = identity_of(child.pid)
    assert process.is_alive(identity) is True
    child.stdin.close()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
    assert process.is_alive(identity) is False
    child.wait()
    assert process.is_alive(identity) is False


def test_another_process_with_the_same_pid_is_not_the_one_that_was_noted():
    own = process.own_identity()
    assert process.is_alive({**own, "start_ticks": own["start_ticks"] - 1}) is False


@pytest.mark.parametrize(
    "change", [{"boot_id": "another"}, {"pid_namespace": "pid:[1]"}, {"pid": "x"}, {"pid": 10**30}]
)
def test_of_other_machines_containers_and_damaged_files_nothing_is_known(change):
    assert process.is_alive({**process.own_identity(), **change}) is None


@pytest.mark.parametrize("content", [None, "text", 7, [], {}])
def test_what_is_no_identity_is_unknown(content):
    assert process.is_alive(content) is None


def test_a_name_with_parentheses_does_not_hide_the_parent():
    script = "import ctypes; ctypes.CDLL(None).prctl(15, b'a) S (b', 0, 0, 0); print(flush=True); input()"
    child = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    child.stdout.readline()
    try:
        assert process.read_stat(child.pid).parent == os.getpid()
    finally:
        child.communicate()
