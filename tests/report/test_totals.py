"""Totals, success rates and mean memory, by hand."""

import pytest

from flopwatch.records.trial import TrialSpec
from flopwatch.report.sweep.document import totals_sentence
from support.few_results import GIB, ended, ran, summary_of

pytestmark = pytest.mark.requirement("R26")


def test_every_outcome_is_counted_and_what_has_no_result_is_missing():
    summary = summary_of(
        ran("standard", 4, 512),
        ran("standard", 8, 512),
        ended("ghost", 4, 512, "hang"),
        missing=[TrialSpec("ghost", "tiny", 8, 512)],
    )
    assert summary.totals.trials == 4
    assert summary.totals.by_outcome == {"ok": 2, "hang": 1, "missing": 1}


def test_the_first_line_tells_failed_cancelled_and_missing_apart():
    summary = summary_of(
        ran("standard", 4, 512),
        ended("standard", 8, 512, "oom_host"),
        ended("standard", 16, 512, "oom_inferred"),
        ended("ghost", 4, 512, "crash"),
        ended("ghost", 8, 512, "cancelled"),
        missing=[TrialSpec("ghost", "tiny", 16, 512)],
    )
    assert totals_sentence(summary) == (
        "6 trials: 1 ok, 2 out of memory (1 of them inferred), 1 failed, 1 cancelled, 1 missing"
    )


def test_time_spent_adds_up_and_the_clock_runs_from_the_first_start_to_the_last_end():
    summary = summary_of(
        ran("standard", 4, 512, unix_time=1000.0),
        ended("standard", 8, 512, "error", unix_time=1005.0, seconds=30.0),
        ended("standard", 16, 512, "oom_inferred", unix_time=None, seconds=None),
    )
    assert summary.totals.trial_seconds == 40.0
    assert summary.totals.wall_seconds == 35.0


def test_success_is_of_what_was_run_and_out_of_memory_is_not_a_failure():
    (trainer,) = summary_of(
        ran("dpsgd", 1, 64),
        ran("dpsgd", 2, 64),
        ended("dpsgd", 4, 64, "oom_device"),
        ended("dpsgd", 8, 64, "oom_inferred"),
        ended("dpsgd", 3, 64, "crash"),
        ended("dpsgd", 5, 64, "unsupported"),
        ended("dpsgd", 6, 64, "skipped"),
        ended("dpsgd", 7, 64, "cancelled", unix_time=None, seconds=None),
        ended("dpsgd", 10, 64, "cancelled"),
        missing=[TrialSpec("dpsgd", "tiny", 9, 64)],
    ).trainers
    assert (trainer.tried, trainer.ok, trainer.out_of_memory, trainer.failed, trainer.not_run) == (4, 2, 1, 1, 6)
    assert trainer.success_rate == 0.5


def test_a_trainer_that_was_never_run_has_no_success_rate():
    (trainer,) = summary_of(ended("ghost", 4, 64, "unsupported")).trainers
    assert trainer.tried == 0
    assert trainer.success_rate is None


def test_mean_memory_is_over_ok_trials():
    standard, ghost = summary_of(
        ran("standard", 4, 64, gib=2),
        ran("standard", 8, 64, gib=4),
        ran("standard", 16, 64, gib=9),
        ran("ghost", 4, 64, gib=3),
        ran("ghost", 8, 64, gib=5),
        ended("ghost", 16, 64, "oom_device"),
    ).trainers
    assert (standard.mean_peak_bytes, ghost.mean_peak_bytes) == (5 * GIB, 4 * GIB)


def test_trainers_stand_in_a_fixed_order_with_their_privacy():
    results = [ran(name, 4, 64) for name in ("my.module:Trainer", "fast", "ghost", "standard", "dpsgd")]
    trainers = summary_of(*results).trainers
    assert [(one.trainer, one.privacy) for one in trainers] == [
        ("standard", "not private"),
        ("dpsgd", "private"),
        ("ghost", "private"),
        ("fast", "private"),
        ("my.module:Trainer", "unknown"),
    ]


def test_the_time_of_earlier_runs_of_a_trial_counts():
    earlier = ({"outcome": "ok", "unix_time": 1000.0, "seconds": 28.0}, {"outcome": "lost", "seconds": "long"})
    totals = summary_of(ended("ghost", 4, 64, "ok", unix_time=1030.0, seconds=18.0, earlier_attempts=earlier)).totals

    assert totals.trial_seconds == 46.0
    assert totals.wall_seconds == 48.0
