"""Runner, supervisors and workers vanish at once, as with a reboot or a killed container; the same command resumes."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys

import pytest

from flopwatch.process import descendants, start_ticks
from flopwatch.records.sweep_results import read_results
from flopwatch.records.trial import TrialResult, TrialSpec
from flopwatch.sweep import claim as claims
from flopwatch.sweep.claim import own_identity
from flopwatch.sweep.folder import StillRunsError
from flopwatch.sweep.runner import run
from flopwatch.testing import InProcessEngine
from support.sweeping import run_sweep
from testbeds.wait_until import wait_until

OTHER_BOOT = "11111111-2222-3333-4444-555555555555"
COMMAND = "echo {batch_size} >> $LEDGER; test -e $GO || sleep 600"


@pytest.fixture
def environment(tmp_path):
    places = {"LEDGER": tmp_path / "ledger", "GO": tmp_path / "go", "FLOPWATCH_SLOT_DIR": tmp_path / "slots"}
    return {**os.environ, "FLOPWATCH_VISIBLE_SECONDS": "3", **{name: str(place) for name, place in places.items()}}


def sweep_command(folder):
    words = ["sweep", "--command", COMMAND, "--batch-size=1,2", "--seq-len=8", "--jobs", "1", "-o", str(folder)]
    return [sys.executable, "-m", "flopwatch", *words]


def begun(tmp_path):
    return (tmp_path / "ledger").read_text().split() if (tmp_path / "ledger").exists() else []


def kill_all(processes):
    """Stop all of them before killing them, so that none notices the end of another."""
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def resumed(tmp_path, environment):
    """Resume; the messages, after checking that the trial which was interrupted ran again and nothing else did."""
    (interrupted,) = begun(tmp_path)
    (tmp_path / "go").touch()
    command = sweep_command(tmp_path / "s")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(begun(tmp_path)) == sorted(["1", "2", interrupted])
    assert {result.outcome for result in read_results(tmp_path / "s").values()} == {"ok"}
    assert [path.name for path in (tmp_path / "s/earlier").iterdir()] == [f"Command_bs{interrupted}_seq8.1"]
    return done.stderr


def rewrite(folder, **changes):
    for file in (*folder.glob("trials/*/started.json"), *folder.glob("runners/*.runner"), folder / "runner.json"):
        content = json.loads(file.read_text())
        file.write_text(json.dumps(content | {key: new for key, new in changes.items() if key in content}))


@pytest.mark.slow
def test_a_sweep_interrupted_by_a_reboot_is_resumed(tmp_path, environment):
    if not own_identity()["machine"]:
        pytest.skip("without /etc/machine-id, a reboot looks like another host")
    runner = subprocess.Popen(sweep_command(tmp_path / "s"), env=environment, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: begun(tmp_path), "a trial runs")
    finally:
        kill_all([runner.pid, *descendants(runner.pid)])
        runner.wait()
    rewrite(tmp_path / "s", boot_id=OTHER_BOOT)
    assert "waiting" not in resumed(tmp_path, environment)


@pytest.mark.slow
def test_a_sweep_whose_container_was_killed_is_resumed(tmp_path, environment):
    enter = ["unshare", "-u", "-p", "-f", "--mount-proc"]
    try:
        subprocess.run([*enter, "hostname", "box"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this user may not create a PID namespace")
    box = subprocess.Popen(
        [*enter, "sh", "-c", 'hostname box; exec "$@"', "sh", *sweep_command(tmp_path / "s")],
        env=environment,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: begun(tmp_path), "a trial runs")
    finally:
        children = descendants(box.pid)
        os.kill(children[0], signal.SIGKILL)  # the first process of the namespace; the kernel kills the others
        box.wait()
    wait_until(lambda: not any(start_ticks(child) is not None for child in children), "the namespace is gone")
    claimed = json.loads(next((tmp_path / "s/trials").glob("*/started.json")).read_text())
    assert claimed["host"] == "box"
    assert re.fullmatch(r"pid:\[\d+\]", claimed["pid_namespace"])
    resumed(tmp_path, environment)


def test_a_process_of_an_earlier_boot_of_this_machine_is_dead_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(claims, "_machine", lambda: "this")
    here = own_identity()
    assert claims.is_alive_here(here) is True
    assert claims.is_alive_here({**here, "boot_id": OTHER_BOOT}) is False
    for unsure in ({"machine": "that"}, {"machine": ""}, {"host": "far"}):
        assert claims.is_alive_here({**here, "boot_id": OTHER_BOOT, **unsure}) is None
    monkeypatch.setattr(claims, "_machine", lambda: "")
    assert claims.is_alive_here({**here, "boot_id": OTHER_BOOT, "machine": ""}) is None


def test_a_trial_whose_supervisor_comes_back_to_life_is_waited_for(tmp_path, monkeypatch):
    tries = []

    def prepare(trial):
        tries.append(trial.spec.batch_size)
        if trial.spec.batch_size == 2 and tries.count(2) < 3:
            raise StillRunsError("it still runs")
        real(trial)

    real = run.prepare
    monkeypatch.setattr(run, "prepare", prepare)
    specs = [TrialSpec("standard", "tiny", batch, 64) for batch in (1, 2)]
    engine = InProcessEngine(lambda trial: TrialResult(trial.name, trial.key, trial.spec, "ok"))
    results = run_sweep(tmp_path / "s", specs, engine)
    assert {result.outcome for result in results.values()} == {"ok"}
    assert sorted(tries) == [1, 2, 2, 2]
