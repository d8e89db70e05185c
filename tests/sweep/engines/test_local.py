"""The default engine, with real processes."""

import itertools
import os
import signal
import subprocess
import sys
from contextlib import closing

import psutil
import pytest

from flopwatch.errors import InputError
from flopwatch.records.sweep_results import read_result
from flopwatch.sweep.engines.local import LocalEngine, SlotPool, visible_gpus
from support.engines import contract
from support.engines.contract import folder_of, make_trials, run_all


@pytest.fixture(autouse=True)
def own_locks(tmp_path, monkeypatch):
    monkeypatch.setenv("FLOPWATCH_SLOT_DIR", str(tmp_path / "slots"))


def test_every_trial_ends_once_with_a_result(tmp_path):
    contract.every_trial_ends_once_with_a_result(LocalEngine(gpus=(), jobs=2), tmp_path / "sweep")


def test_cancel_ends_everything(tmp_path):
    contract.cancel_ends_everything(LocalEngine(gpus=(), jobs=2), tmp_path / "sweep")


def test_a_killed_supervisor_is_an_end_with_evidence(tmp_path):
    evidence = contract.a_killed_supervisor_is_an_end_with_evidence(LocalEngine(gpus=(), jobs=1), tmp_path / "sweep")
    assert evidence == {"signal": signal.SIGKILL}


def test_two_jobs_have_cores_of_their_own(tmp_path):
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("one core")
    command = "python3 -c 'import os; print(sorted(os.sched_getaffinity(0)))' > {trial_dir}/cores; sleep 0.5"
    trials = make_trials(tmp_path / "s", command, command)
    engine = LocalEngine(gpus=(), jobs=2)
    engine.open(tmp_path / "s", [])
    run_all(engine, trials)
    engine.close()
    seen = [eval((folder_of(trial) / "cores").read_text()) for trial in trials]
    assert not set(seen[0]) & set(seen[1])


def test_every_trial_has_a_gpu_to_itself(tmp_path):
    command = "echo $CUDA_VISIBLE_DEVICES > {trial_dir}/gpu; sleep 0.3"
    trials = make_trials(tmp_path / "s", *[command] * 4, gpus=1.0)
    engine = LocalEngine(gpus=("0", "3"))
    engine.open(tmp_path / "s", [])
    run_all(engine, trials)
    engine.close()
    results = [read_result(folder_of(trial) / "result.json") for trial in trials]
    spans = [
        ((folder_of(t) / "gpu").read_text().strip(), r.unix_time, r.unix_time + r.seconds)
        for t, r in zip(trials, results, strict=True)
    ]
    assert {gpu for gpu, _, _ in spans} == {"0", "3"}
    for gpu in ("0", "3"):
        times = sorted((begin, end) for of, begin, end in spans if of == gpu)
        assert all(first[1] <= second[0] for first, second in itertools.pairwise(times))


def test_a_trial_of_two_gpus_leaves_none_for_another(tmp_path):
    with closing(SlotPool(("0", "1"), 1, tmp_path)) as pool:
        both = pool.take(2)
        assert both.gpus == ("0", "1")
        assert pool.take(1) is None
        pool.give_back(both)
        assert [pool.take(1).gpus for _ in range(2)] == [("0",), ("1",)]
        assert pool.take(1) is None


@pytest.mark.parametrize(("gpus", "asked"), [(("0",), 2), ((), 1)])
def test_more_gpus_than_there_are_is_an_error(tmp_path, gpus, asked):
    with pytest.raises(InputError, match="a trial needs"):
        SlotPool(gpus, 1, tmp_path).take(asked)


def test_more_jobs_than_cores_is_an_error(tmp_path):
    with pytest.raises(InputError, match="each trial needs a core"):
        SlotPool((), 1000, tmp_path)


def test_two_sweeps_share_no_slot(tmp_path):
    with closing(SlotPool(("0",), 1, tmp_path / "a")) as first, closing(SlotPool(("0",), 1, tmp_path / "b")) as second:
        slot = first.take(1)
        assert second.take(1) is None
        assert second.waits_for == f"gpu 0 (pid {os.getpid()}, sweep in {tmp_path / 'a'})"
        first.give_back(slot)
        assert second.take(1) is not None


def test_slots_of_a_dead_sweep_are_free(tmp_path):
    script = "import sys, os; from pathlib import Path; from flopwatch.sweep.engines.local import SlotPool\n"
    script += "pool = SlotPool(('0',), 1, Path('x')); pool.take(1); os.kill(os.getpid(), 9)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == -signal.SIGKILL
    with closing(SlotPool(("0",), 1, tmp_path)) as pool:
        assert pool.take(1) is not None


@pytest.mark.parametrize(("value", "gpus"), [("0,2", ("0", "2")), ("", ()), ("-1", ()), ("GPU-ab, 1", ("GPU-ab", "1"))])
def test_visible_gpus_follow_the_environment(monkeypatch, value, gpus):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert visible_gpus() == gpus


def test_one_trial_that_does_not_answer_is_ended_alone_and_its_slot_is_free(tmp_path):
    """Supervisor and guard are stopped, as by a file system that hangs: no signal but SIGKILL reaches them."""
    tree = "setsid sleep 300 & echo $PPID > {trial_dir}/supervisor; sleep 300"
    trials = make_trials(tmp_path / "s", tree, tree)
    engine = LocalEngine(gpus=(), jobs=2)
    engine.open(tmp_path / "s", [])
    for trial in trials:
        assert engine.room(trial.spec)
        engine.submit([trial])
    assert not engine.room(trials[0].spec)
    supervisors = [int(contract.wait_for_file(folder_of(trial) / "supervisor", engine)) for trial in trials]
    for stopped in (psutil.Process(supervisors[0]).parent(), psutil.Process(supervisors[0])):
        stopped.suspend()
    engine._kill([trials[0].name])
    (ended,) = contract.run_all_placed(engine, trials[:1])
    assert ended == trials[0].name
    assert engine.room(trials[0].spec)
    assert contract.left_behind(trials[:1]) == []
    assert contract.left_behind(trials[1:]), "the other one runs on"
    engine.cancel()
    contract.run_all_placed(engine, trials[1:])
    engine.close()
