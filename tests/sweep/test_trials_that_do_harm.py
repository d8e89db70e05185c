"""Trials that delete or damage their own files, and clocks that jump: told as what it is, and not run for ever."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from flopwatch.records.sweep_results import read_result
from flopwatch.records.trial import Limits, TrialSpec
from flopwatch.records.trial_files import trial_folder
from flopwatch.sweep.engines.local import LocalEngine
from flopwatch.sweep.folder import FolderGoneError, Trial, held_folder, prepare
from flopwatch.sweep.host.memory import HostPeak
from flopwatch.sweep.progress import Progress, read_progress
from flopwatch.sweep.supervisor.build_result import collect_measurements
from support.sweeping import Listener, left_behind, run_sweep
from testbeds.wait_until import wait_until

pytestmark = pytest.mark.slow


@pytest.fixture
def sweep(tmp_path):
    with held_folder(tmp_path / "sweep"):
        yield tmp_path / "sweep"


def run(sweep, command, **changes):
    """Under a supervisor in a process of its own, as engines do."""
    spec = replace(TrialSpec("command", "tiny", 3, 7, command=command, limits=Limits(60.0, None)), **changes)
    prepare(Trial(sweep, "one", "key", spec))
    subprocess.run([sys.executable, "-m", "flopwatch.sweep.supervisor", str(sweep), "one"], check=True)
    return read_result(trial_folder(sweep, "one") / "result.json")


def specs(*commands):
    return [
        TrialSpec("command", "none", batch + 1, 8, command=command, limits=Limits(60.0, None))
        for batch, command in enumerate(commands)
    ]


def test_a_trial_that_deletes_the_list_of_trials_does_not_end_the_sweep(tmp_path, monkeypatch):
    monkeypatch.setenv("FLOPWATCH_SLOT_DIR", str(tmp_path / "slots"))
    matrix = specs("true", "rm {trial_dir}/../../sweep.json {trial_dir}/../../results.jsonl", "true")
    run_sweep(tmp_path / "s", matrix, LocalEngine())
    again = Listener()
    found = run_sweep(tmp_path / "s", matrix, LocalEngine(), listener=again)
    assert again.begun == [], "the same command finds every result in the folder of its trial"
    assert [found[f"command_bs{batch}_seq8"].outcome for batch in (1, 2, 3)] == ["ok", "ok", "ok"]
    assert len(json.loads((tmp_path / "s" / "sweep.json").read_text())["trials"]) == 3


@pytest.mark.parametrize("is_made_again", [False, True])
def test_a_sweep_whose_folder_was_deleted_ends_and_does_not_make_it_again(tmp_path, monkeypatch, is_made_again):
    """Also if a new sweep runs there by then, whose runner has the same number."""
    monkeypatch.setenv("FLOPWATCH_SLOT_DIR", str(tmp_path / "slots"))
    anew = "; mkdir -p $F/runners; cp $F.runner $F/runners/1.runner" if is_made_again else ""
    (tmp_path / "s.runner").write_text('{"pid": 1, "boot_id": "", "unix_time": 1.0}')
    matrix = specs(f"F=$(realpath {{trial_dir}}/../..); rm -rf $F{anew}; sleep 60", f"touch {tmp_path}/second")
    with pytest.raises(
        FolderGoneError, match="was deleted, renamed or given to another sweep while this sweep ran in it"
    ):
        run_sweep(tmp_path / "s", matrix, LocalEngine())
    left = [path.name for path in (tmp_path / "s").rglob("*")] if (tmp_path / "s").exists() else None
    assert left == (["runners", "1.runner"] if is_made_again else None)
    assert not (tmp_path / "second").exists()
    assert left_behind(tmp_path / "s") == []


def test_the_command_says_that_its_folder_was_deleted(tmp_path, monkeypatch):
    monkeypatch.setenv("FLOPWATCH_SLOT_DIR", str(tmp_path / "slots"))
    words = ["--command", "rm -rf $(realpath {trial_dir}/../..)", "--batch-size=1,2", "--seq-len=8", "-o", "s"]
    command = [sys.executable, "-m", "flopwatch", "sweep", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, "s was deleted, renamed" in done.stderr) == (1, True), done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("jump_seconds", [-7200.0, 266_400.0])
def test_a_jump_of_the_systems_clock_does_not_change_how_long_a_trial_took(sweep, jump_seconds):
    spec = TrialSpec("command", "tiny", 3, 7, command="sleep 0.3", limits=Limits(60.0, None))
    prepare(Trial(sweep, "one", "key", spec))
    # A clock that is set between the first time it is read and the next ones.
    program = f"""
import itertools, sys, time
from pathlib import Path
from flopwatch.sweep.supervisor.supervise import supervise
real, calls = time.time, itertools.count()
time.time = lambda: real() + (0 if next(calls) < 2 else {jump_seconds})
supervise(Path(sys.argv[1]), "one")
"""
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", program, str(sweep)], check=True)
    took = time.monotonic() - began
    result = read_result(trial_folder(sweep, "one") / "result.json")
    assert 0.3 <= result.seconds <= took
    content = json.loads((trial_folder(sweep, "one") / "result.json").read_text())
    assert 0.3 <= content["seconds"] <= took


MEASURED = {"steps.jsonl": b'{"phase": "measure", "seconds": 1, "forward": 0.5, "backward": 0.25, "optimizer": 0.25}\n'}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"3",
        b'{"measured": 3}',
        b'{"measured": {"memory": {"host_bytes": "x"}}}',
        b'{"done": 1}',
        b'{"measured": {"cost": {"peak": {}, "model_flops": 1}}, "more": 1}',
        b"\xff",
        b'{"measured": {"cost": {"model_flops": 1, "peak": {"flops_per_s": "x"}}}}',
    ],
)
def test_a_measured_json_that_cannot_be_read_costs_only_itself(tmp_path, content):
    (tmp_path / "measured.json").write_bytes(content)
    (tmp_path / "steps.jsonl").write_bytes(MEASURED["steps.jsonl"])
    left = collect_measurements(tmp_path, TrialSpec("standard", "tiny", 2, 8), HostPeak(5, "samples"))
    assert (left.measured.samples_per_s, left.measured.memory.host_bytes) == (2.0, 5)
    assert (left.environment, left.done) == ({}, False)


@pytest.mark.parametrize(
    "row",
    [b"{}", b"[]", b'{"phase": "measure"}', b'{"phase": "measure", "seconds": "x"}', b'{"phase": 3, "seconds": 1}',
     b'{"phase": "measure", "seconds": 0, "forward": 0, "backward": 0, "optimizer": 0}',
     b'{"phase": "measure", "seconds": NaN, "forward": 0, "backward": 0, "optimizer": 0}', b"\0\0", b"{" * 5000],
)  # fmt: skip
def test_a_damaged_step_is_left_out(tmp_path, row):
    (tmp_path / "steps.jsonl").write_bytes(row + b"\n" + MEASURED["steps.jsonl"] + row)
    measured = collect_measurements(tmp_path, TrialSpec("standard", "tiny", 2, 8), HostPeak()).measured
    assert (measured.steps.count, measured.phase_seconds["forward"]) == (1, 0.5)


def test_numbers_of_a_command_that_no_float_holds_are_left_out(tmp_path):
    (tmp_path / "metrics.json").write_text(json.dumps({"mfu": 10**400, "loss": -(10**350), "samples_per_s": 3}))
    measured = collect_measurements(tmp_path, TrialSpec("command", "none", 4, 8, command="true"), HostPeak()).measured
    assert (measured.extra, measured.samples_per_s) == ({"samples_per_s": 3.0}, 3.0)


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"type": 3}', '{"type": "E", "message": "m", "outcome": "ok"}', "null"]
)
def test_an_exception_json_that_is_none_is_not_believed(sweep, content):
    result = run(sweep, f"echo '{content}' > {{trial_dir}}/exception.json; exit 3")
    assert (result.outcome, result.reason) == ("error", "left with exit code 3")


@pytest.mark.parametrize(
    "harm",
    [
        "mkfifo {trial_dir}/metrics.json",
        "mkdir {trial_dir}/measured.json {trial_dir}/heartbeat.json {trial_dir}/exception.json",
        "ln -s metrics.json {trial_dir}/metrics.json",
        "mkfifo {trial_dir}/training_log.jsonl {trial_dir}/heartbeat.json {trial_dir}/exception.json",
        "printf '\\377\\000{{' > {trial_dir}/training_log.jsonl",
        "echo '{\"record\": 3}' > {trial_dir}/training_log.jsonl",
    ],
)
def test_whatever_a_command_leaves_in_its_folder_it_has_an_end(sweep, harm):
    assert run(sweep, harm).outcome == "ok"


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"phase": ["measure"], "step": 1}', b'{"phase": "measure", "step": "x"}', b"\xff"]
)
def test_a_heartbeat_that_cannot_be_read_is_none(tmp_path, content):
    (tmp_path / "heartbeat.json").write_bytes(content)
    assert read_progress(tmp_path) == Progress()


def test_a_heartbeat_that_is_a_fifo_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "heartbeat.json")
    assert read_progress(tmp_path) == Progress()


@pytest.mark.parametrize("content", [None, b"", b"{}", b'{"spec": 3}', b'{"format": 2}', b"\xff"])
def test_a_supervisor_without_a_spec_it_can_read_says_so_and_runs_nothing(sweep, content, monkeypatch):
    monkeypatch.setenv("FLOPWATCH_VISIBLE_SECONDS", "0.5")
    prepare(Trial(sweep, "one", "key", TrialSpec("command", "tiny", 3, 7, command="true")))
    file = trial_folder(sweep, "one") / "spec.json"
    if content == b'{"format": 2}':
        content = json.dumps({**json.loads(file.read_text()), "format": 2}).encode()
    file.unlink()
    if content is not None:
        file.write_bytes(content)
    words = [sys.executable, "-m", "flopwatch.sweep.supervisor", str(sweep), "one"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "spec.json" in done.stderr
    assert sorted(os.listdir(file.parent)) == ([] if content is None else ["spec.json"])


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_trial_whose_guard_is_killed_is_lost_and_runs_again(tmp_path, monkeypatch):
    monkeypatch.setenv("FLOPWATCH_SLOT_DIR", str(tmp_path / "slots"))
    command = f"test -e {tmp_path}/go || (touch {tmp_path}/began; sleep 600)"
    words = ["sweep", "--command", command, "--batch-size=1", "--seq-len=8", "-o", str(tmp_path / "s")]
    runner = subprocess.Popen([sys.executable, "-m", "flopwatch", *words], stdout=subprocess.DEVNULL)
    wait_until((tmp_path / "began").exists, "the trial has begun")
    folder = tmp_path / "s/trials/Command_bs1_seq8"
    supervisor = json.loads((folder / "started.json").read_text())["pid"]
    guard = int(Path(f"/proc/{supervisor}/stat").read_text().rpartition(")")[2].split()[1])
    (tmp_path / "go").touch()
    os.kill(guard, signal.SIGKILL)
    assert runner.wait(120) == 0
    result = read_result(folder / "result.json")
    assert result.outcome == "ok"
    (lost,) = result.earlier_attempts
    assert (lost["outcome"], lost["reason"]) == ("lost", "the trial's guard process was killed by SIGKILL")
    ended = json.loads((tmp_path / "s" / lost["folder"] / "result.json").read_text())
    assert ended["reason"] == "the supervisor received SIGTERM, because its parent process was killed"
    assert left_behind(tmp_path / "s") == []
