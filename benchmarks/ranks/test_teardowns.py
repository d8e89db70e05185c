"""A short form of benchmarks/ranks/teardowns.py: trainings that are torn down end as they do without the monitor."""

import doctest
import faulthandler
import json
import os
import subprocess
import sys
import threading

import pytest

from flopwatch.monitor.ranks import exchange, job_store
from flopwatch.monitor.ranks.job_store import RunKey
from ranks import teardowns

COUNT = 2


def torn_down(kinds, folder):
    # In a process of its own, which has no thread when it forks the ranks. One for all kinds: its imports take longest.
    command = [sys.executable, teardowns.__file__, "--kinds", *kinds, "--count", str(COUNT), "--control", "0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command += ["--folder", str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found = next(json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))["kinds"]
    assert [kind["teardowns"] for kind in found] == [COUNT] * len(kinds), done.stderr
    return [kind["kind"] for kind in found if kind["as_without"] < COUNT], done.stderr


def test_a_hang_is_told_by_the_main_thread(tmp_path, monkeypatch):
    assert doctest.testmod(teardowns).failed == 0
    asked, answers = threading.Event(), threading.Event()

    def find_no_store():
        asked.set()
        answers.wait()

    monkeypatch.setattr(job_store, "find_job_store", find_no_store)
    link = exchange.RankLink(RunKey(0, 1, "log"), 1, 2)  # its thread is always there, and never a hang
    asked.wait()
    with open(tmp_path / "stacks", "w+") as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        stacks = file.read()
    answers.set()
    link.leave()
    assert "/flopwatch/monitor/" in stacks
    assert teardowns.place_of_hang(stacks) == "in Python"


@pytest.mark.slow
def test_trainings_torn_down_at_a_random_moment_end_as_without_the_monitor(tmp_path):
    failed, told = torn_down(teardowns.KINDS, tmp_path / "first")
    if failed:
        # torch's gloo hangs and aborts now and then without the monitor too; what the monitor breaks fails again.
        failed, again = torn_down(failed, tmp_path / "again")
        assert failed == [], told + again
