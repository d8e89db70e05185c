"""The Ray engine on a real Ray of one node with two GPUs that do not exist."""

import json
import os
import signal
import subprocess
import sys

import psutil
import pytest

from flopwatch.errors import InputError
from flopwatch.records.trial import TrialSpec
from flopwatch.sweep.engines import ray as engine_module
from flopwatch.sweep.engines.protocol import ending_from_evidence, load_engine
from flopwatch.sweep.engines.ray import RayEngine
from support.engines import contract
from testbeds.real_ray import ray_cluster
from testbeds.wait_until import wait_until

TELL_GPUS = 'echo "gpus=$CUDA_VISIBLE_DEVICES" > {trial_dir}/gpus; '
NOTE_AND_HOLD = (
    "echo $$ >> {trial_dir}/../../ran-$FLOPWATCH_TRIAL_NAME; while ! test -e {trial_dir}/../../go; do sleep 0.05; done"
)


@pytest.fixture(scope="module")
def cluster():
    with ray_cluster(cpus=4, gpus=2) as cluster:
        yield cluster


@pytest.fixture
def engine(cluster):
    return RayEngine(cluster.address)


slow = pytest.mark.slow


@slow
def test_every_trial_ends_once_with_a_result(engine, tmp_path):
    contract.every_trial_ends_once_with_a_result(engine, tmp_path)


@slow
def test_cancel_ends_everything(engine, tmp_path):
    contract.cancel_ends_everything(engine, tmp_path)


@slow
def test_a_killed_supervisor_is_lost(engine, tmp_path):
    evidence = contract.a_killed_supervisor_is_an_end_with_evidence(engine, tmp_path)
    outcome, reason = ending_from_evidence(evidence)
    assert outcome == "lost"
    assert "signal 9" in reason


@slow
def test_a_killed_ray_worker_takes_its_trial_along(engine, tmp_path):
    (trial,) = contract.make_trials(tmp_path, "setsid sleep 300 & echo $PPID > {trial_dir}/supervisor; sleep 300")
    engine.open(tmp_path, [])
    engine.submit([trial])
    supervisor = psutil.Process(int(contract.wait_for_file(contract.folder_of(trial) / "supervisor", engine)))
    guard = supervisor.parent()
    guard.parent().parent().kill()
    (evidence,) = contract.run_all_placed(engine, [trial]).values()
    engine.close()
    assert ending_from_evidence(evidence)[0] == "lost"
    assert contract.outcome(trial) == "cancelled"
    assert contract.left_behind([trial]) == []
    assert not psutil.wait_procs([supervisor, guard], timeout=60)[1]


@slow
def test_two_trials_of_one_gpu_run_at_once_on_different_ones(engine, tmp_path):
    """Each waits for the other, so that both would time out if they did not run at once."""
    meet = TELL_GPUS + "touch {me}; while ! test -e {other}; do sleep 0.05; done"
    a, b = tmp_path / "a", tmp_path / "b"
    commands = [meet.replace("{me}", str(x)).replace("{other}", str(y)) for x, y in ((a, b), (b, a))]
    assert gpus_seen(engine, tmp_path, *commands, gpus=1.0) == ["gpus=0", "gpus=1"]


@slow
def test_a_trial_of_two_gpus_gets_both(engine, tmp_path):
    assert gpus_seen(engine, tmp_path / "two", TELL_GPUS, gpus=2.0) == ["gpus=0,1"]


@slow
def test_a_trial_for_the_cpu_gets_no_gpu(engine, tmp_path):
    assert gpus_seen(engine, tmp_path / "none", TELL_GPUS, device="cpu") == ["gpus="]


@slow
def test_a_trial_that_does_not_say_gets_a_gpu_where_there_are_some(engine, tmp_path):
    (seen,) = gpus_seen(engine, tmp_path, TELL_GPUS, device="auto")
    assert seen in ("gpus=0", "gpus=1")


def gpus_seen(engine, sweep, *commands, **settings):
    trials = contract.make_trials(sweep, *commands, **settings)
    engine.open(sweep, [])
    try:
        contract.run_all(engine, trials)
    finally:
        engine.close()
    assert [contract.outcome(trial) for trial in trials] == ["ok"] * len(trials)
    return sorted((contract.folder_of(trial) / "gpus").read_text().strip() for trial in trials)


@slow
def test_what_has_not_begun_is_withdrawn_and_what_runs_goes_on(engine, tmp_path):
    trials = contract.make_trials(tmp_path, *[NOTE_AND_HOLD] * 6)
    engine.open(tmp_path, [])
    engine.submit(trials)
    wait_until(lambda: not engine.wait(0.1) and len(list(tmp_path.glob("ran-*"))) == 4, "four run")
    back = []
    wait_until(lambda: back.extend(engine.withdraw()) or (not engine.wait(0.1) and len(back) == 2), "two come back")
    (tmp_path / "go").touch()
    ended = contract.run_all_placed(engine, [trial for trial in trials if trial.name not in back])
    assert sorted([*ended, *back]) == [trial.name for trial in trials]
    again = [trial for trial in trials if trial.name in back]
    engine.submit(again)
    contract.run_all_placed(engine, again)
    engine.close()
    assert [contract.outcome(trial) for trial in trials] == ["ok"] * 6
    assert [len((tmp_path / f"ran-{trial.name}").read_text().split()) for trial in trials] == [1] * 6


@slow
def test_a_cluster_that_does_not_answer_for_a_while_is_waited_for_and_told(engine, tmp_path, monkeypatch):
    monkeypatch.setattr(engine_module, "_ANSWER_SECONDS", 0.5)
    trials = contract.make_trials(tmp_path, "echo hello", "echo hello")
    engine.open(tmp_path, [])
    os.kill(engine._driver.pid, signal.SIGSTOP)
    wait_until(lambda: not engine.wait(0.1) and "not answered" in engine.state(), "it is told")
    assert engine.room(trials[0].spec) == 0
    engine.submit(trials)
    monkeypatch.setattr(engine_module, "_ANSWER_SECONDS", 15.0)
    os.kill(engine._driver.pid, signal.SIGCONT)
    contract.run_all_placed(engine, trials)
    assert [contract.outcome(trial) for trial in trials] == ["ok", "ok"]
    assert engine.room(trials[0].spec) > 0
    engine.close()


@slow
def test_a_driver_that_dies_is_replaced_and_only_what_had_not_begun_runs_in_another_task(engine, tmp_path):
    trials = contract.make_trials(tmp_path, *[NOTE_AND_HOLD] * 6)
    engine.open(tmp_path, [])
    engine.submit(trials)
    wait_until(lambda: not engine.wait(0.1) and len(list(tmp_path.glob("ran-*"))) == 4, "four run")
    begun = {file.name.removeprefix("ran-") for file in tmp_path.glob("ran-*")}
    engine._driver.kill()
    told, evidence = "1 node, 2 with Ray, 2 of them placed again after RayDriverEnded", {}

    def is_told():
        evidence.update({end.name: end.evidence for end in engine.wait(0.1)})
        return engine.state() == told

    wait_until(is_told, "it is told", 60)
    (tmp_path / "go").touch()
    evidence |= contract.run_all_placed(engine, [trial for trial in trials if trial.name not in evidence])
    engine.close()
    assert {name for name, found in evidence.items() if "exit_code" not in found} == begun
    for trial in trials:
        if trial.name not in begun:
            assert contract.outcome(trial) == "ok"
    assert [len((tmp_path / f"ran-{trial.name}").read_text().split()) for trial in trials] == [1] * 6


@slow
def test_room_is_what_runs_at_once_and_two_and_a_need_that_no_node_has_is_told(engine, tmp_path):
    engine.open(tmp_path, [])
    assert engine.room(command(device="cpu")) == 4 + 2
    assert engine.room(command(gpus=2.0)) == 1 + 2
    trials = contract.make_trials(tmp_path, *["sleep 300"] * 3, gpus=1.0)
    engine.submit(trials)
    assert engine.room(command(gpus=1.0)) == 2 + 2 - 3
    engine.cancel()
    contract.run_all_placed(engine, trials)
    assert engine.room(command(gpus=1.0)) == 2 + 2
    assert engine.room(command(gpus=3.0)) == 0
    assert engine.state() == "1 node, none with 1 CPU and 3 GPU: waiting for one, 0 with Ray"
    engine.close()


def command(**settings):
    return TrialSpec("command", "none", 1, 1, command="true", **settings)


def test_a_node_that_does_not_see_the_folder_says_so(tmp_path):
    (trial,) = contract.make_trials(tmp_path / "here", "true")
    order = (str(tmp_path / "there"), trial.name, "attempt", str(tmp_path), {"FLOPWATCH_VISIBLE_SECONDS": "0"})
    code = f"import json; from flopwatch.sweep.engines.ray import run_trial; print(json.dumps(run_trial(*{order})))"
    evidence = json.loads(subprocess.check_output([sys.executable, "-c", code]))
    outcome, reason = ending_from_evidence(evidence)
    assert outcome == "lost"
    assert "there/trials/t0/spec.json does not exist on this host; use a folder that all hosts share" in reason


def test_a_cluster_is_needed_and_the_message_says_how_to_start_one():
    with pytest.raises(InputError, match="`ray start --head` starts one and prints its address"):
        load_engine("ray", {})


NO_CLUSTER = """
def init(**settings):
    raise ConnectionError("Could not find any running Ray instance.")
"""


def test_a_wrong_address_ends_the_sweep_with_rays_words(tmp_path, monkeypatch):
    (tmp_path / "ray.py").write_text(NO_CLUSTER)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")])))
    with pytest.raises(InputError, match=r"cannot connect to Ray at '10.0.0.1:6379'.*Could not find any running Ray"):
        RayEngine("10.0.0.1:6379").open(tmp_path, [])
