"""Sweeps on a file system as labs have it: what other hosts write comes into sight late, and there is no flock."""

import os
import signal
import subprocess
import sys
from collections import Counter

import pytest

from flopwatch.records.sweep_results import read_results
from testbeds.nfs import on_nfs
from testbeds.wait_until import wait_until

SECONDS = 2.0

LATE = """
import errno, fcntl, os, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
print(Path("new").exists(), sorted(os.listdir(".")), Path("changed").read_text(), flush=True)
try:
    os.open("new", os.O_CREAT | os.O_EXCL)
except FileExistsError:
    print("the server knows", flush=True)
try:
    fcntl.flock(open("own", "w"), fcntl.LOCK_EX)
except OSError as error:
    print(errno.errorcode[error.errno], flush=True)
time.sleep(float(sys.argv[2]))
print(Path("new").exists(), sorted(os.listdir(".")), Path("changed").read_text(), flush=True)
"""


@pytest.mark.slow
def test_the_stand_in_shows_late_what_another_host_wrote(tmp_path):
    root = tmp_path / "nfs"
    root.mkdir()
    environment = on_nfs(root, 5.0)
    (root / "changed").write_text("before")
    write = "import os; open('new', 'w').close(); open('beside', 'w').write('after'); os.replace('beside', 'changed')"
    subprocess.run([sys.executable, "-c", write], cwd=root, env={**environment, "NFS_STANDIN_HOST": "far"}, check=True)
    seen = subprocess.run(
        [sys.executable, "-c", LATE, str(root), "5.1"],
        cwd=root,
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    assert seen.stdout.splitlines() == [
        "False [] before",
        "the server knows",
        "ENOLCK",
        "True ['changed', 'new', 'own'] after",
    ]


def start(folder, trials, environment, command="echo {batch_size} >> $STARTS; sleep 0.5"):
    sizes = ",".join(map(str, range(1, trials + 1)))
    sweep = [sys.executable, "-m", "flopwatch", "sweep", "--output", "s", "--jobs", "2"]
    own = {"STARTS": str(folder.parent / "starts.txt"), "FLOPWATCH_SLOT_DIR": str(folder.parent)}
    with (folder.parent / "errors.txt").open("ab") as errors:
        return subprocess.Popen(
            [*sweep, "--command", command, f"--batch-size={sizes}", "--seq-len=1"],
            cwd=folder,
            env={**environment, **own},
            stdout=subprocess.DEVNULL,
            stderr=errors,
        )


def starts(folder):
    file = folder.parent / "starts.txt"
    return Counter(file.read_text().split()) if file.exists() else Counter()


def all_ok(folder, trials):
    results = read_results(folder / "s")
    return [result.outcome for result in results.values()] == ["ok"] * trials


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "nfs").mkdir()
    return tmp_path / "nfs"


@pytest.mark.slow
def test_a_sweep_loses_nothing_and_runs_nothing_twice(folder):
    assert start(folder, 3, on_nfs(folder, SECONDS)).wait(120) == 0
    assert all_ok(folder, 3)
    assert set(starts(folder).values()) == {1}


@pytest.mark.slow
def test_another_host_takes_over_from_a_killed_runner(folder):
    """What had finished stands, though its result was not in sight when the runner was killed."""
    environment = on_nfs(folder, SECONDS)
    command = "echo {batch_size} >> $STARTS; until test {batch_size} -le 2 -o -e $STARTS.go; do sleep 0.1; done"
    runner = start(folder, 4, environment, command)
    wait_until(lambda: len(starts(folder)) >= 3, "a trial has ended and the next ones run")
    runner.send_signal(signal.SIGKILL)
    runner.wait()
    (folder.parent / "starts.txt.go").touch()
    assert start(folder, 4, {**environment, "NFS_STANDIN_HOST": "login2"}, command).wait(180) == 0
    assert all_ok(folder, 4)
    assert b"waiting" in (folder.parent / "errors.txt").read_bytes(), "it said why it waited"


@pytest.mark.slow
def test_of_two_runners_on_two_hosts_one_runs(folder):
    environment = on_nfs(folder, SECONDS)
    runners = [start(folder, 3, {**environment, "NFS_STANDIN_HOST": f"login{number}"}) for number in (1, 2)]
    assert sorted(runner.wait(180) for runner in runners) == [0, 2]
    assert all_ok(folder, 3)
    assert set(starts(folder).values()) == {1}
    assert b"another sweep is running" in (folder.parent / "errors.txt").read_bytes()


@pytest.mark.slow
def test_a_killed_supervisor_of_another_host_is_lost_and_tried_again(folder):
    command = "echo {batch_size} >> $STARTS; mkdir ../once && kill -9 $PPID; sleep 0.3"
    assert start(folder, 2, on_nfs(folder, SECONDS), command).wait(180) == 0
    assert all_ok(folder, 2)
    assert sorted(starts(folder).values()) == [1, 2]
    assert os.path.exists(folder / "s" / "earlier")
