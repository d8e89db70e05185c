"""One trial under its supervisor, with shell commands as trials: what is told, limited, kept and cleaned up."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from flopwatch.records.sweep_results import read_result
from flopwatch.records.trial import Limits, TrialSpec
from flopwatch.records.trial_files import log_file, trial_folder
from flopwatch.sweep.folder import Trial, held_folder, prepare
from flopwatch.sweep.host.memory import limit_memory
from flopwatch.sweep.supervisor.supervise import AlreadyStartedError, supervise
from support.sweeping import left_behind


@pytest.fixture
def sweep(tmp_path):
    with held_folder(tmp_path / "sweep"):
        pass  # not held on: its thread and the forks of these tests do not go together
    return tmp_path / "sweep"


def ready(sweep, command, name="one", **changes):
    spec = replace(TrialSpec("command", "tiny", 3, 7, command=command, limits=Limits(60.0, None)), **changes)
    prepare(Trial(sweep, name, "key", spec))
    return name


def run(sweep, command, **changes):
    """In a process of its own, as engines do."""
    name = ready(sweep, command, **changes)
    subprocess.run([sys.executable, "-m", "flopwatch.sweep.supervisor", str(sweep), name], check=True)
    return read_result(trial_folder(sweep, name) / "result.json")


def supervise_in_a_fork(sweep, name):
    """With what a test has patched, and without the test's own children below it."""
    child = os.fork()
    if not child:
        try:
            supervise(sweep, name)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    return read_result(trial_folder(sweep, name) / "result.json")


def test_a_commands_output_and_settings(sweep):
    result = run(
        sweep,
        "echo batch {batch_size} of {seq_len} lr {lr} ${FLOPWATCH_BATCH_SIZE} '{json}'; sleep 1",
        options={"lr": 0.1},
    )
    assert result.outcome == "ok"
    assert log_file(sweep, "one").read_text() == "batch 3 of 7 lr 0.1 3 {json}\n"
    assert result.measured.memory.host_bytes > 2**19
    assert result.command == f"flopwatch trial --spec {trial_folder(sweep, 'one').resolve()}/spec.json"


def test_a_settings_quotes_stay_inside_it(sweep):
    run(sweep, "echo {word}", options={"word": "'; touch owned; '"})
    assert log_file(sweep, "one").read_text() == "'; touch owned; '\n"


def test_numbers_a_command_reports(sweep):
    told = {"step_seconds": [0.5, 0.5, 0.5], "tokens_per_s": 12, "mfu": 0.4, "note": "x"}
    result = run(
        sweep,
        "echo '" + json.dumps(told) + "' > $FLOPWATCH_TRIAL_DIR/metrics.json",
    )
    assert result.measured.steps.median == 0.5
    assert result.measured.tokens_per_s == 12
    assert result.measured.cost.mfu == 0.4
    assert result.measured.extra == {"tokens_per_s": 12.0, "mfu": 0.4}


@pytest.mark.slow
def test_a_time_limit_is_told_from_a_hang(sweep):
    timeout = run(sweep, "while true; do echo alive; sleep 0.1; done", limits=Limits(1.5, 1.0))
    assert (timeout.outcome, timeout.evidence["killed_by"]) == ("timeout", "flopwatch")
    assert (timeout.phase, timeout.reason) == ("run", "not done after 1.5 s"), "nobody knows its step"
    hang = run(sweep, "echo begun; sleep 100", name="two", limits=Limits(60.0, 1.0))
    assert hang.outcome == "hang"
    assert hang.reason.startswith("no output for ")
    assert " in " not in hang.reason
    assert "begun" in hang.log_tail


@pytest.mark.slow
def test_a_command_that_will_not_go_is_killed(sweep):
    result = run(sweep, "trap '' TERM; while true; do sleep 0.1; done", limits=Limits(0.5, None))
    assert result.outcome == "timeout"
    assert result.evidence["signal"] == "SIGKILL"


def test_nothing_is_run_twice(sweep):
    run(sweep, "echo ran")
    name = "one"
    with pytest.raises(AlreadyStartedError):
        supervise(sweep, name)
    again = subprocess.run(
        [sys.executable, "-m", "flopwatch.sweep.supervisor", str(sweep), name],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "nothing was run" in again.stderr
    assert log_file(sweep, name).read_text() == "ran\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_supervisor_told_to_stop_takes_the_trial_along(sweep, number):
    name = ready(sweep, "setsid sleep 100 & sleep 100")
    supervisor = subprocess.Popen([sys.executable, "-m", "flopwatch.sweep.supervisor", str(sweep), name])
    _until(lambda: len(left_behind(sweep)) >= 3)
    supervisor.send_signal(number)
    assert supervisor.wait(20) == 0
    assert read_result(trial_folder(sweep, name) / "result.json").outcome == "cancelled"
    assert left_behind(sweep) == []


def test_a_supervisor_dies_with_its_parent(sweep):
    name = ready(sweep, "setsid sleep 100 & sleep 100")
    code = "import subprocess, sys, time; subprocess.Popen(sys.argv[1:]); time.sleep(100)"
    command = [sys.executable, "-m", "flopwatch.sweep.supervisor", str(sweep), name]
    parent = subprocess.Popen([sys.executable, "-c", code, *command])
    _until(lambda: len(left_behind(sweep)) >= 3)
    parent.kill()
    parent.wait()
    _until(lambda: (trial_folder(sweep, name) / "result.json").exists())
    assert left_behind(sweep) == []


@pytest.mark.parametrize("kind", ["cgroup", "rlimit"])
def test_a_memory_limit_is_a_host_out_of_memory(sweep, monkeypatch, kind):
    if kind == "cgroup":
        probe = limit_memory(2**28, "probe")
        probe.close()
        if probe.kind != "cgroup":
            pytest.skip("no cgroup may be made here")
    else:
        monkeypatch.setattr("flopwatch.sweep.host.memory.group_places", list)
    # Without a cgroup the supervisor measures the memory now and then, so the process must not end at once.
    command = f"exec {sys.executable} -c 'import time; held = bytearray(1 << 29); time.sleep(50)'"
    name = ready(sweep, command, limits=Limits(60.0, None, 2**28))
    result = supervise_in_a_fork(sweep, name)
    assert result.outcome == "oom_host"
    assert result.evidence["memory_limit"]["by"] == kind
    assert ("oom_kills" in result.evidence) is (kind == "cgroup")


def test_a_trial_within_its_memory_limit_is_ok(sweep):
    assert (
        run(sweep, f"exec {sys.executable} -c 'held = bytearray(1 << 26)'", limits=Limits(60.0, None, 2**28)).outcome
        == "ok"
    )


def test_the_result_is_whole_json(sweep):
    run(sweep, "printf '\\377\\000 odd bytes'; exit 1")
    content = json.loads((trial_folder(sweep, "one") / "result.json").read_text())
    assert content["outcome"] == "error"
    assert "odd bytes" in content["log_tail"]


def _until(holds, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.02)
        os.sched_yield()
