"""Whoever is killed, a trial never runs twice at once and leaves no process: claims, guards, signs of life."""

import os
import re
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
from flopwatch.records.trial_files import RUNNERS, STARTED, log_file, trial_folder
from flopwatch.sweep import claim as claims
from flopwatch.sweep import folder
from flopwatch.sweep.claim import Claim, own_identity, trial_claim, visible_seconds
from flopwatch.sweep.engines.protocol import Ended
from flopwatch.sweep.folder import FolderGoneError, Trial, check_held, held_folder, own_result, prepare, result_file
from flopwatch.sweep.host.memory import group_places, limit_memory
from flopwatch.sweep.runner.endings import Endings
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


def leave_orphans(sweep):
    """Guard and supervisor killed at once."""
    trial = ready(sweep, "setsid sleep 302 & sleep 303 & echo $PPID > {trial_dir}/pid; sleep 304; true")
    guard = start(trial)
    file = folder_of(trial) / "pid"
    wait_until(lambda: file.exists() and file.read_text().strip(), "the trial began")
    guard.suspend()
    psutil.Process(int(file.read_text())).kill()
    guard.kill()
    guard.wait(30)
    wait_until(lambda: len(left_behind(sweep)) == 3, "three orphans are left, and the shell is gone")


def test_a_runner_clears_what_an_earlier_life_left_before_it_prepares_the_trial_again(sweep):
    leave_orphans(sweep)
    ready(sweep)
    assert left_behind(sweep) == []


def test_a_supervisor_clears_what_an_earlier_life_left_before_its_worker_starts(sweep, monkeypatch):
    """On a host that is not the runner's: whatever engine places the trial again, its orphans go first."""
    monkeypatch.setattr(folder, "kill_marked", lambda place: None)
    leave_orphans(sweep)
    orphans = {pid for pid, _ in left_behind(sweep)}
    mark = f"FLOPWATCH_TRIAL_DIR={trial_folder(sweep.resolve(), 'one')}"
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


def test_a_late_supervisor_of_an_earlier_attempt_leaves(sweep, monkeypatch):
    monkeypatch.setenv("FLOPWATCH_VISIBLE_SECONDS", "0.5")
    trial = ready(sweep, "echo ran")
    earlier = read_json(folder_of(trial) / "spec.json")["attempt"]
    prepare(trial)
    assert start(trial, earlier).wait(60) == 0
    assert not result_file(sweep, "one").exists()
    assert start(trial, read_json(folder_of(trial) / "spec.json")["attempt"]).wait(60) == 0
    assert log_file(sweep, "one").read_text() == "ran\n"


def test_what_runs_is_neither_withdrawn_nor_prepared_again(sweep):
    trial = ready(sweep, TREE)
    guard, watching, tree = started_tree(trial)
    try:
        assert not trial_claim(folder_of(trial)).withdraw()
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


def elsewhere():
    """A process of a host that is not this one."""
    return {**own_identity(), "boot_id": "another", "host": "far"}


def test_a_result_that_comes_into_sight_late_is_no_loss(sweep, monkeypatch):
    monkeypatch.setattr(claims, "own_identity", elsewhere)
    trial, clock = ready(sweep), FakeClock()
    claim = trial_claim(trial.folder)
    assert claim.take(attempt=read_json(folder_of(trial) / "spec.json")["attempt"])
    claim.clock = clock
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


def test_a_folder_whose_runner_died_here_is_taken_at_once(tmp_path):
    holder = "import os; from pathlib import Path; from flopwatch.sweep.folder import held_folder\n"
    holder += f"with held_folder(Path({str(tmp_path / 's')!r})): os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", holder], check=False)
    began = time.monotonic()
    with held_folder(tmp_path / "s"):
        assert time.monotonic() - began < 30


@pytest.mark.parametrize("given", ["abc", "-1", "nan", "inf"])
def test_a_wrong_time_until_files_are_visible_is_refused(monkeypatch, given):
    monkeypatch.setenv("FLOPWATCH_VISIBLE_SECONDS", given)
    with pytest.raises(InputError, match=f"FLOPWATCH_VISIBLE_SECONDS='{given}' is not a number of seconds"):
        visible_seconds()


def test_of_many_who_claim_at_once_one_gets_it(tmp_path):
    won, gate = [], threading.Barrier(8)

    def take(number):
        gate.wait()
        won.extend(turn for turn in range(20) if Claim(tmp_path / f"claim{turn}").take(by=number))

    threads = [threading.Thread(target=take, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(won) == list(range(20))


def test_life_on_another_host_is_a_file_that_is_touched_by_the_readers_clock(tmp_path, monkeypatch):
    monkeypatch.setattr(claims, "own_identity", elsewhere)
    clock = FakeClock()
    claim = Claim(tmp_path / STARTED, clock)
    assert claim.take(attempt="a")
    assert not claim.take(attempt="b"), "once"
    assert claim.holder().life == "unknown"
    for second in range(5):
        os.utime(tmp_path / STARTED, (second, second))  # its clock says 1970
        assert claim.holder().life == "alive"
        clock.advance(80.0)
        assert claim.holder().life == "alive", "less than the patience"
    clock.advance(20.0)
    assert [claim.holder().life, claim.holder().life] == ["gone", "gone"], "silent for 100 s"
    claim.beat()
    assert claim.holder().life == "alive"


def test_who_holds_a_claim_touches_it_and_who_lost_it_does_not(tmp_path):
    claim, next_one = Claim(tmp_path / "claim"), Claim(tmp_path / "claim")
    assert claim.take()
    os.utime(claim.file, (5, 5))
    assert claim.beat()
    assert claim.file.stat().st_mtime > 5
    claim.file.unlink()
    assert claim.owner() == "nobody", "a trial may delete its own files"
    assert next_one.take()
    os.utime(claim.file, (5, 5))
    claim._next_beat = 0.0
    assert (claim.beat(), claim.owner(), claim.file.stat().st_mtime) == (False, "another", 5)
    claim.release()
    assert next_one.owner() == "this process"
    next_one.release()
    assert list(tmp_path.iterdir()) == []


def test_a_claim_that_found_no_space_is_not_taken(tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(claims.json, "dump", full)
    with pytest.raises(OSError, match="No space"):
        Claim(tmp_path / "claim").take()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_another_host_uses_is_refused_with_the_way_to_free_it(tmp_path):
    """Alive or not: no host takes over what another one may still write."""
    with held_folder(tmp_path / "s"):
        pass
    write_json(tmp_path / "s" / RUNNERS / "1.runner", {**elsewhere(), "pid": 77})
    told = r"in use by a sweep on another host \(pid 77 on far\).* free the folder with `(rm .*1\.runner)`"
    with pytest.raises(InputError, match=told) as refused, held_folder(tmp_path / "s"):
        pass
    subprocess.run(re.search(told, str(refused.value))[1], shell=True, check=True)
    with held_folder(tmp_path / "s"):
        pass


def test_a_runner_whose_folder_was_given_to_another_ends(tmp_path):
    with held_folder(tmp_path / "s"):
        check_held(tmp_path / "s")
        write_json(tmp_path / "s" / RUNNERS / "2.runner", elsewhere())
        with pytest.raises(FolderGoneError, match="given to another sweep"):
            check_held(tmp_path / "s")
