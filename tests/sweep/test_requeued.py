"""The second life of a job that Slurm requeued; Slurm's environment is pretended, the supervisor is real."""

import json
import os
import subprocess
import sys

import pytest

from flopwatch.files import write_json
from flopwatch.records.sweep_results import read_result
from flopwatch.records.trial import TrialResult
from flopwatch.records.trial_files import trial_folder
from flopwatch.sweep.attempts import prepare_after_requeue
from support.engines import contract


def life(restarts, job="12", task="0"):
    return {"SLURM_ARRAY_JOB_ID": job, "SLURM_ARRAY_TASK_ID": task, "SLURM_RESTART_COUNT": str(restarts)}


def started(trial, restarts=0, job="12_0"):
    facts = {"pid": 1, "host": "n1", "unix_time": 5.0, "job": job, "restarts": restarts}
    write_json(trial_folder(trial.sweep, trial.name) / "started.json", facts)


def result_of(trial):
    return read_result(trial_folder(trial.sweep, trial.name) / "result.json")


def trial_in(sweep, command="true", retries=2):
    (trial,) = contract.make_trials(sweep, command)
    spec = trial_folder(sweep, trial.name) / "spec.json"
    write_json(spec, {**json.loads(spec.read_text()), "retries": retries})
    return trial


def supervise(trial, environment):
    command = [sys.executable, "-m", "flopwatch.sweep.supervisor", str(trial.sweep), trial.name]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=True)


def test_a_requeued_job_runs_its_trial_and_keeps_the_first_attempt(tmp_path):
    trial = trial_in(tmp_path, "echo $SLURM_RESTART_COUNT > {trial_dir}/life")
    started(trial)
    write_json(
        trial_folder(tmp_path, "t0") / "result.json",
        TrialResult("t0", "key0", trial.spec, "cancelled", seconds=3.0).to_json(),
    )
    (tmp_path / "logs" / "t0.log").write_text("of the first life")
    supervise(trial, life(1))
    result = result_of(trial)
    assert result.outcome == "ok"
    (attempt,) = result.earlier_attempts
    assert (attempt["outcome"], attempt["host"], attempt["seconds"]) == ("lost", "n1", 3.0)
    assert (tmp_path / attempt["folder"] / "log.txt").read_text() == "of the first life"
    assert (trial_folder(tmp_path, "t0") / "life").read_text() == "1\n"


@pytest.mark.parametrize(
    ("restarts", "claimed"),
    [(0, {"restarts": 0}), (1, {"restarts": 1}), (1, {"job": "11_0"}), (1, {"job": "12_1"})],
)
def test_what_another_job_or_this_life_has_begun_is_left_alone(tmp_path, restarts, claimed):
    trial = trial_in(tmp_path)
    started(trial, **claimed)
    told = supervise(trial, life(restarts)).stderr
    assert "nothing was run" in told
    assert result_of(trial) is None


@pytest.mark.parametrize("outcome", ["ok", "error", "oom_host"])
def test_what_had_ended_before_is_not_run_again(tmp_path, outcome):
    trial = trial_in(tmp_path, "echo > {trial_dir}/ran")
    started(trial)
    write_json(trial_folder(tmp_path, "t0") / "result.json", TrialResult("t0", "key0", trial.spec, outcome).to_json())
    supervise(trial, life(1))
    assert result_of(trial).outcome == outcome
    assert not (trial_folder(tmp_path, "t0") / "ran").exists()


def test_a_job_that_is_requeued_again_and_again_is_lost_in_the_end(tmp_path):
    trial = trial_in(tmp_path, retries=2)
    for restarts in (1, 2):
        started(trial, restarts - 1)
        assert prepare_after_requeue(tmp_path, "t0", life(restarts))
    started(trial, 2)
    assert not prepare_after_requeue(tmp_path, "t0", life(3))
    assert result_of(trial).outcome == "lost"
    assert [attempt["folder"] for attempt in result_of(trial).earlier_attempts] == ["earlier/t0.1", "earlier/t0.2"]


def test_a_job_that_never_began_before_it_was_requeued_just_runs(tmp_path):
    trial = trial_in(tmp_path)
    supervise(trial, life(1))
    assert (result_of(trial).outcome, result_of(trial).earlier_attempts) == ("ok", ())
