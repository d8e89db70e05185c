"""`flopwatch trace`: asks a training in another process for a trace, and prints the use of its time."""

import json
import re
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

from flopwatch.runs.traces.files import trace_name
from support.make_run_log import write_run
from support.make_trace import steps_on_device, write_trace
from support.warm_python import start_warm

TRAIN = """
import sys
from pathlib import Path

import torch

import flopwatch

folder, is_profiling = Path(sys.argv[1]), sys.argv[2:] == ["profiling"]
model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 256))
optimizer = torch.optim.AdamW(model.parameters())
monitor = flopwatch.TrainingMonitor(folder, model=model, peak_flops_per_s=1e12, log_every=5)
mine = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
if is_profiling:
    mine.start()
step = 0
while not (folder / "stop").exists() and step < 100_000:
    batch = torch.randn(128, 256)
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    monitor.log_step(step, loss=loss, batch=batch)
    step += 1
monitor.close()
"""
USES = ("matmul", "attention", "other_kernel", "optimizer", "exposed_communication", "copy", "idle")


@contextmanager
def training(folder, *arguments):
    """A training in another process, which has written a log when the block begins."""
    process = start_warm(TRAIN, str(folder), *arguments)
    try:
        deadline = time.monotonic() + 120
        log = folder / "training_log.jsonl"
        while not log.exists() or not log.stat().st_size:  # it is created before its first record is written
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield process
        (folder / "stop").touch()
        process.wait(120)
    finally:
        process.end()


def command(*arguments):
    """The real command, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "flopwatch", "trace", *map(str, arguments)], capture_output=True, text=True, timeout=240
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
def test_a_training_in_another_process_is_traced_and_its_time_adds_up(tmp_path):
    with training(tmp_path):
        status, out, err = command(tmp_path, "--steps", 4, "--json")
        assert (status, err) == (0, "")
        (split,) = json.loads(out)["traces"]
        again = command(tmp_path, "--json")
    assert (split["steps"], split["rank"], split["device"]) == (4, 0, "cpu")
    assert sum(split[f"{use}_seconds"] for use in USES) == pytest.approx(split["seconds"], rel=1e-9)
    assert split["matmul_seconds"] > 0
    assert split["optimizer_seconds"] > 0
    assert split["hidden_communication_seconds"] == split["exposed_communication_seconds"] == 0
    (later,) = json.loads(again[1])["traces"]
    assert later["steps"] == 3
    assert later["file"] != split["file"]
    # After the run has ended, the newest trace is shown.
    status, out, err = command(tmp_path, "--json")
    assert (status, json.loads(out)["traces"]) == (0, [later])
    assert "has ended" in err


@pytest.mark.slow
def test_a_training_with_its_own_profiler_is_not_disturbed_and_the_command_says_so(tmp_path):
    with training(tmp_path, "profiling"):
        status, out, err = command(tmp_path)
    assert (status, out) == (2, "")
    assert "another profiler of this process is active" in err


def test_a_trace_file_is_printed_as_a_table_that_adds_up(flopwatch, tmp_path):
    path = write_trace(tmp_path / "mine.json.gz", steps_on_device(4))
    status, out, err = flopwatch("trace", str(path))
    assert (status, err) == (0, "")
    assert "4 steps of 1.00 ms on average (rank 0, cuda)" in out
    shares = dict(re.findall(r"^(\w[\w ]+?) +[\d.]+ ms +([\d.]+) %$", out, re.MULTILINE))
    assert shares == {
        "matmuls": "40.0",
        "attention": "10.0",
        "kernels other than matmuls": "10.0",
        "optimizer": "5.0",
        "exposed communication": "10.0",
        "copies": "5.0",
        "idle and host gaps": "20.0",
    }
    assert "Another 0.10 ms per step of communication ran behind computation" in out


def test_several_ranks_are_printed_one_after_the_other(flopwatch, tmp_path):
    write_run(tmp_path, 50, ended=True)
    (tmp_path / "traces").mkdir()
    for rank in (0, 1):
        file = tmp_path / "traces" / trace_name(9, rank)
        write_trace(file, steps_on_device(2), distributedInfo={"rank": rank})
    status, out, err = flopwatch("trace", str(tmp_path))
    assert status == 0
    assert re.findall(r"rank (\d), cuda", out) == ["0", "1"]
    assert "The run has ended; this is its newest trace." in err


def test_a_run_that_ended_without_a_trace_cannot_be_traced(flopwatch, tmp_path):
    write_run(tmp_path, 50, ended=True)
    status, out, err = flopwatch("trace", str(tmp_path))
    assert (status, out) == (2, "")
    assert "has ended and left no trace" in err
    assert "monitor.capture_trace()" in err
    assert not (tmp_path / "traces").exists()


def test_without_a_name_the_newest_run_is_meant(flopwatch, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "flopwatch-runs" / "one", 50, ended=True)
    status, _, err = flopwatch("trace")
    assert status == 2
    assert "the run in 'flopwatch-runs/one' has ended and left no trace" in err


def test_a_training_that_is_killed_ends_the_waiting(tmp_path):
    with training(tmp_path) as process:
        process.send_signal(19)  # SIGSTOP: it answers no request
        waiting = subprocess.Popen(
            [sys.executable, "-m", "flopwatch", "trace", str(tmp_path)], stderr=subprocess.PIPE, text=True
        )
        deadline = time.monotonic() + 60
        while not (tmp_path / "traces" / "request.json").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(9)
        _, err = waiting.communicate(timeout=60)
    assert waiting.returncode == 2
    assert "ended before it took the trace" in err


def test_a_run_that_has_been_silent_for_long_is_not_waited_for(flopwatch, tmp_path):
    """Its log does not tell whether it has ended on another machine."""
    write_run(tmp_path, 50)
    status, out, err = flopwatch("trace", str(tmp_path))
    assert (status, out) == (2, "")
    assert "has logged nothing for" in err
    assert "The request is written" in err


@pytest.mark.parametrize("steps", ["0", "-1", "11", "1000"])
def test_a_number_of_steps_that_is_not_allowed_is_refused(flopwatch, tmp_path, steps):
    write_run(tmp_path, 50)
    status, _, err = flopwatch("trace", str(tmp_path), "--steps", steps)
    assert status == 2
    assert f"--steps must be between 1 and 10, got {steps}" in err


def test_what_is_neither_a_run_nor_a_trace_is_refused(flopwatch, tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    for place, why in [
        ("notes.txt", "not a whole trace of torch's profiler"),
        ("nowhere", "does not exist"),
        ("", "no log"),
    ]:
        status, out, err = flopwatch("trace", str(tmp_path / place))
        assert (status, out) == (2, "")
        assert why in err or "has no training_log.jsonl" in err
