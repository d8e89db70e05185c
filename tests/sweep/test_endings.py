"""Fourteen ways a trial can end, each told apart, none at the cost of another, under every engine."""

import os
import signal
import threading
from dataclasses import replace
from functools import partial

import pytest

from flopwatch.records.trial import Limits, TrialSpec
from flopwatch.sweep.engines.ray import RayEngine
from flopwatch.sweep.engines.slurm import SlurmEngine
from support.sweeping import TESTS, Listener, left_behind, run_sweep
from support.warm_sweep import run_sweep_warm
from testbeds.real_ray import ray_cluster
from testbeds.wait_until import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.requirement("R22")]

FRESH_QUIET_SECONDS = 45.0
"""No-progress limit of what hangs. An import of torch is no progress either: five at once took more than 20 s in CI."""
WARM_QUIET_SECONDS = 6.0
"""The same for a worker that is a fork of a process with torch."""

BASE = TrialSpec(
    "endings:Counted", "tiny", 2, 16, steps=2, warmup_steps=1, trace=False, threads=1,
    limits=Limits(wall_seconds=None, no_progress_seconds=300.0),
)  # fmt: skip
HOST_LIMIT_BYTES = 1200 << 20

# What only waits is first, so that it waits while the others run.
ENDINGS = {
    "hang-gil": ("HangsWithTheGil", "hang", {"killed_by": "flopwatch"}),
    "hang-deaf": ("HangsDeaf", "hang", {"killed_by": "flopwatch"}),
    "slow": ("Slow", "ok", {"exit_code": 0}),
    "success": ("Counted", "ok", {"exit_code": 0}),
    "python-error": ("PythonError", "error", {"exit_code": 1}),
    "device-memory": ("DeviceMemory", "oom_device", {"exit_code": 1}),
    "host-memory": ("HostMemory", "oom_host", {}),
    "segfault": ("Segfault", "crash", {"signal": "SIGSEGV"}),
    "killed": ("WaitsForItsKiller", "crash", {"signal": "SIGKILL"}),
    "hard-exit": ("HardExit", "error", {"exit_code": 3}),
    "sys-exit": ("SystemExitFour", "error", {"exit_code": 4}),
    "child": ("LeavesAChild", "ok", {"exit_code": 0}),
    "session": ("LeavesASession", "ok", {"exit_code": 0}),
    "half-written": ("DiesWhileWriting", "ok", {"signal": "SIGKILL"}),
}


def spec_of(ending, quiet_seconds):
    trainer = ENDINGS[ending][0]
    spec = replace(BASE, trainer=f"endings:{trainer}", label=ending)
    if ending == "host-memory":
        return replace(spec, limits=replace(spec.limits, memory_bytes=HOST_LIMIT_BYTES))
    if ending in ("hang-gil", "hang-deaf", "slow"):
        spec = replace(spec, limits=replace(spec.limits, no_progress_seconds=quiet_seconds))
    return replace(spec, steps=int(quiet_seconds / 2) + 1) if ending == "slow" else spec


@pytest.fixture
def killer():
    """Kills from outside whatever asks for it."""
    done = threading.Event()
    folders = []

    def watch():
        while not done.wait(0.1):
            for folder in folders:
                for file in folder.glob("trials/*/kill_me"):
                    pid = int(file.read_text() or 0)
                    if pid:
                        file.unlink()
                        os.kill(pid, signal.SIGKILL)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    yield folders.append
    done.set()
    thread.join()


@pytest.fixture(autouse=True)
def findable_trainers(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", str(TESTS), prepend=os.pathsep)
    monkeypatch.setenv("FLOPWATCH_SLOT_DIR", str(tmp_path / "slots"))


def check_endings(folder, killer, run, quiet_seconds=FRESH_QUIET_SECONDS):
    killer(folder)
    listener = Listener()
    results = run(folder, [spec_of(ending, quiet_seconds) for ending in ENDINGS], listener=listener)
    found = {name.partition("_")[0]: result for name, result in results.items()}
    told = {ending: (found[ending].outcome, found[ending].reason) for ending in ENDINGS}
    assert {ending: outcome for ending, (outcome, _) in told.items()} == {
        ending: outcome for ending, (_, outcome, _) in ENDINGS.items()
    }, told
    for ending, (_, _, evidence) in ENDINGS.items():
        assert evidence.items() <= found[ending].evidence.items(), (ending, found[ending].evidence)
    assert "sleep" in found["hang-gil"].stacks or "forward" in found["hang-gil"].stacks
    assert "block signals" in found["hang-deaf"].stacks
    starts = [line.split()[0] for line in (folder / "starts.txt").read_text().splitlines()]
    assert sorted(starts) == sorted(results), "each was started once"
    assert len(listener.results) == len(ENDINGS)
    wait_until(lambda: left_behind(folder) == [], "nothing of any trial is left", seconds=20.0)


def test_under_the_local_engine(tmp_path, killer):
    check_endings(tmp_path / "sweep", killer, partial(run_sweep_warm, jobs=2), WARM_QUIET_SECONDS)


def test_under_the_ray_engine(tmp_path, killer):
    with ray_cluster(cpus=5) as cluster:
        engine = RayEngine(cluster.address)
        check_endings(tmp_path / "sweep", killer, partial(run_sweep, engine=engine))


def test_under_the_slurm_engine(slurm, tmp_path, killer):
    check_endings(tmp_path / "sweep", killer, partial(run_sweep, engine=SlurmEngine()))
