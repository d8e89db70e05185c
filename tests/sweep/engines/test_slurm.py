"""The Slurm engine against a real slurmctld with two slurmd of two cores and two pretended GPUs, and slurmdbd."""

import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

from flopwatch.errors import InputError
from flopwatch.files import read_object
from flopwatch.process import start_ticks
from flopwatch.records.trial import Limits, TrialSpec
from flopwatch.sweep.engines import slurm as slurm_module
from flopwatch.sweep.engines.protocol import ending_from_evidence
from flopwatch.sweep.engines.slurm import SlurmEngine, read_sacct, why_jobs_wait
from flopwatch.sweep.folder import Trial, prepare
from support.engines import contract
from testbeds.wait_until import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("slurm")]

FLOPWATCH = [sys.executable, "-m", "flopwatch"]
TELL_GPUS = 'echo "gpus=$CUDA_VISIBLE_DEVICES" > {trial_dir}/gpus'
COUNT = "echo $$ >> {trial_dir}/../../ran-$FLOPWATCH_TRIAL_NAME; "
GATED = COUNT + "while ! test -e {trial_dir}/../../go; do sleep 0.05; done"


@pytest.fixture(autouse=True)
def asked_often(monkeypatch):
    monkeypatch.setattr(slurm_module, "_ASK_EVERY_SECONDS", 1.0)


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
    one_node = SlurmEngine(nodelist="n1")
    assert gpus_seen(one_node, tmp_path / "ones", *commands, gpus=1.0) == ["gpus=0", "gpus=1"]
    assert gpus_seen(SlurmEngine(), tmp_path / "both", TELL_GPUS, gpus=2.0) == ["gpus=0,1"]
    assert gpus_seen(SlurmEngine(gres="gpu:1"), tmp_path / "given", TELL_GPUS) == ["gpus=0"]


def gpus_seen(engine, sweep, *commands, **settings):
    trials = contract.make_trials(sweep, *commands, **settings)
    engine.open(sweep, [])
    contract.run_all(engine, trials)
    assert [contract.outcome(trial) for trial in trials] == ["ok"] * len(trials)
    return sorted((contract.folder_of(trial) / "gpus").read_text().strip() for trial in trials)


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
    evidence = evidence_of(SlurmEngine(mem="200M"), trial, lambda: None)
    assert contract.outcome(trial) in (None, "cancelled")
    assert ending_from_evidence(evidence)[0] == "oom_host", evidence
    assert contract.left_behind([trial]) == []


def test_a_node_that_fails_loses_its_trial(tmp_path):
    (trial,) = contract.make_trials(tmp_path, "echo $$ > {trial_dir}/pid; sleep 300")

    def fail():
        run("scontrol", "update", "nodename=n2", "state=down", "reason=test")

    try:
        evidence = evidence_of(SlurmEngine(nodelist="n2"), trial, fail)
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


def put_before(folder, command, complaint, monkeypatch):
    """A command of Slurm that only complains; returns the PATH that has the real one first."""
    folder.mkdir()
    (folder / command).write_text(f"#!/bin/sh\necho '{complaint}' >&2; exit 1\n")
    (folder / command).chmod(0o755)
    path = os.environ["PATH"]
    monkeypatch.setenv("PATH", f"{folder}:{path}")
    return path


def test_a_new_runner_waits_for_what_the_killed_one_had_submitted(tmp_path):
    """Four run at once, so that some are still pending; none is run twice, and none that ended is waited for."""
    trials = contract.make_trials(tmp_path, *[GATED] * 6)
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


def test_a_job_of_an_attempt_that_was_replaced_runs_nothing(tmp_path):
    """It was queued when its trial was prepared again; it is not waited for, and leaves when it starts."""
    trials = contract.make_trials(tmp_path, *[GATED] * 6)
    first = SlurmEngine()
    first.open(tmp_path, [])
    first.submit(trials)
    wait_until(lambda: len(list(tmp_path.glob("ran-*"))) == 4, "four run")
    waiting = [trial for trial in trials if not (tmp_path / f"ran-{trial.name}").exists()]
    for trial in waiting:
        prepare(trial)
    second = SlurmEngine()
    assert second.open(tmp_path, waiting) == []
    second.submit(waiting)
    (tmp_path / "go").touch()
    contract.run_all_placed(second, waiting)
    wait_until(lambda: not run("squeue", "-h", "-r"), "the queue is empty")
    assert [len((tmp_path / f"ran-{trial.name}").read_text().split()) for trial in trials] == [1] * 6


def test_what_is_queued_is_withdrawn_and_what_runs_goes_on(tmp_path):
    """As a first Ctrl-C does it: four run at once, two of the six come back unrun and can be submitted again."""
    trials = contract.make_trials(tmp_path, *[GATED] * 6)
    engine = SlurmEngine()
    engine.open(tmp_path, [])
    engine.submit(trials)
    wait_until(lambda: not engine.wait(0.1) and engine.state() == "4 running, 2 queued", "four run")
    back = list(engine.withdraw())
    assert len(back) == 2
    assert list(engine.withdraw()) == []
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


def test_tasks_that_somebody_cancels_before_they_begin_are_cancelled_too(tmp_path):
    """Slurm's accounting has one row for them, without their indices."""
    trials = contract.make_trials(tmp_path, *["sleep 300"] * 7)
    engine = SlurmEngine(array="%1")
    engine.open(tmp_path, [])
    engine.submit(trials)
    wait_until(lambda: not engine.wait(0.1) and engine.state() == "1 running, 6 queued", "one runs")
    run("scancel", "--user=root")
    ends = contract.run_all_placed(engine, trials)
    assert {ending_from_evidence(evidence)[0] for evidence in ends.values()} == {"cancelled"}


def test_what_is_held_says_so(tmp_path):
    trials = contract.make_trials(tmp_path, "true", "true")
    engine = SlurmEngine(hold=True)
    engine.open(tmp_path, [])
    assert why_jobs_wait(tmp_path) == ""
    engine.submit(trials)
    assert why_jobs_wait(tmp_path) == "2 jobs wait in Slurm's queue: JobHeldUser"
    engine.cancel()
    contract.run_all_placed(engine, trials)


def test_a_viewer_is_told_what_slurm_says_of_jobs_that_wait(tmp_path):
    words = [
        "--engine",
        "slurm",
        "--engine-option",
        "hold=true",
        "--command",
        "true",
        "--batch-size=1,2",
        "--seq-len=1",
        "-o",
        "s",
    ]
    with subprocess.Popen([*FLOPWATCH, "sweep", *words], cwd=tmp_path, stdout=subprocess.DEVNULL) as sweep:
        try:
            wait_until(lambda: read_object(tmp_path / "s" / "runner.json").get("running_count"), "the jobs are queued")
            watch = [*FLOPWATCH, "watch", "s", "--once"]
            said = subprocess.run(watch, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
        finally:
            sweep.send_signal(signal.SIGTERM)
    assert "2 jobs wait in Slurm's queue: JobHeldUser\n" in said
    assert "0 running, 2 queued" in said


def test_slurm_gets_more_time_and_memory_than_the_trials_own_limits_and_the_users_options_go_first(tmp_path):
    limits = Limits(wall_seconds=600.0, memory_bytes=1 << 30)
    spec = TrialSpec("command", "none", 1, 1, command="true", limits=limits, cpus=2)
    assert asked(SlurmEngine(), spec) == {"no-requeue", "cpus-per-task=2", "mem=1280M", "time=12"}
    own = SlurmEngine(mem=None, time=5, exclusive=True, no_kill=False, mail_type="END")
    assert asked(own, spec) == {"no-requeue", "cpus-per-task=2", "time=5", "exclusive", "mail-type=END"}


def asked(engine, spec):
    return {line.removeprefix("#SBATCH --") for line in engine._requests(spec).splitlines()}


def test_a_submission_that_slurm_does_not_take_at_once_is_an_error_of_the_user(tmp_path):
    engine = SlurmEngine(partition="nowhere")
    engine.open(tmp_path, [])
    with pytest.raises(InputError, match="invalid partition"):
        engine.submit(contract.make_trials(tmp_path, "true"))


def test_a_later_one_is_submitted_again_until_slurm_takes_it(tmp_path, monkeypatch):
    """A site's limit of submitted jobs, or a controller that restarts."""
    first, later = contract.make_trials(tmp_path, "true", "true")
    engine = SlurmEngine()
    engine.open(tmp_path, [])
    contract.run_all(engine, [first])
    path = put_before(tmp_path / "bin", "sbatch", "sbatch: error: AssocMaxSubmitJobLimit", monkeypatch)
    engine.submit([later])
    assert not engine.wait(1.2)
    assert engine.room(later.spec) == 0
    assert engine.state() == "0 running, 1 queued; waiting: sbatch: error: AssocMaxSubmitJobLimit"
    monkeypatch.setenv("PATH", path)
    contract.run_all_placed(engine, [later])
    assert contract.outcome(later) == "ok"


def test_a_slurm_that_does_not_answer_ends_nothing_and_is_forgotten_when_it_answers(tmp_path, monkeypatch):
    trials = contract.make_trials(tmp_path, GATED)
    engine = SlurmEngine()
    engine.open(tmp_path, [])
    engine.submit(trials)
    contract.wait_for_file(tmp_path / "ran-t0", engine)
    path = put_before(tmp_path / "bin", "sacct", "sacct: error: Unable to contact slurmdbd", monkeypatch)
    assert not engine.wait(1.2)
    assert engine.state() == "1 running, 0 queued; waiting: sacct: error: Unable to contact slurmdbd"
    monkeypatch.setenv("PATH", path)
    assert not engine.wait(1.2)
    assert engine.state() == "1 running, 0 queued"
    (tmp_path / "go").touch()
    contract.run_all_placed(engine, trials)
    assert contract.outcome(trials[0]) == "ok"


def test_without_slurm_the_engine_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match="Slurm cannot be used here, because `squeue` failed"):
        SlurmEngine().open(tmp_path, [])


SACCT = """\
85_0|TIMEOUT|0:0|n1
85_1|FAILED|0:9|n1
86_3|CANCELLED by 0|0:0|None assigned
86_[4-7]|PENDING|0:0|None assigned
89|CANCELLED by 0|0:0|None assigned
87_0|FAILED|7:0|n[1-2]
88_0|RUNNING|0:0|n2
sacct: error: slurm_persist_conn_open_without_init

1_0|RUNNING|0:0|n1
"""


def test_ends_are_read_as_slurm_prints_them():
    ends = read_sacct(SACCT)
    assert {number: end["state"] for number, end in ends.items()} == {
        "85_0": "TIMEOUT", "85_1": "FAILED", "86_3": "CANCELLED", "86": "PENDING", "89": "CANCELLED",
        "87_0": "FAILED", "88_0": "RUNNING", "1_0": "RUNNING",
    }  # fmt: skip
    assert ends["85_1"] == {"state": "FAILED", "signal": 9, "host": "n1"}
    assert ends["87_0"] == {"state": "FAILED", "exit_code": 7, "host": "n[1-2]"}
