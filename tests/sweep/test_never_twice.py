"""Whoever is killed, a trial never runs twice at once and leaves no process: claims, guards, tokens, signs of life."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from flopwatch.errors import InputError
from flopwatch.files import read_json, write_json
from flopwatch.records.sweep_results import read_result
from flopwatch.records.trial import Limits, TrialResult, TrialSpec
from flopwatch.records.trial_files import RUNNERS, STARTED, SUPERVISOR_HEARTBEAT, log_file, trial_folder
from flopwatch.sweep import lease as leases
from flopwatch.sweep.engines.protocol import Ended
from flopwatch.sweep.folder import Trial, held_folder, own_result, prepare, result_file, runner_lease
from flopwatch.sweep.host.memory import group_places, limit_memory
from flopwatch.sweep.lease import Lease, create_exclusively, own_identity, trial_lease, visible_seconds
from flopwatch.sweep.runner.endings import Endings
from flopwatch.sweep.supervisor import supervise as supervisor
from flopwatch.sweep.supervisor.guard import group_name
from flopwatch.testing import FakeClock
from support.sweeping import left_behind
from testbeds.wait_until import wait_until

SUPERVISOR = [sys.executable, "-m", "flopwatch.sweep.supervisor"]
TREE = "sleep 301 & setsid sleep 302 & env -i setsid sleep 303 & echo $PPID > {trial_dir}/pid; sleep 304; true"


@pytest.fixture
def sweep(tmp_path):
    with held_folder(tmp_path / "sweep"):
        pass
    return tmp_path / "sweep"


def ready(sweep, command="sleep 300", limits=None):
    spec = TrialSpec("command", "none", 1, 1, command=command, device="cpu", limits=limits or Limits(100.0, None))
    trial = Trial(sweep, "one", "key", spec)
    prepare(trial)
    return trial


def start(trial, *words):
    return psutil.Popen([*SUPERVISOR, str(trial.sweep), trial.name, *words], stderr=subprocess.DEVNULL)


def folder_of(trial):
    return trial_folder(trial.sweep.resolve(), trial.name)


def started_tree(trial):
    """The guard, the supervisor, and everything below it."""
    guard = start(trial)
    file = folder_of(trial) / "pid"
    wait_until(lambda: file.exists() and file.read_text().strip(), "the trial began")
    watching = psutil.Process(int(file.read_text()))
    wait_until(lambda: len(watching.children(recursive=True)) >= 5, "its children run")
    assert watching.ppid() == guard.pid
    return guard, watching, watching.children(recursive=True)


def alive(processes):
    return [process for process in processes if process.is_running() and process.status() != "zombie"]


def test_nothing_is_left_of_a_trial_whose_supervisor_is_killed(sweep):
    """Children of a shell, other sessions, and what has thrown its environment away."""
    guard, watching, tree = started_tree(ready(sweep, TREE))
    watching.kill()
    assert guard.wait(30) == -signal.SIGKILL, "an engine is told how the supervisor ended"
    assert alive(tree) == []


def test_a_supervisor_whose_guard_is_killed_ends_the_trial_in_order(sweep):
    trial = ready(sweep, TREE)
    guard, watching, tree = started_tree(trial)
    guard.kill()
    guard.wait(30)
    wait_until(lambda: not alive([watching]), "the supervisor is gone")
    assert alive(tree) == []
    assert own_result(sweep, trial.name).outcome == "cancelled"


def test_a_supervisor_clears_what_an_earlier_life_left_before_its_worker_starts(sweep):
    """Guard and supervisor killed at once: whatever engine places the trial again, its orphans go first."""
    trial = ready(sweep, "setsid sleep 302 & sleep 303 & echo $PPID > {trial_dir}/pid; sleep 304; true")
    guard = start(trial)
    file = folder_of(trial) / "pid"
    wait_until(lambda: file.exists() and file.read_text().strip(), "the trial began")
    guard.suspend()
    psutil.Process(int(file.read_text())).kill()
    guard.kill()
    guard.wait(30)
    wait_until(lambda: len(left_behind(sweep)) == 3, "three orphans are left, and the shell is gone")
    orphans = {pid for pid, _ in left_behind(sweep)}
    mark = f"FLOPWATCH_TRIAL_DIR={folder_of(trial)}"
    count = f"grep -lzx '{mark}' /proc/[0-9]*/environ 2>/dev/null | xargs -n1 dirname | sort > {{trial_dir}}/seen; true"
    again = ready(sweep, "echo $$; " + count)
    assert start(again).wait(60) == 0
    assert own_result(sweep, "one").outcome == "ok"
    assert left_behind(sweep) == []
    seen = {int(Path(line).name) for line in (folder_of(again) / "seen").read_text().splitlines()}
    assert seen
    assert not seen & orphans, "an orphan ran beside the new attempt"


def test_a_killed_supervisor_leaves_no_cgroup(sweep):
    probe = limit_memory(2**28, "probe")
    probe.close()
    if probe.kind != "cgroup":
        pytest.skip("no cgroup may be made here")
    trial = ready(sweep, TREE, Limits(100.0, None, 2**30))
    guard, watching, tree = started_tree(trial)
    assert groups_of(trial), "without a group this test shows nothing"
    watching.kill()
    guard.wait(30)
    assert alive(tree) == []
    assert groups_of(trial) == []


def groups_of(trial):
    tag = group_name(folder_of(trial))
    return [name for place in group_places() for name in os.listdir(place) if tag in name]


def test_whoever_carries_a_trials_variable_and_started_us_is_spared(sweep):
    """A shell in which somebody looked into a trial by hand, and runs the sweep again."""
    trial = ready(sweep, "echo ran")
    mark = {**os.environ, "FLOPWATCH_TRIAL_DIR": str(folder_of(trial))}
    shell = f"{' '.join(SUPERVISOR)} {sweep} one; echo the shell lives"
    done = subprocess.run(["/bin/sh", "-c", shell], env=mark, capture_output=True, text=True, check=True)
    assert done.stdout == "the shell lives\n"
    assert own_result(sweep, "one").outcome == "ok"


def test_a_stopped_supervisor_is_killed_by_its_guard_with_the_whole_tree(sweep, monkeypatch):
    monkeypatch.setattr(supervisor, "_GUARD_PATIENCE_SECONDS", 1.0)
    trial = ready(sweep, TREE, Limits(1.0, None))
    child = os.fork()
    if not child:
        try:
            supervisor.main([str(sweep), trial.name])
        finally:
            os._exit(0)
    file = folder_of(trial) / "pid"
    wait_until(lambda: file.exists() and file.read_text().strip(), "the trial began")
    watching = psutil.Process(int(file.read_text()))
    watching.suspend()
    tree = watching.children(recursive=True)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert alive([watching, *tree]) == []
    (told,) = Endings().certain([Ended("one", {"signal": 9})], {"one": trial})
    assert "did not respond for" in told.evidence["stuck"]


def test_a_late_supervisor_of_an_earlier_attempt_leaves(sweep, monkeypatch):
    monkeypatch.setenv("FLOPWATCH_VISIBLE_SECONDS", "0.5")
    trial = ready(sweep, "echo ran")
    earlier = read_json(folder_of(trial) / "spec.json")["attempt"]
    prepare(trial)
    assert start(trial, earlier).wait(60) == 0
    assert not result_file(sweep, "one").exists()
    assert start(trial, read_json(folder_of(trial) / "spec.json")["attempt"]).wait(60) == 0
    assert log_file(sweep, "one").read_text() == "ran\n"


@pytest.mark.parametrize("given", ["abc", "-1", "nan", "inf"])
def test_a_wrong_time_until_files_are_visible_is_told_once_and_the_default_is_used(monkeypatch, capfd, given):
    monkeypatch.setenv("FLOPWATCH_VISIBLE_SECONDS", given)
    assert [visible_seconds(), visible_seconds()] == [90.0, 90.0]
    told = f"flopwatch: FLOPWATCH_VISIBLE_SECONDS='{given}' is not a number of seconds, 0 or more; using 90\n"
    assert capfd.readouterr().err == told


def test_what_was_withdrawn_nobody_starts(sweep):
    trial = ready(sweep, "echo ran")
    assert trial_lease(folder_of(trial)).withdraw()
    assert trial_lease(folder_of(trial)).withdraw(), "twice is once"
    assert start(trial).wait(60) == 0
    assert not log_file(sweep, "one").exists()


def test_what_runs_is_neither_withdrawn_nor_prepared_again(sweep):
    trial = ready(sweep, TREE)
    guard, watching, tree = started_tree(trial)
    try:
        assert not trial_lease(folder_of(trial)).withdraw()
        with pytest.raises(InputError, match="still runs"):
            prepare(trial)
    finally:
        guard.terminate()
        guard.wait(30)
    assert alive([watching, *tree]) == []


def test_a_late_result_of_an_earlier_attempt_is_not_the_new_ones(sweep):
    trial = ready(sweep)
    stale = TrialResult("one", "key", trial.spec, "ok", attempt="another")
    write_json(result_file(sweep, "one"), stale.to_json())
    assert own_result(sweep, "one") is None
    assert read_result(result_file(sweep, "one")) is not None


@pytest.mark.slow
def test_a_supervisor_that_was_given_up_stops_and_writes_nothing(sweep):
    trial = ready(sweep, TREE)
    guard, watching, tree = started_tree(trial)
    write_json(folder_of(trial) / STARTED, {**own_identity(), "attempt": "the next"})
    assert guard.wait(60) == 0
    assert alive([watching, *tree]) == []
    assert not result_file(sweep, "one").exists()


@pytest.mark.parametrize("has_links", [True, False])
def test_of_many_who_claim_at_once_one_gets_it(tmp_path, monkeypatch, has_links):
    if not has_links:

        def refuse(source, target):
            raise OSError(errno.EPERM, "no links on this file system")

        monkeypatch.setattr(leases.os, "link", refuse)
    won, gate = [], threading.Barrier(8)

    def take(number):
        gate.wait()
        won.extend(turn for turn in range(20) if create_exclusively(tmp_path / f"claim{turn}", {"by": number}))

    threads = [threading.Thread(target=take, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(won) == list(range(20))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(f"claim{turn}" for turn in range(20))


def beats(lease, state="alive"):
    """A heartbeat of whoever holds the lease."""
    count = (read_json(lease.heartbeat) or {"beats": 0})["beats"] + 1
    lease.heartbeat.write_text(json.dumps({"beats": count, "state": state}))


def elsewhere():
    """A process of a host that is not this one."""
    return {**own_identity(), "boot_id": "another", "host": "far"}


def test_life_on_another_host_is_a_sign_that_changes_by_the_readers_clock(tmp_path, monkeypatch):
    monkeypatch.setattr(leases, "own_identity", elsewhere)
    clock = FakeClock()
    lease = Lease(tmp_path / STARTED, tmp_path / SUPERVISOR_HEARTBEAT, clock)
    assert lease.take({"attempt": "a"})
    assert not lease.take({"attempt": "b"}), "once"
    assert lease.holder().life == "unknown"
    for _ in range(5):
        beats(lease)
        os.utime(tmp_path / SUPERVISOR_HEARTBEAT, (1, 1))  # its clock says 1970
        assert lease.holder().life == "alive"
        clock.advance(80.0)
        assert lease.holder().life == "alive", "less than the patience"
    clock.advance(20.0)
    assert lease.holder().life == "gone", "silent for 100 s"
    beats(lease, "ended")
    assert lease.holder().life == "gone", "it said that it left"


def test_the_patience_is_longer_than_an_attribute_cache():
    assert visible_seconds() > 60.0


def test_a_result_that_comes_into_sight_late_is_no_loss(sweep, monkeypatch):
    monkeypatch.setattr(leases, "own_identity", elsewhere)
    trial, clock = ready(sweep), FakeClock()
    lease = trial_lease(trial.folder)
    assert lease.take({"attempt": read_json(folder_of(trial) / "spec.json")["attempt"]})
    lease.end()
    late = Endings(clock)
    assert late.certain([Ended("one")], {"one": trial}) == []
    clock.advance(60.0)
    assert late.certain([], {"one": trial}) == [], "not lost while it may be hidden"
    write_json(result_file(sweep, "one"), TrialResult("one", "key", trial.spec, "ok").to_json())
    assert [ended.name for ended in late.certain([], {"one": trial})] == ["one"]
    result_file(sweep, "one").unlink()
    assert late.certain([Ended("one")], {"one": trial}) == []
    clock.advance(100.0)
    assert len(late.certain([], {"one": trial})) == 1


def test_a_trial_nobody_began_is_told_at_once_and_can_no_longer_begin(sweep):
    trial = ready(sweep)
    assert len(Endings().certain([Ended("one")], {"one": trial})) == 1
    assert start(trial).wait(60) == 0
    assert not log_file(sweep, "one").exists()


def test_a_supervisor_without_a_sign_of_life_is_ended_after_its_limits_and_our_patience(sweep):
    trial, clock, ended = ready(sweep, limits=Limits(90.0, None)), FakeClock(), []
    lease = trial_lease(trial.folder)
    lease.clock = clock
    assert lease.take({"attempt": "a"})

    class Engine:
        end = staticmethod(ended.extend)

    endings = Endings()
    for _ in range(100):
        lease.beat()
        endings.end_silent(Engine(), {"one": trial})
        clock.advance(10.0)
    assert ended == [], "as long as it beats it may take what it takes"
    for _ in range(30):
        endings.end_silent(Engine(), {"one": trial})
        clock.advance(10.0)
    assert ended == ["one"], "once"
    (told,) = endings.certain([Ended("one")], {"one": trial}, is_patient=False)
    assert "wrote no heartbeat for 19" in told.evidence["stuck"]


def test_the_time_in_the_queue_is_no_silence_of_the_supervisor_that_starts_then(sweep, monkeypatch):
    monkeypatch.setattr(leases, "own_identity", elsewhere)
    trial, clock, ended = ready(sweep, limits=Limits(90.0, None)), FakeClock(time.monotonic()), []
    lease = trial_lease(trial.folder)
    lease.clock = clock

    class Engine:
        end = staticmethod(ended.extend)

    endings = Endings()
    for _ in range(100):  # queued for longer than the patience
        endings.end_silent(Engine(), {"one": trial})
        clock.advance(10.0)
    assert lease.take({"attempt": "a"})  # its heartbeat is not visible yet
    endings.end_silent(Engine(), {"one": trial})
    assert lease.holder().life == "unknown"
    clock.advance(10.0)
    lease.beat()
    endings.end_silent(Engine(), {"one": trial})
    assert lease.holder().life == "alive"
    assert ended == []


def test_a_folder_whose_runner_died_here_is_taken_at_once(tmp_path):
    holder = "import os; from pathlib import Path; from flopwatch.sweep.folder import held_folder\n"
    holder += f"with held_folder(Path({str(tmp_path / 's')!r})): os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", holder], check=False)
    began = time.monotonic()
    with held_folder(tmp_path / "s", report=pytest.fail):
        assert time.monotonic() - began < 30


@pytest.mark.slow
def test_a_silent_runner_of_another_host_is_replaced_and_a_living_one_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("FLOPWATCH_VISIBLE_SECONDS", "2")
    with held_folder(tmp_path / "s"):
        pass
    write_json(tmp_path / "s" / RUNNERS / "2.runner", {**elsewhere(), "pid": 77})
    told = []
    with held_folder(tmp_path / "s", told.append):
        pass
    assert "pid 77 on far; waiting" in told[0]
    write_json(tmp_path / "s" / RUNNERS / "4.runner", {**elsewhere(), "pid": 78})
    lease, stop = runner_lease(tmp_path / "s", 4), threading.Event()
    beating = threading.Thread(target=lambda: [beats(lease) for _ in iter(lambda: stop.wait(0.2), True)])
    beating.start()
    try:
        refused = pytest.raises(InputError, match=r"another sweep is running in .*pid 78 on far.*--output")
        with refused, held_folder(tmp_path / "s", told.append):
            pass
    finally:
        stop.set()
        beating.join()


def test_a_runner_that_was_replaced_ends_as_if_killed(tmp_path, monkeypatch):
    code = "import sys, time; from pathlib import Path; from flopwatch.sweep import folder\n"
    code += "folder.BEAT_SECONDS = 0.1\n"
    code += f"with folder.held_folder(Path({str(tmp_path / 's')!r})): print('held', flush=True); time.sleep(60)"
    runner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert runner.stdout.readline() == b"held\n"
    write_json(tmp_path / "s" / RUNNERS / "2.runner", elsewhere())
    _, errors = runner.communicate(timeout=30)
    assert runner.returncode == 1
    assert b"on far took over this sweep" in errors


def test_a_sign_of_life_is_never_half_of_two(tmp_path):
    lease = Lease(tmp_path / "claim", tmp_path / "beat")
    assert lease.take({}, attempt="x" * 32)
    for _ in range(30):
        assert lease.beat()
        assert json.loads((tmp_path / "beat").read_bytes())["state"] == "alive"


def test_whose_lease_was_taken_by_another_beats_no_more(tmp_path):
    lease = Lease(tmp_path / "claim", tmp_path / "beat")
    assert lease.take({})
    lease.file.unlink()
    assert (lease.beat(), lease.owner()) == (True, "nobody"), "a trial may delete its own files"
    assert Lease(tmp_path / "claim", tmp_path / "beat").take({})
    assert (lease.beat(), lease.owner()) == (False, "another")
    lease.end()
    assert not (tmp_path / "beat").exists()
