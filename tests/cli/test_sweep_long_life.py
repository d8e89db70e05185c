"""A sweep that runs elsewhere: shown by `flopwatch watch`, stopped by signals, ended by its budget."""

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from flopwatch.files import read_object
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
    return ["sweep", "--command", command, f"--batch-size={sizes}", "--seq-len=8", "-o", "s"]


HOLD = "while ! test -e ../go && ! test -e go; do sleep 0.05; done"


@pytest.fixture
def elsewhere(tmp_path):
    """A sweep of three trials that wait for a file, as nohup starts one; ended at the end."""
    process = subprocess.Popen(
        [*FLOPWATCH, *words(HOLD)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    until(lambda: left_behind(tmp_path / "s"))
    until(lambda: read_object(tmp_path / "s" / "runner.json").get("running_count"))
    yield process
    process.terminate()
    process.communicate(timeout=40)


def test_a_sweep_is_watched_from_another_terminal_until_it_ends(tmp_path, elsewhere):
    assert "another sweep is running" in flopwatch(*words(HOLD), code=2)
    seen = " ".join(flopwatch("report", "s").split())
    assert "3 trials have no result yet; the sweep is running; to see it: flopwatch watch s" in seen
    seen = flopwatch("watch", "s", "--once")
    assert re.search(rf"1 trial running on \S+ \(pid {elsewhere.pid}\), 2 waiting", seen)
    resume = "3 trials have no result yet; run the same sweep command again to resume"
    far = {"host": "far", "boot_id": "of another host"}
    for files, change, told in (
        (("runner.json", "runners/*.runner"), far, f"if process {elsewhere.pid} on far still runs"),
        (("runner.json",), {"stopping": "over"}, resume),
    ):
        copy = tmp_path / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(tmp_path / "s", copy)
        for file in (found for pattern in files for found in copy.glob(pattern)):
            file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
        assert told in " ".join(flopwatch("report", "copy").split())
    (tmp_path / "go").touch()
    seen = flopwatch("watch", "s")
    assert "[3/3] Command_bs" in seen
    assert "No process runs the sweep in s. Next: flopwatch report s" in seen
    assert set(outcomes(tmp_path / "s").values()) == {"ok"}
    assert "Next: flopwatch report s" in elsewhere.communicate(timeout=40)[0].decode()


def test_ctrl_c_leaves_the_viewer_and_not_the_sweep(tmp_path, elsewhere):
    main, other = pty.openpty()
    viewer = subprocess.Popen([*FLOPWATCH, "watch", "s"], stdout=other, stderr=other, stdin=other)
    os.close(other)
    seen = b""
    while b"Command_bs" not in seen or b"0 of 3" not in seen:
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
    assert elsewhere.poll() is None


def test_the_first_ctrl_c_finishes_what_runs_and_the_second_ends_it(tmp_path, elsewhere):
    elsewhere.send_signal(signal.SIGINT)
    until(lambda: read_object(tmp_path / "s" / "runner.json").get("stopping") == "finish")
    assert elsewhere.poll() is None
    elsewhere.send_signal(signal.SIGINT)
    text = elsewhere.communicate(timeout=40)[0].decode()
    assert "finishing running trials; Ctrl-C again ends them" in text
    assert "ending running trials" in text
    assert list(outcomes(tmp_path / "s").values()) == ["cancelled"]
    assert left_behind(tmp_path / "s") == []
    assert "3 trials left" in flopwatch("watch", "s", code=1)


def test_a_killed_runner_is_not_taken_for_one_that_runs(tmp_path, elsewhere):
    elsewhere.kill()
    elsewhere.wait()
    assert "No process runs the sweep" in flopwatch("watch", "s", code=1)


def test_a_sweep_that_waits_for_a_core_says_whose_it_is(tmp_path, elsewhere):
    second = words("true", "1")
    second[-1] = "second"
    process = subprocess.Popen([*FLOPWATCH, *second], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    until(lambda: "waiting for core" in str(read_object(tmp_path / "second" / "runner.json").get("engine_state")))
    seen = flopwatch("watch", "second", "--once")
    assert f"waiting for core 0 (pid {elsewhere.pid}, sweep in {tmp_path / 's'})" in seen
    (tmp_path / "go").touch()
    assert process.communicate(timeout=60)[0].decode().count("Command_bs1_seq8 ok") == 1


def test_sigterm_ends_it_and_writes_what_is_known(tmp_path):
    process = subprocess.Popen([*FLOPWATCH, *words("sleep 300")], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    until(lambda: left_behind(tmp_path / "s"))
    process.send_signal(signal.SIGTERM)
    text = process.communicate(timeout=40)[0].decode()
    assert process.returncode == 130
    assert "3 trials left; run the same command again to resume." in text
    assert list(outcomes(tmp_path / "s").values()) == ["cancelled"]
    assert left_behind(tmp_path / "s") == []


def test_after_the_budget_the_rest_is_left_and_the_status_says_so(tmp_path):
    text = flopwatch(*words("sleep 1.5"), "--budget", "1s", code=75)
    assert "The budget is used up: 2 trials left; run the same command again to resume." in text
    assert list(outcomes(tmp_path / "s").values()) == ["ok"]
    assert "is not a duration" in flopwatch(*words("true"), "--budget", "soon", code=2)


def test_a_supervisor_that_is_killed_is_tried_again_as_often_as_asked(tmp_path):
    """Its parent is killed by the trial itself, each time it runs."""
    text = flopwatch(*words("kill -9 $PPID; sleep 300", "1"), "retries=1", code=1)
    assert "retrying (1 of 1)" in text
    (result,) = read_results(tmp_path / "s").values()
    assert (result.outcome, len(result.earlier_attempts)) == ("lost", 1)
    assert left_behind(tmp_path / "s") == []
    assert "retry_on must be one of crash" in flopwatch(*words("true"), "retry_on=ok", code=2)
