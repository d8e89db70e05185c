"""What every engine keeps to. Each function takes an engine that is not open yet and a folder for the sweep.

The trials are shell commands under the real supervisor, so that ends and leftovers are those of real processes.
"""

import os
import time
from pathlib import Path

from flopwatch.process import start_ticks
from flopwatch.records.sweep_results import read_result
from flopwatch.records.trial import Limits, TrialSpec
from flopwatch.records.trial_files import trial_folder
from flopwatch.sweep.folder import Trial, prepare, result_file
from flopwatch.sweep.host import processes as process_tree

PATIENCE_SECONDS = 120.0


def make_trials(sweep, *commands, **settings):
    """One trial per command, named t0, t1, ..., their folders ready."""
    for name in ("trials", "logs", "runs"):
        (sweep / name).mkdir(parents=True, exist_ok=True)
    settings = {"limits": Limits(wall_seconds=100.0), "device": "cpu", **settings}
    trials = []
    for number, command in enumerate(commands):
        spec = TrialSpec("command", "none", 1, 1, command=command, **settings)
        trials.append(Trial(sweep, f"t{number}", f"key{number}", spec))
        prepare(trials[-1])
    return trials


def run_all(engine, trials, on_tick=lambda: None):
    """Submits as there is room and collects ends until all have ended; returns the evidence by name."""
    waiting, ends, out, deadline = list(trials), {}, set(), time.monotonic() + PATIENCE_SECONDS
    while waiting or out:
        assert time.monotonic() < deadline, f"no end of {sorted(out)}, not placed: {[t.name for t in waiting]}"
        while waiting and (room := engine.room(waiting[0].spec)):
            batch, waiting = waiting[:room], waiting[room:]
            engine.submit(batch)
            out |= {trial.name for trial in batch}
        for ended in engine.wait(0.25):
            assert ended.name in out, f"{ended.name} ended twice, or was never placed"
            out.remove(ended.name)
            ends[ended.name] = ended.evidence
        on_tick()
    return ends


def outcome(trial):
    result = read_result(result_file(trial.sweep, trial.name))
    return None if result is None else result.outcome


def left_behind(trials):
    """Processes of these trials that still run, whoever their parent is."""
    return [pid for trial in trials for pid in process_tree.marked_processes(folder_of(trial))]


def folder_of(trial):
    return trial_folder(trial.sweep.resolve(), trial.name)


def wait_for_file(file, engine=None):
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not Path(file).exists() or not Path(file).read_text().strip():
        assert time.monotonic() < deadline, f"{file} never came"
        if engine is not None:
            assert not engine.wait(0.05), "it ended too early"
    return Path(file).read_text().strip()


def every_trial_ends_once_with_a_result(engine, sweep):
    trials = make_trials(sweep, "echo fine", "exit 3", "kill -SEGV $$")
    assert list(engine.open(sweep, [])) == []
    try:
        ends = run_all(engine, trials)
        assert sorted(ends) == [trial.name for trial in trials]
        assert [outcome(trial) for trial in trials] == ["ok", "error", "crash"]
        assert not engine.wait(0)
    finally:
        engine.close()
    assert left_behind(trials) == []


def cancel_ends_everything(engine, sweep):
    """Also what the trial started in a session of its own, and what was placed and had not begun."""
    command = "setsid sleep 300 & echo $! > {trial_dir}/pid; sleep 300"
    trials = make_trials(sweep, *[command] * 3)
    engine.open(sweep, [])
    try:
        placed = []
        while len(placed) < len(trials) and engine.room(trials[len(placed)].spec):
            engine.submit([trials[len(placed)]])
            placed.append(trials[len(placed)])
        pid = int(wait_for_file(folder_of(placed[0]) / "pid", engine))
        assert start_ticks(pid) is not None
        engine.cancel()
        ends = run_all_placed(engine, placed)
        assert sorted(ends) == [trial.name for trial in placed]
        assert {outcome(trial) for trial in placed} <= {"cancelled", None}
        assert outcome(placed[0]) == "cancelled"
        assert start_ticks(pid) is None
        assert left_behind(trials) == []
    finally:
        engine.close()


def run_all_placed(engine, placed):
    ends, deadline = {}, time.monotonic() + PATIENCE_SECONDS
    while len(ends) < len(placed):
        assert time.monotonic() < deadline, f"only {sorted(ends)} ended"
        for ended in engine.wait(0.25):
            assert ended.name not in ends
            ends[ended.name] = ended.evidence
    return ends


def a_killed_supervisor_is_an_end_with_evidence(engine, sweep):
    (trial,) = make_trials(sweep, "echo $PPID > {trial_dir}/supervisor; sleep 300")
    engine.open(sweep, [])
    try:
        engine.submit([trial]) if engine.room(trial.spec) else None
        os.kill(int(wait_for_file(folder_of(trial) / "supervisor", engine)), 9)
        (ends,) = run_all_placed(engine, [trial]).values()
        assert outcome(trial) is None
        return ends
    finally:
        process_tree.kill_marked(folder_of(trial))
        engine.close()
