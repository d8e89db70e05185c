import os
import pty
import subprocess
import sys

import pytest

from support.sinks.fresh_python import fresh_environment
from support.sinks.wandb_file import find_file, read_config, read_exit_code, read_history, read_kind

pytestmark = pytest.mark.slow

PREPARED = """
import os, signal, sys, threading, time
from pathlib import Path
from flopwatch.sinks.thread import SinkThread
from flopwatch.sinks.wandb import WandbSink
from support.sinks.sample_run import ORIGIN, START, records, rows, summary

folder = Path(sys.argv[1])
failures = []

def write(records, **init):
    thread = SinkThread(WandbSink(folder, **init), lambda name, error: failures.append(str(error)))
    for record in records:
        thread.put(record)
    return thread

def wait_for_first_row(thread):
    assert thread.flush(300), failures
"""

CLOSE = "\nassert thread.close(60) and not failures, failures\n"


@pytest.fixture
def run_python(tmp_path):
    """Runs code in a fresh interpreter: W&B leaves traces in its process."""

    def run(code, expect=0, **environment):
        done = subprocess.run(
            [sys.executable, "-c", PREPARED + code, str(tmp_path)],
            capture_output=True,
            text=True,
            timeout=300,
            env=fresh_environment(**environment),
        )
        assert done.returncode == expect, done.stderr
        return done

    return run


def test_the_active_run_is_used_on_request_and_not_finished(run_python, tmp_path):
    run_python("""
import wandb
mine = wandb.init(dir=folder, project="mine")
thread = write(records(), into_active_run=True)
assert thread.close(60) and not failures, failures
assert wandb.run is mine
mine.log({"after": 1})
mine.finish(exit_code=7)
""")
    file = find_file(tmp_path)
    assert [row.get("after") for row in read_history(file)] == [None] * 6 + [1]
    assert read_exit_code(file) == 7


def test_a_run_that_is_started_between_the_start_and_the_first_row_is_found(run_python, tmp_path):
    run_python("""
import wandb
thread = write([START, ORIGIN])
mine = wandb.init(dir=folder, id="mine")
for row in rows():
    thread.put(row)
assert thread.close(60) and not failures, failures
mine.finish()
""")
    (file,) = tmp_path.glob("wandb/offline-run-*/run-mine-flopwatch.wandb")
    assert len(read_history(file)) == 6
    assert read_config(file)["flopwatch"]["run"]["session"] == "5e55104"


def test_a_run_of_our_own_changes_no_signal_handler_and_captures_no_output(run_python, tmp_path):
    run_python("""
import wandb  # its import alone wraps sys.stdout.write; what follows must add nothing

def state():
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    return handlers, sys.stdout, sys.stderr, sys.stdout.write, os.getcwd(), threading.excepthook

before = state()
thread = write(records()[:-1])
wait_for_first_row(thread)
print("a line of the training")
assert state() == before
assert thread.close(60) and not failures, failures
assert state() == before
""")
    assert not read_kind(find_file(tmp_path), "output_raw")
    assert not read_kind(find_file(tmp_path), "output")


@pytest.mark.parametrize(("end", "status"), [("raise ValueError('boom')", 1), ("sys.exit(3)", 3), ("", 0)])
def test_the_training_keeps_its_exit_status_and_its_one_traceback(run_python, end, status):
    done = run_python(f"thread = write(records()[:-1])\nwait_for_first_row(thread)\n{end}", expect=status)
    assert done.stderr.count("ValueError: boom") == (1 if status == 1 else 0)


def test_wandb_switched_off_is_no_failure(run_python, tmp_path):
    run_python("thread = write(records())" + CLOSE, WANDB_MODE="disabled")
    assert not list(tmp_path.glob("wandb/*run-*"))


def test_without_an_account_the_sink_fails_and_asks_nobody_on_the_terminal(tmp_path):
    """On a real terminal, where W&B would put a question and wait."""
    code = PREPARED + "thread = write(records())\n(folder / 'seen').write_text(f'{thread.close(60)} {failures}')\n"
    script = tmp_path / "script.py"
    script.write_text(code)
    home = tmp_path / "home"
    home.mkdir()
    environment = fresh_environment(
        HOME=str(home), NETRC=str(home / "netrc"), WANDB_CONFIG_DIR=str(home), WANDB_MODE="online", TERM="xterm"
    )
    environment.pop("WANDB_API_KEY", None)
    process, terminal = pty.fork()
    if process == 0:
        os.execve(sys.executable, [sys.executable, str(script), str(tmp_path)], environment)
    printed = read_all(terminal)
    _, status = os.waitpid(process, 0)
    assert os.waitstatus_to_exitcode(status) == 0, printed
    seen = (tmp_path / "seen").read_text()
    assert seen.startswith("True")
    assert "WANDB_MODE=offline" in seen
    assert "choice" not in printed.lower()


def read_all(terminal):
    printed = b""
    try:
        while piece := os.read(terminal, 65536):
            printed += piece
    except OSError:  # Linux' way to say that the other side is closed
        pass
    os.close(terminal)
    return printed.decode()
