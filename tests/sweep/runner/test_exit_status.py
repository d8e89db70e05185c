"""Green means green: the exit status on the first and on the second run of a sweep."""

import pytest

from flopwatch.records.trial import TrialResult, TrialSpec
from flopwatch.sweep.folder import held_folder, write_trial_list
from flopwatch.sweep.runner.observing import Stop
from flopwatch.sweep.runner.plan import exit_status, make_plan
from flopwatch.sweep.runner.run import run_plan
from flopwatch.testing import InProcessEngine
from support.sweeping import Listener

SPECS = [TrialSpec("standard", "tiny", batch, 64) for batch in (1, 2, 3)]


def status(folder, outcomes, *, stop=None, **choices):
    """Run what is left, the trial of batch n ending as `outcomes[n]`; the exit status."""

    def run(trial):
        outcome = outcomes[trial.spec.batch_size]
        return TrialResult(trial.name, trial.key, trial.spec, outcome) if outcome else None

    with held_folder(folder):
        plan = make_plan(folder, SPECS, **choices)
        write_trial_list(folder, plan.trials, "in-process")
        stop = stop or Stop()
        counts = run_plan(plan, InProcessEngine(run), Listener(), stop) if plan.todo else {}
    return exit_status(plan, counts, was_stopped=stop.finish or stop.kill)


@pytest.mark.parametrize(
    ("outcome", "first", "second"),
    [
        ("ok", 0, 0),
        ("oom_device", 0, 0),
        ("oom_host", 0, 0),
        ("unsupported", 0, 0),
        ("crash", 1, 1),
        ("timeout", 1, 1),
        ("hang", 1, 1),
        ("error", 1, 1),
        ("invalid", 1, 1),
        ("cancelled", 1, 1),
        ("lost", 1, 1),
        (None, 1, 1),
        ("something a later version says", 1, 1),
    ],
)
def test_the_second_run_says_what_the_first_said(tmp_path, outcome, first, second):
    outcomes = {1: "ok", 2: "ok", 3: outcome}
    assert status(tmp_path / "s", outcomes) == first
    assert status(tmp_path / "s", outcomes) == second


def test_what_failed_and_was_mended_is_green(tmp_path):
    assert status(tmp_path / "s", {1: "ok", 2: "error", 3: "ok"}) == 1
    assert status(tmp_path / "s", {2: "ok"}, only="failed") == 0
    assert status(tmp_path / "s", {}) == 0


def test_failures_count_whichever_are_run_again(tmp_path):
    assert status(tmp_path / "s", {1: "ok", 2: "error", 3: "oom_host"}) == 1
    assert status(tmp_path / "s", {}, only="missing") == 1
    assert status(tmp_path / "s", {3: "ok"}, only="oom") == 1


def test_only_the_slice_asked_for_counts(tmp_path):
    assert status(tmp_path / "s", {1: "ok"}, limit="1") == 0
    assert status(tmp_path / "s", {2: "error"}, limit="1:2") == 1
    assert status(tmp_path / "s", {}, limit="1") == 0
    assert status(tmp_path / "s", {3: "ok"}) == 1


def test_a_sweep_that_was_stopped_with_trials_left(tmp_path):
    assert status(tmp_path / "s", {}, stop=Stop(finish=True)) == 130
    assert status(tmp_path / "s", dict.fromkeys((1, 2, 3), "ok")) == 0
    assert status(tmp_path / "s", {}, stop=Stop(finish=True)) == 0, "nothing was left"
