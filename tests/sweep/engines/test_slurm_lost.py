"""Whole sweeps on a real Slurm that preempts jobs and whose nodes die: they end green by themselves."""

import os
import shutil
import subprocess
import tempfile
import threading
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from flopwatch.records.trial import Limits, TrialSpec
from flopwatch.sweep.engines.slurm import SlurmEngine
from support.sweeping import left_behind, run_sweep
from testbeds.real_slurm import daemon, need_slurm, real_slurm
from testbeds.wait_until import wait_until

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def lasting_slurm():
    need_slurm()
    folder = Path(tempfile.mkdtemp(prefix="flopwatch-lost-"))
    try:
        with real_slurm(folder, node_timeout_seconds=6) as environment:
            yield environment
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def started_again(lasting_slurm):
    with ExitStack() as nodes:
        yield nodes


@pytest.fixture(autouse=True)
def slurm(lasting_slurm, monkeypatch):
    for name, value in lasting_slurm.items():
        monkeypatch.setenv(name, value)


def run(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


LONG_AT_FIRST = "test -e {trial_dir}/../../met || { echo $$ > {trial_dir}/../../pid; sleep 300; }; echo second"


def swept(folder, meet):
    """One trial that would take five minutes unless something happens to it in its first life; three beside it."""
    limits = Limits(wall_seconds=200.0)
    specs = [
        TrialSpec("command", "none", size, 1, command=LONG_AT_FIRST if size == 1 else "true", limits=limits)
        for size in (1, 2, 3, 4)
    ]
    found = {}
    sweep = threading.Thread(target=lambda: found.update(run_sweep(folder, specs, SlurmEngine())))
    sweep.start()
    try:
        wait_until(lambda: (folder / "pid").exists() and (folder / "pid").read_text(), "it runs")
        wait_until(lambda: len(list(folder.glob("trials/*/result.json"))) == 3, "the others have ended")
        wait_until(lambda: len(run("squeue", "-h", "-r").split("\n")) == 2, "Slurm has heard of it")
        (folder / "met").touch()
        meet()
    finally:
        sweep.join(150)
    assert {result.outcome for result in found.values()} == {"ok"}, found
    assert len(found) == 4
    wait_until(lambda: not left_behind(folder), "nothing is left")
    (attempt,) = found["command_bs1_seq1"].earlier_attempts
    assert attempt["outcome"] == "lost"
    assert attempt["unix_time"] is not None
    assert (folder / attempt["folder"] / "started.json").exists()
    assert [found[f"command_bs{size}_seq1"].earlier_attempts for size in (2, 3, 4)] == [()] * 3
    return attempt


def take_all_nodes(folder):
    """Jobs of a partition that goes before ours: one per node, for all its cores."""
    script = folder / "urgent.sh"
    script.write_text("#!/bin/sh\nsleep 3\n")
    for _ in range(2):
        run("sbatch", "-p", "urgent", "-c", "2", "-o", "/dev/null", str(script))


def test_a_preempted_job_is_submitted_again(tmp_path):
    attempt = swept(tmp_path / "s", lambda: take_all_nodes(tmp_path))
    assert attempt["state"] == "PREEMPTED"


def kill_the_node(name):
    """Its slurmd and all it started, at once, as when the power goes."""
    alive = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    # Another file's Slurm may still run below this process.
    ours = [child for child in alive if child.environ().get("SLURM_CONF") == os.environ["SLURM_CONF"]]
    (node,) = [child for child in ours if child.cmdline()[:4] == ["slurmd", "-D", "-N", name]]
    command = node.cmdline()
    mine = [process for process in psutil.process_iter() if is_of_node(process, name)]
    steps = [process.parent() for process in mine if process.parent().name().startswith("slurmstepd")]
    for process in [node, *steps, *mine]:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    return command


def is_of_node(process, name):
    """Of this test's Slurm only: its configuration names the folder."""
    try:
        environment = process.environ()
    except psutil.Error:
        return False
    return (
        environment.get("SLURM_CONF") == os.environ["SLURM_CONF"]
        and environment.get("SLURMD_NODENAME") == name
        and process.pid != os.getpid()
    )


@pytest.fixture
def revived(started_again):
    """Starts a killed slurmd again when the test is over."""
    commands = []
    yield commands.append
    for command in commands:
        path = {**os.environ, "PATH": f"{os.environ['PATH']}:/usr/sbin"}
        started_again.enter_context(daemon(Path(os.devnull), command, path))
        wait_until(lambda: set(run("sinfo", "-h", "-N", "-o", "%T").split()) == {"idle"}, "the node is back")


def node_of_the_long_one():
    return run("squeue", "-h", "-r", "-t", "RUNNING", "-o", "%N").split()[0]


@pytest.mark.campaign  # a minute and a half
def test_a_node_that_dies_costs_an_attempt_and_another_takes_over(tmp_path, revived):
    node = []

    def meet():
        node.append(node_of_the_long_one())
        revived(kill_the_node(node[0]))

    attempt = swept(tmp_path / "s", meet)
    assert (attempt["state"], attempt["host"]) == ("NODE_FAIL", node[0])
