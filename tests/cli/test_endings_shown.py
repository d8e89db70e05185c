"""How a run ended is told by its log: by itself, by an exception, by Ctrl-C, or by a kill that left no word."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from flopwatch.runs import read_log
from support.warm_python import start_warm
from testbeds.wait_until import wait_until

pytestmark = pytest.mark.slow

TRAINING = """
import sys, time, torch
from flopwatch import TrainingMonitor
model = torch.nn.Linear(8, 8)
def train(monitor):
    for number in range(25):
        with monitor.step(torch.randn(4, 8)) as step:
            step.log(loss=2.5)
    BODY
HOW
"""
HOWS = {
    "as a context": (
        "with TrainingMonitor(sys.argv[1], model=model, log_every=10, sinks=['console']) as monitor:\n"
        "    train(monitor)"
    ),
    "closed in finally": (
        "monitor = TrainingMonitor(sys.argv[1], model=model, log_every=10)\n"
        "try:\n    train(monitor)\nfinally:\n    monitor.close()"
    ),
    "never closed": "monitor = TrainingMonitor(sys.argv[1], model=model, log_every=10)\ntrain(monitor)",
}


def start(folder, body, how="as a context"):
    return start_warm(code_of(body, how), str(folder))


def code_of(body, how="as a context"):
    return TRAINING.replace("BODY", body).replace("HOW", HOWS[how])


def wait_for_rows(folder):
    wait_until((Path(folder) / "waiting").exists, "25 steps were made", seconds=120.0)


WAIT = "open(sys.argv[1] + '/waiting', 'w').close(); time.sleep(300)"


@pytest.mark.parametrize("how", HOWS)
def test_an_exception_is_named_and_the_loss_it_knows_stays(flopwatch, tmp_path, how):
    process = start(tmp_path, "monitor.log_step(25); raise RuntimeError('the disk is\\nfull')", how)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 1, err
    log = read_log(tmp_path / "training_log.jsonl")
    assert log.summary.ended_by == "RuntimeError: the disk is"
    assert log.summary.values["training/loss"] == 2.5
    _, shown, _ = flopwatch("watch", str(tmp_path))
    assert "failed: RuntimeError" in shown.splitlines()[0]
    assert "RuntimeError: the disk is" in shown.partition("\n")[2]
    assert "2.500" in shown
    if how == "as a context":
        assert "The run was ended at step 25 by RuntimeError: the disk is" in out


@pytest.mark.parametrize("how", HOWS)
def test_ctrl_c_is_named(flopwatch, tmp_path, how):
    process = start(tmp_path, WAIT, how)
    wait_for_rows(tmp_path)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=120)
    assert read_log(tmp_path / "training_log.jsonl").summary.ended_by == "KeyboardInterrupt"
    _, shown, _ = flopwatch("watch", str(tmp_path))
    assert "stopped by Ctrl-C" in shown.splitlines()[0]
    assert " left" not in shown


@pytest.mark.parametrize("body", ["pass", "sys.exit(0)"])
def test_a_run_that_ends_by_itself_is_ended(flopwatch, tmp_path, body):
    start(tmp_path, body).communicate(timeout=120)
    assert read_log(tmp_path / "training_log.jsonl").summary.ended_by is None
    _, shown, _ = flopwatch("watch", str(tmp_path))
    assert "ended" in shown.splitlines()[0]


def test_a_run_that_was_killed_is_called_dead_at_once_and_has_no_time_left(flopwatch, tmp_path):
    # A child of ours, so that it can be left a zombie.
    process = subprocess.Popen([sys.executable, "-c", code_of(WAIT), str(tmp_path)], stdout=subprocess.DEVNULL)
    wait_for_rows(tmp_path)
    log = tmp_path / "training_log.jsonl"
    wait_until(lambda: log.exists() and '"row"' in log.read_text(), "the log is flushed, which is every 5 seconds")
    _, shown, _ = flopwatch("watch", str(tmp_path))
    assert "running" in shown.splitlines()[0]
    process.kill()
    # A large process takes a moment to end after the signal: wait for the end, and leave the zombie.
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    _, shown, _ = flopwatch("watch", str(tmp_path))
    assert "died" in shown.splitlines()[0], "killed, and not yet waited for by its parent"
    process.wait(60)
    _, shown, _ = flopwatch("watch", str(tmp_path))
    assert "died: killed or crashed, or its log is cut" in shown.splitlines()[0]
    assert " left" not in shown
