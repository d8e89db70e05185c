"""The Slurm engine against commands that answer as a Slurm in trouble does: scripts in place of sbatch and its like."""

import os
from dataclasses import replace

import pytest

from flopwatch.files import write_json
from flopwatch.records.trial import TrialResult
from flopwatch.records.trial_files import trial_folder
from flopwatch.sweep.engines import slurm as slurm_module
from flopwatch.sweep.engines.protocol import ending_from_evidence
from flopwatch.sweep.engines.slurm import SlurmEngine, SubmissionError
from support.engines import contract
from testbeds.wait_until import wait_until

STANDBY = "sbatch: error: Batch job submission failed: Slurm controller in standby mode"


class PretendedSlurm:
    """Answers what the test writes: `say("sbatch", code, out, err)`. Each call is noted in `calls`."""

    def __init__(self, folder, monkeypatch):
        self.folder = folder
        folder.mkdir()
        for command in ("sbatch", "squeue", "scancel", "sacct", "scontrol"):
            self.say(command)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def say(self, command, code=0, out="", err=""):
        file = self.folder / command
        (self.folder / f"{command}.out").write_text(out)
        (self.folder / f"{command}.err").write_text(err)
        note = f'echo "{command} $*" >> {self.folder}/calls'
        file.write_text(f"#!/bin/sh\n{note}\ncat {file}.out; cat {file}.err >&2; exit {code}\n")
        file.chmod(0o755)

    def calls(self, command):
        file = self.folder / "calls"
        lines = file.read_text().splitlines() if file.exists() else []
        return [line for line in lines if line.startswith(command)]


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    monkeypatch.setattr(slurm_module, "_FIRST_PAUSE_SECONDS", 0.05)
    monkeypatch.setattr(slurm_module, "_LONGEST_PAUSE_SECONDS", 0.2)
    return PretendedSlurm(tmp_path / "bin", monkeypatch)


def opened(tmp_path, count=2, **settings):
    trials = contract.make_trials(tmp_path / "s", *["true"] * count)
    engine = SlurmEngine(**settings)
    engine.open(tmp_path / "s", [])
    return engine, trials


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        STANDBY,
        "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)",
        "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation",
        "sbatch: error: Batch job submission failed: Required partition not available (inactive or drain)",
        "sbatch: error: something nobody has ever read",
        "",
    ],
)
def test_an_error_nobody_knows_is_waited_out_and_told(tmp_path, slurm, words):
    engine, trials = opened(tmp_path)
    slurm.say("sbatch", 1, err=words)
    engine.submit(trials)
    wait_until(lambda: not engine.wait(0.1) and len(slurm.calls("sbatch")) > 2, "the engine tries again")
    assert "2 held back, next try in" in engine.state()
    assert words in engine.state()
    assert engine.room(trials[0].spec) == 0
    slurm.say("sbatch", 0, out="77\n")
    wait_until(lambda: not engine.wait(0.1) and "held back" not in engine.state(), "Slurm took them")


@pytest.mark.parametrize(
    "words",
    [
        "sbatch: error: invalid partition specified: nowhere\nsbatch: error: Invalid partition name specified",
        "sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified",
        "sbatch: error: Batch job submission failed: Requested time limit is invalid (missing or exceeds some limit)",
        "sbatch: error: Batch job submission failed: Requested node configuration is not available",
        "sbatch: error: Batch job submission failed: Invalid qos specification",
        "sbatch: unrecognized option '--speed=9'",
    ],
)
def test_a_bad_request_ends_those_trials_at_once_with_slurms_words(tmp_path, slurm, words):
    engine, trials = opened(tmp_path)
    slurm.say("sbatch", 1, err=words)
    engine.submit(trials)
    ends = contract.run_all_placed(engine, trials)
    assert sorted(ends) == ["t0", "t1"]
    outcome, reason = ending_from_evidence(ends["t0"])
    assert outcome == "invalid"
    assert words.splitlines()[-1] in reason
    assert "--only failed" in reason
    assert len(slurm.calls("sbatch")) == 1
    assert engine.room(trials[0].spec) > 0


def test_a_full_queue_is_no_failure_though_its_words_name_limits(tmp_path, slurm):
    words = "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)"
    assert SubmissionError(words).kind == "full"


def test_a_submission_whose_answer_was_lost_is_looked_for_and_not_repeated(tmp_path, slurm):
    engine, trials = opened(tmp_path)
    slurm.say("sbatch", 1, err="sbatch: error: Batch job submission failed: Socket timed out on send/recv operation")
    engine.submit(trials)
    (script,) = (tmp_path / "s" / "slurm").glob("*.sh")
    slurm.say("squeue", out=f"91_0|PENDING|{script}\n91_1|RUNNING|{script}\n")
    before = len(slurm.calls("sbatch"))
    wait_until(lambda: not engine.wait(0.1) and engine.state() == "1 running, 1 queued", "it was found")
    assert len(slurm.calls("sbatch")) == before


def test_while_squeue_is_silent_too_nothing_is_submitted_again(tmp_path, slurm):
    engine, trials = opened(tmp_path)
    slurm.say("sbatch", 1, err=STANDBY)
    slurm.say("squeue", 1)
    engine.submit(trials)
    engine.wait(0.5)
    assert len(slurm.calls("sbatch")) == 1


def test_a_controller_that_was_away_for_days_is_still_asked(tmp_path, slurm):
    slurm.say("sbatch", 1, err=STANDBY)
    engine, trials = opened(tmp_path, patience_hours=1000)
    engine.submit(trials)
    (array,) = engine._submissions._arrays
    array.tries, array.next_try = 2000, 0.0
    assert engine.wait(0.1) == []
    assert array.tries > 2000


def test_patience_ends_and_the_trials_are_lost_with_slurms_last_words(tmp_path, slurm):
    engine, trials = opened(tmp_path, patience_hours=0.3 / 3600)
    slurm.say("sbatch", 1, err=STANDBY)
    engine.submit(trials)
    ends = contract.run_all_placed(engine, trials)
    outcome, reason = ending_from_evidence(ends["t1"])
    assert outcome == "lost"
    assert "standby mode" in reason


def test_what_slurm_has_not_taken_is_withdrawn_and_an_array_it_took_unheard_is_cancelled(tmp_path, slurm):
    engine, trials = opened(tmp_path)
    slurm.say("sbatch", 1, err=STANDBY)
    engine.submit(trials)
    (script,) = (tmp_path / "s" / "slurm").glob("*.sh")
    slurm.say("squeue", out=f"91_0|PENDING|{script}\n91_1|PENDING|{script}\n")
    assert sorted(engine.withdraw()) == ["t0", "t1"]
    assert slurm.calls("scancel") == ["scancel 91"]
    assert not engine.wait(0.1)


def test_the_node_that_lost_a_trial_is_excluded_and_taken_back_when_no_other_fits(tmp_path, slurm):
    engine, trials = opened(tmp_path, 1)
    slurm.say("sbatch", 0, out="5\n")
    engine.submit([replace(trials[0], avoid=("n7",))])
    (script,) = (tmp_path / "s" / "slurm").glob("*.sh")
    assert "#SBATCH --exclude=n7" in script.read_text()
    other, _ = opened(tmp_path, 1)
    slurm.say("sbatch", 1, err="Batch job submission failed: Requested node configuration is not available")
    other.submit([replace(trials[0], avoid=("n7",))])
    (second,) = set((tmp_path / "s" / "slurm").glob("*.sh")) - {script}
    assert "exclude" not in second.read_text()
    assert len(slurm.calls("sbatch")) == 3


@pytest.mark.slow
def test_a_trial_that_waits_long_for_another_node_may_run_on_any(tmp_path, slurm, monkeypatch):
    monkeypatch.setattr(slurm_module, "_AVOID_SECONDS", 0.1)
    engine, trials = opened(tmp_path, 1)
    slurm.say("sbatch", 0, out="5\n")
    engine.submit([replace(trials[0], avoid=("n7",))])
    slurm.say("squeue", out="5_0|PENDING|x\n")
    wait_until(lambda: not engine.wait(0.1) and slurm.calls("scontrol"), "the exclusion is lifted")
    engine.wait(1.5)
    assert slurm.calls("scontrol") == ["scontrol update jobid=5_0 excnodelist="]


def test_a_requeued_task_is_adopted_though_its_first_life_left_a_result(tmp_path, slurm):
    first, trials = opened(tmp_path)
    slurm.say("sbatch", 0, out="5\n")
    first.submit(trials)
    (script,) = (tmp_path / "s" / "slurm").glob("*.sh")
    for trial, outcome in zip(trials, ("cancelled", "ok"), strict=True):
        result = TrialResult(trial.name, trial.key, trial.spec, outcome)
        write_json(trial_folder(tmp_path / "s", trial.name) / "result.json", result.to_json())
    slurm.say("squeue", out=f"5_0|PENDING|{script}\n5_1|COMPLETING|{script}\n")
    assert list(SlurmEngine().open(tmp_path / "s", trials)) == ["t0"]
