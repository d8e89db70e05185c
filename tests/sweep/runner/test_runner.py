import os
import subprocess
import sys

import pytest

from flopwatch.errors import InputError
from flopwatch.records.trial import TrialResult, TrialSpec
from flopwatch.sweep.engines.protocol import Ended
from flopwatch.sweep.folder import held_folder
from flopwatch.sweep.runner.observing import Stop
from flopwatch.sweep.runner.plan import DONE, SOME_FAILED, exit_status, is_larger, make_plan
from flopwatch.testing import InProcessEngine
from support.sweeping import run_sweep


def grid(trainers=("standard", "ghost")):
    return [TrialSpec(trainer, "tiny", batch, seq) for trainer in trainers for batch in (1, 2, 4) for seq in (64, 128)]


def test_what_is_larger_than_an_out_of_memory_is_not_run(tmp_path):
    def run(trial):
        outcome = "oom_device" if trial.spec.batch_size * trial.spec.seq_len >= 256 else "ok"
        return TrialResult(trial.name, trial.key, trial.spec, outcome)

    engine = InProcessEngine(run)
    results = run_sweep(tmp_path / "s", grid(), engine)
    inferred = {name for name, result in results.items() if result.outcome == "oom_inferred"}
    assert inferred == {"standard_bs4_seq128", "ghost_bs4_seq128"}
    assert not inferred & set(engine.submitted)
    assert results["ghost_bs4_seq128"].evidence["from"].startswith("ghost_")


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (TrialSpec("ghost", "1b", 8, 512), True),
        (TrialSpec("ghost", "1b", 4, 513), True),
        (TrialSpec("ghost", "1b", 4, 512), False),
        (TrialSpec("ghost", "1b", 8, 511), False),
        (TrialSpec("ghost", "small", 8, 1024), False),
        (TrialSpec("fast", "1b", 8, 1024), False),
        (TrialSpec("ghost", "1b", 8, 1024, dtype="bf16"), False),
        (TrialSpec("ghost", "1b", 8, 1024, checkpointing=True), False),
        (TrialSpec("ghost", "1b", 8, 1024, options={"x": 1}), False),
    ],
)
def test_only_the_same_thing_in_larger_is_inferred(spec, expected):
    assert is_larger(spec, TrialSpec("ghost", "1b", 4, 512)) is expected


def test_a_supervisor_that_vanished_is_lost_and_the_sweep_goes_on(tmp_path):
    engine = InProcessEngine(
        lambda trial: None if trial.spec.batch_size == 2 else TrialResult(trial.name, trial.key, trial.spec, "ok")
    )
    results = run_sweep(tmp_path / "s", grid(("standard",)), engine)
    assert sorted(result.outcome for result in results.values()) == ["lost"] * 2 + ["ok"] * 4


BEFORE_A_STEP = {"phase": "build"}


@pytest.mark.parametrize(
    ("outcome", "ended"),
    [
        ("error", BEFORE_A_STEP),
        ("invalid", BEFORE_A_STEP),
        ("unsupported", BEFORE_A_STEP),
        ("unsupported", {"phase": "warmup", "step": 0}),
    ],
)
def test_if_the_smallest_trial_cannot_run_at_all_its_kind_is_skipped_with_its_reason(tmp_path, outcome, ended):
    def run(trial):
        if trial.spec.trainer == "standard":
            return TrialResult(trial.name, trial.key, trial.spec, "ok")
        return TrialResult(trial.name, trial.key, trial.spec, outcome, "tied weights", **ended)

    engine = InProcessEngine(run)
    results = run_sweep(tmp_path / "s", grid(), engine)
    assert [name for name in engine.submitted if name.startswith("ghost")] == ["ghost_bs1_seq64"]
    assert results["ghost_bs1_seq64"].outcome == outcome
    skipped = [result for result in results.values() if result.outcome == "skipped"]
    assert len(skipped) == 5
    (reason,) = {result.reason for result in skipped}
    assert reason.startswith(f"not run, because ghost_bs1_seq64 could not begin ({outcome}: tied weights)")
    assert sum(result.outcome == "ok" for result in results.values()) == 6
    again = InProcessEngine(run)
    assert len(run_sweep(tmp_path / "s", grid(), again)) == 12
    assert again.submitted == []
    with held_folder(tmp_path / "s"):
        status = exit_status(make_plan(tmp_path / "s", grid()), {}, was_stopped=False)
    assert status == (DONE if outcome == "unsupported" else SOME_FAILED)


def test_once_it_is_mended_only_failed_runs_the_skipped_trials_too(tmp_path):
    def run(outcome):
        return InProcessEngine(lambda trial: TrialResult(trial.name, trial.key, trial.spec, outcome, phase="build"))

    failing = run("error")
    run_sweep(tmp_path / "s", grid(("ghost",)), failing)
    assert len(failing.submitted) == 1
    mended = run("ok")
    results = run_sweep(tmp_path / "s", grid(("ghost",)), mended, only="failed")
    assert (len(mended.submitted), {result.outcome for result in results.values()}) == (6, {"ok"})


@pytest.mark.parametrize(
    ("outcome", "ended"),
    [
        ("error", {"phase": "warmup", "step": 0}),  # such as BatchNorm, which cannot take one sample
        ("unsupported", {"phase": "measure", "step": 3}),
        ("oom_host", BEFORE_A_STEP),
        ("crash", BEFORE_A_STEP),
        ("timeout", BEFORE_A_STEP),
    ],
)
def test_what_may_depend_on_the_size_skips_nothing(tmp_path, outcome, ended):
    def run(trial):
        is_first = trial.spec.batch_size == 1 and trial.spec.seq_len == 64
        return TrialResult(trial.name, trial.key, trial.spec, outcome if is_first else "ok", "why", **ended)

    results = run_sweep(tmp_path / "s", grid(("ghost",)), InProcessEngine(run))
    assert "skipped" not in {result.outcome for result in results.values()}


def test_the_smallest_of_each_kind_is_submitted_before_the_others(tmp_path):
    engine = InProcessEngine(lambda trial: TrialResult(trial.name, trial.key, trial.spec, "ok"))
    run_sweep(tmp_path / "s", grid(), engine)
    assert set(engine.submitted[:2]) == {"standard_bs1_seq64", "ghost_bs1_seq64"}


def test_other_options_are_of_another_kind(tmp_path):
    def run(trial):
        is_wrong = trial.spec.options["precision"] == "fp8"
        return TrialResult(
            trial.name, trial.key, trial.spec, "unsupported" if is_wrong else "ok", "no fp8", phase="build"
        )

    specs = [
        TrialSpec("mine:Own", "tiny", batch, 64, options={"precision": kind})
        for kind in ("fp8", "bf16")
        for batch in (1, 2)
    ]
    outcomes = sorted(result.outcome for result in run_sweep(tmp_path / "s", specs, InProcessEngine(run)).values())
    assert outcomes == ["ok", "ok", "skipped", "unsupported"]


def test_a_command_is_never_skipped(tmp_path):
    specs = [TrialSpec("command", "none", batch, 1, command="test {batch_size} -gt 1") for batch in (1, 2)]

    def run(trial):
        outcome = "error" if trial.spec.batch_size == 1 else "ok"
        return TrialResult(trial.name, trial.key, trial.spec, outcome, phase="start")

    assert {result.outcome for result in run_sweep(tmp_path / "s", specs, InProcessEngine(run)).values()} == {
        "error",
        "ok",
    }


def test_finishing_starts_nothing_new(tmp_path):
    stop = Stop()

    def run(trial):
        stop.finish = True
        return TrialResult(trial.name, trial.key, trial.spec, "ok")

    results = run_sweep(tmp_path / "s", grid(), InProcessEngine(run), stop=stop)
    assert len(results) == 1
    assert len(run_sweep(tmp_path / "s", grid(), InProcessEngine(run))) == 12


def test_two_sweeps_in_one_folder_are_kept_apart(tmp_path):
    holder = "import sys, time; from pathlib import Path; from flopwatch.sweep.folder import held_folder\n"
    holder += f"with held_folder(Path({str(tmp_path / 's')!r})): print('held', flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", holder], stdout=subprocess.PIPE)
    try:
        assert process.stdout.readline() == b"held\n"
        with pytest.raises(InputError, match=rf"another sweep is running in .*pid {process.pid}.*--output"):
            run_sweep(tmp_path / "s", grid(), InProcessEngine(lambda trial: None))
    finally:
        process.kill()
        process.communicate()
    with held_folder(tmp_path / "s"):
        pass


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(InputError, match="not the folder of a sweep"), held_folder(tmp_path):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"cannot write to .*--output"), held_folder(tmp_path / "file" / "sweep"):
        pass


@pytest.mark.skipif(not os.path.isdir("/proc/sys"), reason="needs a folder even root cannot write")
def test_a_folder_even_root_cannot_write():
    from pathlib import Path

    with pytest.raises(InputError, match="cannot write to"), held_folder(Path("/proc/sys/flopwatch-sweep")):
        pass


def test_what_the_engine_knows_better_than_a_supervisor_told_to_stop(tmp_path):
    """Slurm's time limit reaches the supervisor as a plain SIGTERM."""

    class TimedOut(InProcessEngine):
        def wait(self, seconds):
            return [Ended(ended.name, {"state": "TIMEOUT"}) for ended in super().wait(seconds)]

    engine = TimedOut(lambda trial: TrialResult(trial.name, trial.key, trial.spec, "cancelled"))
    results = run_sweep(tmp_path / "s", grid(("standard",)), engine)
    assert {result.outcome for result in results.values()} == {"timeout"}
