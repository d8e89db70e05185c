"""The Ray engine against a real Ray of one node with two GPUs that do not exist."""

import signal
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest

from flopwatch.errors import InputError
from flopwatch.process import start_ticks
from flopwatch.records.sweep_results import read_result
from flopwatch.records.trial import TrialSpec
from flopwatch.sweep.engines import ray as engine_module
from flopwatch.sweep.engines import ray_task
from flopwatch.sweep.engines.protocol import ending_from_evidence
from flopwatch.sweep.engines.ray import RayEngine, fits, spare
from flopwatch.sweep.host import processes as process_tree
from support.engines import contract
from testbeds.real_ray import need_ray, real_ray
from testbeds.wait_until import wait_until

TELL_GPUS = 'echo "gpus=$CUDA_VISIBLE_DEVICES" > {trial_dir}/gpus; '


@pytest.fixture(scope="module")
def ray():
    with real_ray() as ray:
        yield ray


def on_ray(test):
    return pytest.mark.slow(pytest.mark.usefixtures("ray")(test))


def command(**settings):
    return TrialSpec("command", "none", 1, 1, command="true", **settings)


@on_ray
def test_every_trial_ends_once_with_a_result(tmp_path):
    contract.every_trial_ends_once_with_a_result(RayEngine(), tmp_path)


@on_ray
def test_cancel_ends_everything(tmp_path):
    contract.cancel_ends_everything(RayEngine(), tmp_path)


@on_ray
def test_a_killed_supervisor_is_lost(tmp_path):
    evidence = contract.a_killed_supervisor_is_an_end_with_evidence(RayEngine(), tmp_path)
    outcome, reason = ending_from_evidence(evidence)
    assert outcome == "lost"
    assert "signal 9" in reason


@on_ray
def test_a_killed_ray_worker_takes_its_trial_along(tmp_path):
    (trial,) = contract.make_trials(tmp_path, "setsid sleep 300 & echo $PPID > {trial_dir}/supervisor; sleep 300")
    engine = RayEngine()
    engine.open(tmp_path, [])
    engine.submit([trial])
    supervisor = psutil.Process(int(contract.wait_for_file(contract.folder_of(trial) / "supervisor", engine)))
    guard = supervisor.parent()
    guard.parent().kill()
    (evidence,) = contract.run_all_placed(engine, [trial]).values()
    engine.close()
    assert ending_from_evidence(evidence)[0] == "lost"
    assert contract.outcome(trial) == "cancelled"
    assert contract.left_behind([trial]) == []
    assert not psutil.wait_procs([supervisor, guard], timeout=60)[1]


@on_ray
def test_two_trials_of_one_gpu_run_at_once_on_different_ones(tmp_path):
    """Each waits for the other, so that both would time out if they did not run at once."""
    meet = TELL_GPUS + "touch {me}; while ! test -e {other}; do sleep 0.05; done"
    a, b = tmp_path / "a", tmp_path / "b"
    commands = [meet.replace("{me}", str(x)).replace("{other}", str(y)) for x, y in ((a, b), (b, a))]
    assert gpus_seen(RayEngine(), tmp_path, *commands, gpus=1.0) == ["gpus=0", "gpus=1"]


@on_ray
def test_halves_of_a_gpu_share_it(tmp_path):
    meet = TELL_GPUS + "touch {me}; while ! test -e {other}; do sleep 0.05; done"
    a, b = tmp_path / "a", tmp_path / "b"
    commands = [meet.replace("{me}", str(x)).replace("{other}", str(y)) for x, y in ((a, b), (b, a))]
    seen = gpus_seen(RayEngine(), tmp_path, *commands, gpus=0.5)
    assert len(set(seen)) == 1


@on_ray
def test_a_trial_of_two_gpus_gets_both_and_one_for_the_cpu_none(tmp_path):
    assert gpus_seen(RayEngine(), tmp_path / "two", TELL_GPUS, gpus=2.0) == ["gpus=0,1"]
    assert gpus_seen(RayEngine(), tmp_path / "none", TELL_GPUS, device="cpu") == ["gpus="]


@on_ray
def test_a_trial_that_does_not_say_gets_a_gpu_where_there_are_some(tmp_path):
    (seen,) = gpus_seen(RayEngine(), tmp_path, TELL_GPUS, device="auto")
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


@on_ray
def test_a_node_that_does_not_see_the_folder_sends_the_files_back(tmp_path, monkeypatch):
    """What another host would find: no token, or that of another sweep in a folder of the same name."""
    trials = contract.make_trials(tmp_path, "echo hello; pwd > {trial_dir}/where", "echo hello; exit 5")
    engine = RayEngine()
    engine.open(tmp_path, [])
    (tmp_path / ray_task.FOLDER_TOKEN).write_text("of somebody else")
    contract.run_all(engine, trials)
    engine.close()
    assert [contract.outcome(trial) for trial in trials] == ["ok", "error"]
    for trial in trials:
        assert "hello" in (tmp_path / "logs" / f"{trial.name}.log").read_text()
        assert (contract.folder_of(trial) / "started.json").exists()
    assert (contract.folder_of(trials[0]) / "where").exists()
    assert not list(contract.folder_of(trials[0]).glob(".*")), "something half-written was left"


@on_ray
def test_a_file_too_large_to_travel_is_named_in_the_result_and_the_logs_end_comes(tmp_path):
    """Five MiB beside the trial's own files, and a log of six."""
    big = "head -c 5242880 /dev/zero > {trial_dir}/checkpoint; yes line | head -c 6291456; echo last words"
    (trial,) = contract.make_trials(tmp_path, big)
    engine = RayEngine()
    engine.open(tmp_path, [])
    (tmp_path / ray_task.FOLDER_TOKEN).write_text("of somebody else")
    (evidence,) = contract.run_all(engine, [trial]).values()
    engine.close()
    result = read_result(contract.folder_of(trial) / "result.json")
    assert result.outcome == "ok"
    assert result.evidence["left_on_the_node"] == evidence["left_on_the_node"] == ["trials/t0/checkpoint"]
    assert not (contract.folder_of(trial) / "checkpoint").exists()
    log = (tmp_path / "logs" / "t0.log").read_text()
    assert log.endswith("last words\n")
    assert 1 << 20 < len(log) <= 4 << 20


@on_ray
def test_what_no_node_has_begun_is_withdrawn_and_what_runs_goes_on(tmp_path):
    ran, go = "{trial_dir}/../../ran-$FLOPWATCH_TRIAL_NAME", "{trial_dir}/../../go"
    hold = f"echo $$ >> {ran}; while ! test -e {go}; do sleep 0.05; done"
    trials = contract.make_trials(tmp_path, *[hold] * 6)
    engine = RayEngine()
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


@on_ray
def test_a_cluster_that_does_not_answer_for_a_while_is_waited_out_and_told(tmp_path, ray, monkeypatch):
    monkeypatch.setattr(engine_module, "_NODES_EVERY_SECONDS", 0.2)
    trials = contract.make_trials(tmp_path, "echo hello", "echo hello")
    # "auto" would be the newest cluster of this machine, which may be that of another test.
    engine = RayEngine(address=ray.get_runtime_context().gcs_address)
    engine.open(tmp_path, [])
    note = engine._cluster._note

    def silent(kind, *facts):
        note("failed", "RpcError", "failed to connect to the head") if kind == "nodes" else note(kind, *facts)

    monkeypatch.setattr(engine._cluster, "_note", silent)
    assert not engine.wait(1.2)
    assert engine.room(trials[0].spec) == 0
    assert engine.state().startswith("Ray has not answered for ")
    assert "failed to connect to the head" in engine.state()
    engine.submit(trials)
    monkeypatch.setattr(engine._cluster, "_note", note)
    contract.run_all_placed(engine, trials)
    assert [contract.outcome(trial) for trial in trials] == ["ok", "ok"]
    assert engine.room(trials[0].spec) > 0
    engine.close()


@on_ray
def test_another_error_of_the_driver_ends_the_sweep(tmp_path):
    engine = RayEngine()
    engine.open(tmp_path, [])
    engine._cluster.send("no_such_method")
    with pytest.raises(RuntimeError, match="AttributeError: 'Driver' object has no attribute 'no_such_method'"):
        engine.wait(30)
    engine.close()


@on_ray
def test_a_driver_that_dies_is_replaced_and_only_what_had_not_begun_runs_in_another_task(tmp_path, monkeypatch):
    monkeypatch.setattr(engine_module, "_RESTART_SECONDS", 0.1)
    go = "{trial_dir}/../../go"
    hold = f"echo $$ >> {{trial_dir}}/../../ran-$FLOPWATCH_TRIAL_NAME; while ! test -e {go}; do sleep 0.05; done"
    trials = contract.make_trials(tmp_path, *[hold] * 6)
    engine = RayEngine()
    engine.open(tmp_path, [])
    engine.submit(trials)
    wait_until(lambda: not engine.wait(0.1) and len(list(tmp_path.glob("ran-*"))) == 4, "four run")
    begun = {file.name.removeprefix("ran-") for file in tmp_path.glob("ran-*")}
    engine._cluster.kill_driver()
    (tmp_path / "go").touch()
    evidence = contract.run_all_placed(engine, trials)
    engine.close()
    assert {name for name, found in evidence.items() if found.get("error") == "RayDriverEnded"} == begun
    for trial in trials:
        if trial.name not in begun:
            assert contract.outcome(trial) == "ok"
    assert [len((tmp_path / f"ran-{trial.name}").read_text().split()) for trial in trials] == [1] * 6


@on_ray
def test_room_is_what_runs_at_once_and_a_few(tmp_path):
    engine = RayEngine()
    engine.open(tmp_path, [])
    assert engine.room(command(device="cpu")) == 4 + 2
    assert engine.room(command(gpus=2.0)) == 1 + 2
    assert engine.room(command(gpus=0.25, cpus=1)) == 4 + 2, "the cores are the limit"
    trials = contract.make_trials(tmp_path, *["sleep 300"] * 3, gpus=1.0)
    engine.submit(trials)
    assert engine.room(command(gpus=1.0)) == 2 + 2 - 3
    assert engine.room(command(gpus=2.0)) == 1, "one of them waits: half a place is taken in advance"
    engine.cancel()
    contract.run_all_placed(engine, trials)
    assert engine.room(command(gpus=1.0)) == 2 + 2
    with pytest.raises(InputError, match=r"needs 1 CPU and 3 GPU, but this machine has 4 CPU and 2 GPU"):
        engine.room(command(gpus=3.0))
    engine.close()


@on_ray
def test_supervisors_of_a_killed_runner_are_waited_for(tmp_path):
    """Somebody holds the trial: it is adopted, and ends when they let go."""
    (trial,) = contract.make_trials(tmp_path, "while ! test -e {trial_dir}/go; do sleep 0.05; done")
    supervisor = subprocess.Popen([sys.executable, "-m", "flopwatch.sweep.supervisor", str(tmp_path), trial.name])
    contract.wait_for_file(contract.folder_of(trial) / "started.json")
    engine = RayEngine()
    assert list(engine.open(tmp_path, [trial])) == [trial.name]
    assert not engine.wait(0.2)
    (contract.folder_of(trial) / "go").touch()
    contract.run_all_placed(engine, [trial])
    engine.close()
    assert supervisor.wait(30) == 0
    assert contract.outcome(trial) == "ok"


RUNNER = """
import sys, time
from pathlib import Path
from support.engines import contract
from testbeds.wait_until import wait_until
from flopwatch.sweep.engines.ray import RayEngine
sweep = Path(sys.argv[1])
trials = contract.make_trials(sweep, "setsid sleep 300 & echo $! > {trial_dir}/pid; sleep 300")
engine = RayEngine(cpus=1, gpus=0)
engine.open(sweep, [])
engine.submit(trials)
while True:
    engine.wait(1.0)
"""


@pytest.mark.slow
def test_a_ray_of_its_own_is_on_loopback_and_ends_with_a_killed_runner(tmp_path):
    need_ray()
    runner = psutil.Popen([sys.executable, "-c", RUNNER, str(tmp_path)], start_new_session=True)
    try:
        trial = tmp_path.resolve() / "trials" / "t0"
        pid = int(contract.wait_for_file(trial / "pid"))
        family = runner.children(recursive=True)
        # Ray's two agents take a minute or two to see that their raylet is gone.
        quick = [process for process in family if not process.name().endswith(("Agent", "Env"))]
        listening = [
            connection.laddr.ip
            for process in [runner, *family]
            for connection in process.net_connections()
            if connection.status == psutil.CONN_LISTEN
        ]
        assert listening
        assert {address.removeprefix("::ffff:") for address in listening} == {"127.0.0.1"}
    finally:
        runner.send_signal(signal.SIGKILL)
        runner.wait()
    assert psutil.wait_procs(quick, timeout=60)[1] == []
    assert start_ticks(pid) is None
    assert process_tree.marked_processes(trial) == []


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_stopped_sweep_gets_back_what_had_not_begun_when_the_driver_ended(tmp_path, has_begun):
    """Nothing is given to another driver, though Ray does not answer."""
    (trial,) = contract.make_trials(tmp_path, "true")
    sent, engine = [], RayEngine(gpus_per_trial=0)
    engine._sweep = tmp_path
    engine._cluster = SimpleNamespace(
        nodes=[], begun={}, ended=[], stage="connected", silent_since=1.0,
        listen=lambda seconds: None, send=lambda *call: sent.append(call[0]), restart_driver=lambda: True,
    )  # fmt: skip
    engine.submit([trial])
    assert engine.withdraw() == engine.withdraw() == []
    assert sent == ["place", "recall"]
    if has_begun:
        (contract.folder_of(trial) / "started.json").write_text("{}")
    engine._cluster.stage = "ended"
    ended = engine.wait(0)
    assert [end.evidence for end in ended] == ([{"error": "RayDriverEnded"}] if has_begun else [])
    assert engine.withdraw() == ([] if has_begun else [trial.name])
    assert sent == ["place", "recall"]


def test_a_node_too_small_or_without_gpus_holds_none():
    assert fits({"CPU": 1, "GPU": 2}, [{"CPU": 8, "GPU": 1}, {"CPU": 8}, {"CPU": 8, "GPU": 4}]) == 2


def test_tenths_of_a_gpu_add_up_to_a_whole():
    assert fits({"CPU": 1, "GPU": 0.1}, [{"CPU": 64, "GPU": 1}]) == 10
    assert spare({"CPU": 1, "GPU": 0.1}, [{"CPU": 64, "GPU": 1}], [{"CPU": 1, "GPU": 0.1}] * 9) == 1


def test_files_too_large_to_travel_are_named_and_the_end_of_a_log_travels(tmp_path, monkeypatch):
    monkeypatch.setattr(ray_task, "_FILE_BYTES", 10)
    (trial,) = contract.make_trials(tmp_path, "true")
    folder = contract.folder_of(trial)
    for file in (*folder.iterdir(),):
        file.unlink()
    (folder / "small").write_text("small")
    (folder / "large").write_text("much too large")
    (tmp_path / "logs" / "t0.log").write_text("0123456789 the end")
    files, left_out = ray_task.collect(tmp_path, "t0")
    assert files == {"trials/t0/small": b"small", "logs/t0.log": b"89 the end"}
    assert left_out == ["trials/t0/large"]
