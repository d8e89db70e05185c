"""A sweep that outlives its terminal: detached, attached to, stopped, ended by SIGTERM or by its budget."""

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time

import psutil
import pytest

from flopwatch.records.sweep_results import read_results
from support.sweeping import left_behind
from support.warm_sweep import WITHOUT_TORCH, flopwatch_warm

pytestmark = pytest.mark.slow

FLOPWATCH = [sys.executable, "-m", "flopwatch"]


@pytest.fixture(autouse=True)
def own_place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLOPWATCH_SLOT_DIR", str(tmp_path / "slots"))
    monkeypatch.setenv("COLUMNS", "100")


def flopwatch(*words, code=0):
    done = flopwatch_warm(*words, modules=WITHOUT_TORCH)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def until(holds, seconds=40.0):
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.02)


def outcomes(folder):
    return {name: result.outcome for name, result in read_results(folder).items()}


def words(command, sizes="1,2,3"):
    return ["sweep", "--command", command, f"batch_size={sizes}", "seq_len=8", "-o", "s", "--in-order"]


HOLD = "while ! test -e ../go && ! test -e go; do sleep 0.05; done"


def runner_pid(tmp_path):
    return json.loads((tmp_path / "s" / "runner.json").read_text())["pid"]


@pytest.fixture
def detached(tmp_path):
    """A sweep of three trials that wait for a file, run by a process nobody here started; ended at the end."""
    text = flopwatch(*words(HOLD), "--detach")
    pid = runner_pid(tmp_path)
    yield text, psutil.Process(pid)
    if psutil.pid_exists(pid):
        os.kill(pid, signal.SIGTERM)
        until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


def test_a_detached_sweep_runs_in_a_session_of_its_own_and_says_how_to_see_it(tmp_path, detached):
    text, runner = detached
    assert "flopwatch sweep attach s" in text
    assert "flopwatch sweep stop s" in text
    assert os.getsid(runner.pid) == runner.pid
    assert runner.terminal() is None
    assert "another sweep is running" in flopwatch(*words(HOLD), "--detach", code=2)
    resume = "3 trials have no result yet; run the same sweep command again to resume"
    until(lambda: left_behind(tmp_path / "s"))
    seen = " ".join(flopwatch("report", "s").split())
    assert "3 trials have no result yet; the sweep is running; to see it: flopwatch sweep attach s" in seen
    far = {"host": "far", "boot_id": "of another host"}
    for files, change, told in (
        (("runner.json", "runners/*.runner"), far, f"if process {runner.pid} on far still runs"),
        (("runner.json",), {"stopping": "over"}, resume),
    ):
        copy = tmp_path / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(tmp_path / "s", copy)
        for file in (found for pattern in files for found in copy.glob(pattern)):
            file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
        assert told in " ".join(flopwatch("report", "copy").split())
    (tmp_path / "go").touch()
    seen = flopwatch("sweep", "attach", "s")
    assert "No process runs the sweep in s any more. Next: flopwatch report s" in seen
    assert set(outcomes(tmp_path / "s").values()) == {"ok"}
    assert "Next: flopwatch report s" in (tmp_path / "s" / "runner.log").read_text()


def test_ctrl_c_leaves_the_viewer_and_not_the_sweep(tmp_path, detached):
    main, other = pty.openpty()
    viewer = subprocess.Popen([*FLOPWATCH, "sweep", "attach", "s"], stdout=other, stderr=other, stdin=other)
    os.close(other)
    seen = b""
    while b"Command_bs1_seq8" not in seen or b"0 of 3" not in seen:
        seen += os.read(main, 65536)
    viewer.send_signal(signal.SIGINT)
    while True:
        try:
            seen += os.read(main, 65536)
        except OSError:
            break
    os.close(main)
    assert viewer.wait(30) == 0
    assert "The sweep is still running. Show it again" in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen.decode())
    assert detached[1].is_running()
    (tmp_path / "go").touch()
    flopwatch("sweep", "attach", "s")
    assert len(outcomes(tmp_path / "s")) == 3


def test_stop_finishes_what_runs_and_a_second_one_ends_it(tmp_path, detached):
    until(lambda: left_behind(tmp_path / "s"))
    assert "which finishes running trials; a second stop ends them" in flopwatch("sweep", "stop", "s")
    until(lambda: json.loads((tmp_path / "s" / "runner.json").read_text())["stopping"] == "finish")
    assert detached[1].is_running()
    assert "which ends running trials" in flopwatch("sweep", "stop", "s")
    psutil.wait_procs([detached[1]], timeout=30)
    until(lambda: json.loads((tmp_path / "s" / "runner.json").read_text())["stopping"] == "over")
    assert outcomes(tmp_path / "s") == {"Command_bs1_seq8": "cancelled"}
    assert left_behind(tmp_path / "s") == []
    assert "no process runs the sweep in s" in flopwatch("sweep", "stop", "s", code=2)
    assert "3 trials left" in flopwatch("sweep", "attach", "s", code=1)


def test_a_detached_sweep_that_cannot_begin_says_why(tmp_path):
    assert "cannot name 'speed'" in flopwatch(*words("true"), "--exclude", "speed>1", "--detach", code=2)
    flopwatch(*words("true"))
    assert "with another configuration" in flopwatch(*words("true"), "steps=99", "--detach", code=2)


def test_a_killed_runner_is_not_taken_for_one_that_runs(tmp_path, detached):
    detached[1].kill()
    until(lambda: not psutil.pid_exists(detached[1].pid) or detached[1].status() == psutil.STATUS_ZOMBIE)
    assert "No process runs the sweep" in flopwatch("sweep", "attach", "s", code=1)
    assert "no process runs the sweep in s" in flopwatch("sweep", "stop", "s", code=2)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (["attach", "nowhere"], "nowhere is not the folder of a sweep"),
        (["stop", "a", "b"], "takes one folder"),
        (["attach"], "flopwatch-sweep is not the folder of a sweep"),
    ],
)
def test_what_is_no_sweep(said, told):
    assert told in flopwatch("sweep", *said, code=2)


def test_sigterm_ends_it_and_writes_what_is_known(tmp_path):
    process = subprocess.Popen([*FLOPWATCH, *words("sleep 300")], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    until(lambda: left_behind(tmp_path / "s"))
    process.send_signal(signal.SIGTERM)
    text = process.communicate(timeout=40)[0].decode()
    assert process.returncode == 130
    assert "3 trials left; run the same command again to resume." in text
    assert outcomes(tmp_path / "s") == {"Command_bs1_seq8": "cancelled"}
    assert left_behind(tmp_path / "s") == []


def test_after_the_budget_the_rest_is_left_and_the_status_says_so(tmp_path):
    text = flopwatch(*words("sleep 1.5"), "--budget", "1s", code=75)
    assert "The budget is used up: 2 trials left; run the same command again to resume." in text
    assert outcomes(tmp_path / "s") == {"Command_bs1_seq8": "ok"}
    assert "is not a duration" in flopwatch(*words("true"), "--budget", "soon", code=2)


def test_a_supervisor_that_is_killed_is_tried_again_as_often_as_asked(tmp_path):
    """Its parent is killed by the trial itself, each time it runs."""
    text = flopwatch(*words("kill -9 $PPID; sleep 300", "1"), "--retries", "1", code=1)
    assert "retrying (1 of 1)" in text
    (result,) = read_results(tmp_path / "s").values()
    assert (result.outcome, len(result.earlier_attempts)) == ("lost", 1)
    assert left_behind(tmp_path / "s") == []
    assert "--retry-on must be one of crash" in flopwatch(*words("true"), "--retry-on", "ok", code=2)
