"""A folder that commit f953919 wrote (`tests/data`), whose runner and supervisor were killed in the second of 3 trials.

Its files look as if both were alive. They call the boot of the host `boot`, not `boot_id`.
"""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from flopwatch.errors import InputError
from flopwatch.process import pid_scope, start_ticks
from flopwatch.records.sweep_results import read_results
from flopwatch.records.trial import TrialResult, TrialSpec
from flopwatch.sweep.folder import held_folder, is_supervised
from flopwatch.testing import InProcessEngine
from support.sweeping import run_sweep

OLD = Path(__file__).parents[1] / "data/sweep_of_f953919"
COMMAND = "echo trial {batch_size}; test {batch_size} = 1 || sleep 60"
SPECS = [TrialSpec("command", "small", size, 8, label="Command", command=COMMAND) for size in (1, 2, 3)]
RUNNING = "Command_bs2_seq8"


@pytest.fixture
def sweep(tmp_path):
    return Path(shutil.copytree(OLD, tmp_path / "s"))


def on_this_host(sweep, pid, ticks):
    """Rewrite who runs the sweep and its second trial, as that commit would have written it on this host."""
    here = pid_scope()
    now = {"pid": pid, "start_ticks": ticks, "boot": here["boot_id"], "pid_namespace": here["pid_namespace"]}
    for file in (sweep / "runners/1.runner", sweep / "trials" / RUNNING / "started.json"):
        file.write_text(json.dumps({**json.loads(file.read_text()), **now}))


def test_it_is_taken_over_and_resumed_once_its_heartbeats_have_stopped(sweep, monkeypatch):
    monkeypatch.setenv("FLOPWATCH_VISIBLE_SECONDS", "1")
    assert read_results(sweep)["Command_bs1_seq8"].outcome == "ok"
    told = []
    with held_folder(sweep, told.append):
        assert (sweep / "runners/2.runner").exists()
    assert told == [f"the last runner of {sweep} was pid 26028 on vm; waiting 1 s to see whether it is still alive"]
    engine = InProcessEngine(lambda trial: TrialResult(trial.name, trial.key, trial.spec, "ok"))
    results = run_sweep(sweep, SPECS, engine)
    assert {name: result.outcome for name, result in results.items()} == {
        f"Command_bs{size}_seq8": "ok" for size in (1, 2, 3)
    }
    assert {"Command_bs2_seq8", "Command_bs3_seq8"} <= set(engine.submitted)
    assert (sweep / "earlier" / f"{RUNNING}.1" / "started.json").exists()


def test_on_its_own_host_the_kernel_says_at_once_who_lives(sweep):
    with subprocess.Popen(["sleep", "60"]) as process:
        on_this_host(sweep, process.pid, start_ticks(process.pid))
        assert is_supervised(sweep, RUNNING)
        with pytest.raises(InputError, match=f"another sweep is running in .*pid {process.pid} on vm"):
            held_folder(sweep, report=pytest.fail).__enter__()
        process.kill()
    assert not is_supervised(sweep, RUNNING)
    with held_folder(sweep, report=pytest.fail):
        pass
