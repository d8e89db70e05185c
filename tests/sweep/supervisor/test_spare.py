"""The local engine starts the supervisor of the next trial ahead."""

import os
import subprocess
import sys

import psutil
import pytest

from flopwatch.process import start_ticks
from flopwatch.sweep.engines.local import LocalEngine
from flopwatch.sweep.host import processes as process_tree
from support.engines import contract
from testbeds.wait_until import wait_until


@pytest.fixture
def engine(tmp_path, monkeypatch):
    monkeypatch.setenv("FLOPWATCH_SLOT_DIR", str(tmp_path / "slots"))
    engine = LocalEngine(gpus=())
    engine.open(tmp_path, [])
    yield engine
    engine.close()


def spare_of(engine):
    return engine._supervisors._process.pid


def test_a_trial_of_the_spare_has_the_environment_folder_log_and_input_of_now(engine, tmp_path, monkeypatch):
    """What changed after the spare was started counts."""
    tell = "env > {trial_dir}/env; pwd; cat; echo to stderr >&2"
    monkeypatch.setenv("LEFT", "before")
    first, second = contract.make_trials(tmp_path, "true", tell)
    contract.run_all(engine, [first])
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setenv("CAME", "a\nb=\udcff")
    monkeypatch.delenv("LEFT")
    contract.prepare(second)
    spare = spare_of(engine)
    contract.run_all(engine, [second])
    folder = contract.folder_of(second)
    assert (folder / "started.json").exists()
    environment = (folder / "env").read_bytes()
    assert b"CAME=a\nb=\xff\n" in environment
    assert b"LEFT=" not in environment
    assert f"FLOPWATCH_TRIAL_DIR={folder}\n".encode() in environment
    assert (tmp_path / "logs" / "t1.log").read_text() == f"{tmp_path}/elsewhere\nto stderr\n"
    assert spare_of(engine) != spare, "the spare did not run the trial"


def test_a_spare_that_was_killed_is_replaced(engine, tmp_path):
    trials = contract.make_trials(tmp_path, "true", "true")
    contract.run_all(engine, trials[:1])
    spare = psutil.Process(spare_of(engine))
    spare.kill()
    wait_until(lambda: spare.status() == psutil.STATUS_ZOMBIE, "it is dead")
    contract.run_all(engine, trials[1:])
    assert [contract.outcome(trial) for trial in trials] == ["ok", "ok"]


def test_the_spare_waits_idle_without_a_device_and_ends_with_the_engine(engine, tmp_path):
    contract.run_all(engine, contract.make_trials(tmp_path, "true"))
    spare = psutil.Process(spare_of(engine))
    wait_until(lambda: spare.status() == psutil.STATUS_SLEEPING and spare.cpu_times().user > 0, "it waits")
    assert spare.cpu_affinity() == process_tree.usable_cores()
    assert not [file for file in spare.open_files() if str(tmp_path) in file.path]
    assert not [line.path for line in spare.memory_maps() if "torch" in line.path]
    engine.close()
    assert start_ticks(spare.pid) is None


RUNNER = """
import sys
from pathlib import Path
from support.engines import contract
from flopwatch.sweep.engines.local import LocalEngine
sweep = Path(sys.argv[1])
engine = LocalEngine(gpus=())
engine.open(sweep, [])
(trial,) = contract.make_trials(sweep, "echo $$ > {trial_dir}/pid; sleep 300")
engine.room(trial.spec)
engine.submit([trial])
print(engine._supervisors._process.pid, flush=True)
engine.wait(300)
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_ready", [True, False])
def test_the_spare_ends_with_a_runner_that_is_killed(tmp_path, is_ready):
    runner = subprocess.Popen(
        [sys.executable, "-c", RUNNER, str(tmp_path)],
        stdout=subprocess.PIPE,
        env={**os.environ, "FLOPWATCH_SLOT_DIR": str(tmp_path / "slots")},
    )
    with runner.stdout as said:
        spare = psutil.Process(int(said.readline()))
    if is_ready:
        contract.wait_for_file(tmp_path / "trials" / "t0" / "pid")
        wait_until(lambda: spare.status() == psutil.STATUS_SLEEPING, "it waits")
    runner.kill()
    runner.wait()
    assert psutil.wait_procs([spare], timeout=30)[1] == []
