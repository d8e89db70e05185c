"""The Ray engine on a cluster that others started, with nodes that join, die and are cut off."""

import os
import signal
import threading

import psutil
import pytest

from flopwatch.records.trial import Limits, TrialSpec
from flopwatch.sweep.engines.protocol import ending_from_evidence
from flopwatch.sweep.engines.ray import RayEngine
from support.engines import contract
from support.sweeping import left_behind, run_sweep
from testbeds.real_ray import ray_cluster
from testbeds.wait_until import wait_until

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster():
    with ray_cluster() as cluster:
        yield cluster


@pytest.fixture
def engine(cluster, tmp_path):
    engine = RayEngine(cluster.address)
    engine.open(tmp_path, [])
    yield engine
    engine.close()


def placed_on_a_node_that_joins_later(cluster, engine, tmp_path):
    (trial,) = contract.make_trials(tmp_path, "echo $PPID > {trial_dir}/supervisor; exec sleep 300")
    wait_until(lambda: engine.room(trial.spec) == 0, "only the head is there, which has no cores")
    node = cluster.add_node(num_cpus=1)
    wait_until(lambda: engine.room(trial.spec), "the node has joined")
    engine.submit([trial])
    supervisor = psutil.Process(int(contract.wait_for_file(contract.folder_of(trial) / "supervisor", engine)))
    return node, trial, supervisor


def test_the_runners_environment_reaches_trials_and_what_is_the_nodes_own_does_not(cluster, tmp_path, monkeypatch):
    changed = {"MY_LEDGER": "a b=c", "HF_HOME": "/data/hf", "PATH": f"/none:{os.environ['PATH']}", "HOSTNAME": "runner"}
    node = cluster.add_node(num_cpus=1)
    for name, value in changed.items():
        monkeypatch.setenv(name, value)
    (trial,) = contract.make_trials(tmp_path, "env > {trial_dir}/env")
    engine = RayEngine(cluster.address)
    engine.open(tmp_path, [])
    contract.run_all(engine, [trial])
    engine.close()
    cluster.remove_node(node)
    seen = dict(line.split("=", 1) for line in (contract.folder_of(trial) / "env").read_text().splitlines())
    assert {name for name, value in changed.items() if seen.get(name) == value} == {"MY_LEDGER", "HF_HOME"}


def test_a_trial_on_a_node_that_dies_is_lost_and_leaves_nothing(cluster, engine, tmp_path):
    node, trial, supervisor = placed_on_a_node_that_joins_later(cluster, engine, tmp_path)
    cluster.remove_node(node, allow_graceful=False)
    (evidence,) = contract.run_all_placed(engine, [trial]).values()
    assert ending_from_evidence(evidence)[0] == "lost"
    assert not psutil.wait_procs([supervisor], timeout=60)[1]
    assert contract.left_behind([trial]) == []


@pytest.mark.campaign  # Ray takes more than a minute to notice it
def test_a_trial_on_a_node_that_is_cut_off_is_lost(cluster, engine, tmp_path):
    """All of the node stands still, as behind a cut link: nothing of it says goodbye."""
    node, trial, supervisor = placed_on_a_node_that_joins_later(cluster, engine, tmp_path)
    raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
    frozen = [raylet, *raylet.children(recursive=True)]
    for process in frozen:
        process.suspend()
    try:
        (evidence,) = contract.run_all_placed(engine, [trial]).values()
    finally:
        for process in frozen:
            os.kill(process.pid, signal.SIGCONT)
        cluster.remove_node(node, allow_graceful=False)
    assert ending_from_evidence(evidence)[0] == "lost"
    psutil.wait_procs([supervisor], timeout=30)
    assert contract.left_behind([trial]) == []


def test_a_sweep_whose_node_dies_ends_green_on_another(cluster, tmp_path):
    """The whole runner: the attempt on the dead node is listed, the next one runs elsewhere."""
    sweep = tmp_path / "s"
    command = "test -e ../met || { echo $$ > ../pid; sleep 300; }; echo second".replace("..", str(tmp_path))
    spec = TrialSpec("command", "none", 1, 1, command=command, device="cpu", limits=Limits(wall_seconds=200.0))
    node, found = cluster.add_node(num_cpus=1), {}
    runner = threading.Thread(target=lambda: found.update(run_sweep(sweep, [spec], RayEngine(cluster.address))))
    runner.start()
    contract.wait_for_file(tmp_path / "pid")
    (tmp_path / "met").touch()
    cluster.remove_node(node, allow_graceful=False)
    other = cluster.add_node(num_cpus=1)
    runner.join(120)
    cluster.remove_node(other)
    (result,) = found.values()
    assert result.outcome == "ok", result
    (attempt,) = result.earlier_attempts
    assert attempt["outcome"] == "lost"
    assert (sweep / attempt["folder"] / "started.json").exists()
    assert left_behind(sweep) == []
