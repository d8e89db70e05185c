"""The Slurm engine against a real slurmctld with two slurmd of two cores and two pretended GPUs, and slurmdbd."""

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from flopwatch.errors import InputError
from flopwatch.process import start_ticks
from flopwatch.sweep.engines import slurm as slurm_module
from flopwatch.sweep.engines.protocol import ending_from_evidence
from flopwatch.sweep.engines.slurm import SlurmEngine
from flopwatch.sweep.folder import Trial, prepare
from support.engines import contract
from testbeds.wait_until import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("slurm")]

TELL_GPUS = 'echo "gpus=$CUDA_VISIBLE_DEVICES" > {trial_dir}/gpus'
COUNT = "echo $$ >> {trial_dir}/../../ran-$FLOPWATCH_TRIAL_NAME; "


def run(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def evidence_of(engine, trial, after_it_began):
    """Places one trial, does something to it once it runs, and returns what the engine saw."""
    engine.open(trial.sweep, [])
    engine.submit([trial])
    contract.wait_for_file(contract.folder_of(trial) / "pid", engine)
    after_it_began()
    (evidence,) = contract.run_all_placed(engine, [trial]).values()
    engine.close()
    return evidence


def test_every_trial_ends_once_with_a_result(tmp_path):
    contract.every_trial_ends_once_with_a_result(SlurmEngine(), tmp_path)


def test_cancel_ends_everything(tmp_path):
    contract.cancel_ends_everything(SlurmEngine(), tmp_path)


def test_a_killed_supervisor_is_lost(tmp_path):
    evidence = contract.a_killed_supervisor_is_an_end_with_evidence(SlurmEngine(), tmp_path)
    assert evidence["state"] == "FAILED"
    outcome, reason = ending_from_evidence(evidence)
    assert outcome == "lost"
    assert "signal 9" in reason


def test_two_trials_of_one_gpu_on_one_node_get_different_ones_and_one_of_two_gets_both(tmp_path):
    meet = TELL_GPUS + "; touch {me}; while ! test -e {other}; do sleep 0.05; done"
    a, b = tmp_path / "a", tmp_path / "b"
    commands = [meet.replace("{me}", str(x)).replace("{other}", str(y)) for x, y in ((a, b), (b, a))]
    one_node = SlurmEngine(extra={"nodelist": "n1"})
    assert gpus_seen(one_node, tmp_path / "ones", *commands, gpus=1.0) == ["gpus=0", "gpus=1"]
    assert gpus_seen(SlurmEngine(), tmp_path / "both", TELL_GPUS, gpus=2.0) == ["gpus=0,1"]
    assert gpus_seen(SlurmEngine(gpus_per_trial=1), tmp_path / "default", TELL_GPUS) == ["gpus=0"]


def gpus_seen(engine, sweep, *commands, **settings):
    trials = contract.make_trials(sweep, *commands, **settings)
    engine.open(sweep, [])
    contract.run_all(engine, trials)
    assert [contract.outcome(trial) for trial in trials] == ["ok"] * len(trials)
    return sorted((contract.folder_of(trial) / "gpus").read_text().strip() for trial in trials)


def test_a_new_runner_waits_for_what_the_killed_one_had_submitted(tmp_path):
    """Four run at once, so that some are still pending; none is run twice, and none that ended is waited for."""
    trials = contract.make_trials(tmp_path, *[COUNT + "while ! test -e {trial_dir}/../../go; do sleep 0.05; done"] * 6)
    killed = SlurmEngine()
    killed.open(tmp_path, [])
    killed.submit(trials)
    wait_until(lambda: len(list(tmp_path.glob("ran-*"))) == 4, "four run")
    del killed

    engine = SlurmEngine()
    assert sorted(engine.open(tmp_path, trials)) == [trial.name for trial in trials]
    assert not engine.wait(1.5)
    assert engine.state() == "4 running, 2 queued"
    (tmp_path / "go").touch()
    contract.run_all_placed(engine, trials)
    assert [contract.outcome(trial) for trial in trials] == ["ok"] * 6
    assert [len((tmp_path / f"ran-{trial.name}").read_text().split()) for trial in trials] == [1] * 6
    assert list(SlurmEngine().open(tmp_path, trials)) == []


def test_what_is_queued_is_withdrawn_and_what_runs_goes_on(tmp_path):
    """As a first Ctrl-C does it: four run at once, two of the six come back unrun and can be submitted again."""
    trials = contract.make_trials(tmp_path, *[COUNT + "while ! test -e {trial_dir}/../../go; do sleep 0.05; done"] * 6)
    engine = SlurmEngine()
    engine.open(tmp_path, [])
    engine.submit(trials)
    wait_until(lambda: not engine.wait(0.1) and engine.state() == "4 running, 2 queued", "four run")
    back = list(engine.withdraw())
    assert len(back) == 2
    assert engine.withdraw() == []
    assert not engine.wait(1.5)
    assert engine.state() == "4 running, 0 queued"
    (tmp_path / "go").touch()
    ended = contract.run_all_placed(engine, [trial for trial in trials if trial.name not in back])
    assert sorted([*ended, *back]) == [trial.name for trial in trials]
    assert sorted(path.name.removeprefix("ran-") for path in tmp_path.glob("ran-*")) == sorted(ended)
    again = [trial for trial in trials if trial.name in back]
    engine.submit(again)
    contract.run_all_placed(engine, again)
    assert [contract.outcome(trial) for trial in trials] == ["ok"] * 6


def test_another_sweep_of_the_same_user_is_left_alone(tmp_path):
    (trial,) = contract.make_trials(tmp_path / "a", "echo $$ > {trial_dir}/pid; sleep 300")
    engine = SlurmEngine()
    engine.open(tmp_path / "a", [])
    engine.submit([trial])
    pid = int(contract.wait_for_file(contract.folder_of(trial) / "pid", engine))
    (tmp_path / "b").mkdir()
    other = SlurmEngine()
    assert list(other.open(tmp_path / "b", [trial])) == []
    other.cancel()
    assert start_ticks(pid) is not None
    engine.cancel()
    contract.run_all_placed(engine, [trial])


def test_more_memory_than_asked_for_is_an_out_of_memory(tmp_path):
    """Without cgroups Slurm kills everything, the supervisor too, calls it FAILED and tells why only in the output."""
    hungry = "python3 -c 'b = bytearray(600_000_000); import time; time.sleep(300)'"
    (trial,) = contract.make_trials(tmp_path, "echo $$ > {trial_dir}/pid; " + hungry)
    evidence = evidence_of(SlurmEngine(memory_megabytes=200), trial, lambda: None)
    assert contract.outcome(trial) in (None, "cancelled")
    assert ending_from_evidence(evidence)[0] == "oom_host", evidence
    assert contract.left_behind([trial]) == []


def test_a_node_that_fails_loses_its_trial(tmp_path):
    (trial,) = contract.make_trials(tmp_path, "echo $$ > {trial_dir}/pid; sleep 300")

    def fail():
        run("scontrol", "update", "nodename=n2", "state=down", "reason=test")

    try:
        evidence = evidence_of(SlurmEngine(extra={"nodelist": "n2", "no_requeue": True}), trial, fail)
    finally:
        # It may have come back by itself, and then there is nothing to resume.
        subprocess.run(["scontrol", "update", "nodename=n2", "state=resume"], capture_output=True)
        wait_until(lambda: run("sinfo", "-h", "-n", "n2", "-o", "%T").strip() == "idle", "the node is back")
    assert evidence["state"] == "NODE_FAIL"
    assert ending_from_evidence(evidence)[0] == "lost"
    wait_until(lambda: not contract.left_behind([trial]), "the node has cleaned up")


def test_a_job_that_somebody_cancels_is_cancelled(tmp_path):
    trials = contract.make_trials(tmp_path, "echo $$ > {trial_dir}/pid; setsid sleep 300 & sleep 300")
    evidence = evidence_of(SlurmEngine(), trials[0], lambda: run("scancel", "--user=root"))
    assert contract.outcome(trials[0]) == "cancelled"
    assert evidence["state"] == "CANCELLED"
    assert contract.left_behind(trials) == []


def test_a_slurm_that_does_not_answer_ends_nothing(tmp_path, monkeypatch):
    (trial,) = contract.make_trials(
        tmp_path, "echo $$ > {trial_dir}/pid; while ! test -e {trial_dir}/go; do sleep 0.05; done"
    )
    engine = SlurmEngine()
    engine.open(tmp_path, [])
    engine.submit([trial])
    contract.wait_for_file(contract.folder_of(trial) / "pid", engine)
    complaint = "slurm_load_jobs error: Unable to contact slurm controller"
    path = put_before(tmp_path / "bin", "squeue", complaint, monkeypatch)
    assert not engine.wait(2.5)
    assert engine.state().startswith("Slurm has not answered for ")
    with pytest.raises(InputError, match="Slurm does not answer"):
        SlurmEngine().open(tmp_path, [])
    monkeypatch.setenv("PATH", path)
    (contract.folder_of(trial) / "go").touch()
    contract.run_all_placed(engine, [trial])
    assert contract.outcome(trial) == "ok"


def test_a_folder_with_an_odd_name_and_trials_of_different_needs(tmp_path):
    sweep = tmp_path / 'it\'s 100%d "odd" ünd $HOME'
    small = contract.make_trials(sweep, "echo a")
    large = [Trial(sweep, "t1", "key1", replace(small[0].spec, cpus=2))]
    prepare(large[0])
    engine = SlurmEngine()
    engine.open(sweep, [])
    contract.run_all(engine, [*small, *large])
    assert [contract.outcome(trial) for trial in (*small, *large)] == ["ok", "ok"]
    assert len(list((sweep / "slurm").glob("*.sh"))) == 2
    assert len(list((sweep / "slurm").glob("*.log"))) == 2


def test_a_refused_submission_says_what_slurm_said(tmp_path):
    (trial,) = contract.make_trials(tmp_path, "true")
    engine = SlurmEngine(partition="nowhere")
    engine.open(tmp_path, [])
    engine.submit([trial])
    (evidence,) = contract.run_all_placed(engine, [trial]).values()
    outcome, reason = ending_from_evidence(evidence)
    assert outcome == "invalid"
    assert "invalid partition" in reason


def test_what_a_full_queue_does_not_take_is_submitted_later(tmp_path, monkeypatch):
    """A site's limit of submitted jobs, as sbatch words it."""
    monkeypatch.setattr(slurm_module, "_FULL_PAUSE_SECONDS", 0.5)
    trials = contract.make_trials(tmp_path, "true", "true")
    path = put_before(tmp_path / "bin", "sbatch", "sbatch: error: AssocMaxSubmitJobLimit", monkeypatch)
    engine = SlurmEngine()
    engine.open(tmp_path, [])
    engine.submit(trials)
    assert not engine.wait(1.0)
    assert engine.room(trials[0].spec) == 0
    assert engine.state() == "0 running, 0 queued, 2 held back: Slurm accepts no more jobs of this user"
    monkeypatch.setenv("PATH", path)
    contract.run_all_placed(engine, trials)
    assert [contract.outcome(trial) for trial in trials] == ["ok", "ok"]


def test_what_was_held_back_is_cancelled_too(tmp_path, monkeypatch):
    (trial,) = contract.make_trials(tmp_path, "true")
    put_before(tmp_path / "bin", "sbatch", "sbatch: error: QOSMaxSubmitJobPerUserLimit", monkeypatch)
    engine = SlurmEngine()
    engine.open(tmp_path, [])
    engine.submit([trial])
    engine.cancel()
    (evidence,) = contract.run_all_placed(engine, [trial]).values()
    assert ending_from_evidence(evidence)[0] == "cancelled"


def put_before(folder, command, complaint, monkeypatch):
    """A command of Slurm that only complains; returns the PATH that has the real one first."""
    folder.mkdir()
    (folder / command).write_text(f"#!/bin/sh\necho '{complaint}' >&2; exit 1\n")
    (folder / command).chmod(0o755)
    path = os.environ["PATH"]
    monkeypatch.setenv("PATH", f"{folder}:{path}")
    return path


def test_a_trial_is_not_run_by_two_jobs(tmp_path, monkeypatch):
    """As after a submission that only seemed to have failed: the second job finds the trial taken and leaves."""
    monkeypatch.setattr(slurm_module, "_GIVE_UP_SECONDS", 0.5)
    (trial,) = contract.make_trials(tmp_path, COUNT + "while ! test -e {trial_dir}/go; do sleep 0.05; done")
    first, second = SlurmEngine(), SlurmEngine()
    for engine in (first, second):
        engine.open(tmp_path, [])
        engine.submit([trial])
        contract.wait_for_file(tmp_path / "ran-t0")
    wait_until(lambda: len(run("squeue", "-h", "-r").split("\n")) == 2, "the second job has left")
    assert not second.wait(2.5)
    (contract.folder_of(trial) / "go").touch()
    for engine in (first, second):
        contract.run_all_placed(engine, [trial])
    assert len((tmp_path / "ran-t0").read_text().split()) == 1
    assert contract.outcome(trial) == "ok"


def test_room_keeps_the_queue_filled_in_steps_of_half(tmp_path):
    engine = SlurmEngine(queue_ahead=8)
    trials = contract.make_trials(tmp_path, *["sleep 300"] * 8, cpus=2)
    engine.open(tmp_path, [])
    assert engine.room(trials[0].spec) == 8
    engine.submit(trials[:4])
    assert engine.room(trials[0].spec) == 4
    engine.submit(trials[4:])
    wait_until(lambda: not engine.wait(0.1) and engine.state() == "2 running, 6 queued", "two run")
    assert engine.room(trials[0].spec) == 0
    engine.cancel()
    contract.run_all_placed(engine, trials)
    assert engine.room(trials[0].spec) == 8
    assert Path(tmp_path / "slurm").is_dir()
