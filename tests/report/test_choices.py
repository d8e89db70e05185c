"""What to run is decided within a privacy class, and only where intervals do not overlap."""

from dataclasses import replace

import pytest

from flopwatch.stats import interval_of_runs
from support.few_results import GIB, ended, group_of, ran


def choices(*results):
    return {(choice.seq_len, choice.privacy): choice for choice in group_of(*results).choices}


def test_the_fastest_is_the_one_with_most_samples_per_second():
    choice = choices(ran("ghost", 4, 64, 1.0, gib=1), ran("ghost", 8, 64, 1.5, gib=2))[64, "private"]
    assert choice.fastest.batch_size == 8
    assert choice.tied == ()
    assert choice.verdict == "the fastest of 2"


def test_a_private_trainer_is_never_replaced_by_one_that_is_not():
    found = choices(
        ran("standard", 8, 64, 0.1, gib=1), ran("ghost", 8, 64, 9.0, gib=9), ran("mine:Own", 8, 64, 0.01, gib=0.5)
    )
    assert found[64, "private"].fastest.trainer == "ghost"
    assert found[64, "private"].lightest is None
    assert found[64, "not private"].fastest.trainer == "standard"
    assert found[64, "unknown"].fastest.trainer == "mine:Own"


def test_overlapping_intervals_are_no_measurable_difference():
    choice = choices(ran("ghost", 8, 64, 1.00, spread=0.02), ran("dpsgd", 8, 64, 1.02, spread=0.02))[64, "private"]
    assert [cell.trainer for cell in choice.tied] == ["dpsgd"]
    assert choice.verdict == "no measurable difference between ghost batch 8 and dpsgd batch 8"


def test_intervals_that_do_not_overlap_decide():
    choice = choices(ran("ghost", 8, 64, 1.00, spread=0.009), ran("dpsgd", 8, 64, 1.07, spread=0.009))[64, "private"]
    assert choice.tied == ()


def test_what_two_processes_of_the_same_trial_differ_by_decides_nothing():
    pair = [ran(trainer, 8, 64, seconds, spread=0.002) for trainer, seconds in (("ghost", 0.100), ("dpsgd", 0.103))]
    assert len(choices(*pair)[64, "private"].tied) == 1


def test_seeds_of_a_configuration_are_one_candidate_with_their_mean_time_and_their_largest_memory():
    found = [
        ran("ghost", 8, 64, seconds, seed=seed, gib=1 + seed, mfu=0.1 * 2**seed)
        for seed, seconds in enumerate((1.0, 2.0, 4.0))
    ]
    failed = ended("ghost", 8, 64, "error", seed=3)
    (choice,) = choices(*found, failed, ran("ghost", 4, 64)).values()
    (alone,) = group_of(failed, ended("ghost", 8, 64, "oom_host", seed=4)).cells
    assert (alone.outcome, alone.seeds) == ("oom_host", 2)
    (_, cell) = sorted(group_of(*found, ran("ghost", 4, 64)).cells, key=lambda cell: cell.batch_size)

    assert (choice.candidates, choice.fastest.seeds, choice.fastest.batch_size) == (2, 1, 4)
    assert (cell.trainer, cell.seeds, cell.peak_bytes, cell.is_unstable) == ("ghost", 3, 3 * GIB, True)
    assert (cell.seconds, cell.samples_per_s, cell.mfu) == pytest.approx((2.0, 4.0, 0.2))
    assert (cell.low_seconds, cell.seconds, cell.high_seconds) == pytest.approx(
        (interval_of_runs((1.0, 2.0, 4.0))[0], 2.0, interval_of_runs((1.0, 2.0, 4.0))[1])
    )


def test_seeds_with_damaged_step_times_do_not_end_the_report():
    (cell,) = group_of(*(ran("ghost", 8, 64, 10.0**power, seed=power) for power in (-300, 0, 300))).cells
    assert cell.is_unstable


def test_two_seeds_span_both_of_their_intervals():
    (cell,) = group_of(*(ran("ghost", 8, 64, 1.0 + 0.02 * seed, seed=seed) for seed in (0, 1))).cells
    assert (cell.low_seconds, cell.high_seconds) == pytest.approx((0.99, 1.02 * 1.01))
    assert not cell.is_unstable


def test_five_steps_are_too_few_to_decide():
    def quick(trainer, seconds):
        trial = ran(trainer, 8, 64, seconds, spread=0.001)
        return replace(trial, measured=replace(trial.measured, steps=replace(trial.measured.steps, count=5)))

    assert len(choices(quick("ghost", 1.00), quick("dpsgd", 1.08))[64, "private"].tied) == 1


def test_a_command_that_tells_a_rate_of_its_own_is_compared_by_that():
    """Both have steps of 0.1 s, one of them on four devices."""
    four, one = (
        replace(trial, measured=replace(trial.measured, samples_per_s=rate))
        for trial, rate in (
            (ran("command", 8, 64, 0.1, label="four"), 320.0),
            (ran("command", 8, 64, 0.1, label="one", seed=1), 80.0),
        )
    )
    choice = choices(four, one)[64, "unknown"]
    assert choice.fastest.samples_per_s == 320
    assert choice.tied == ()


def test_the_lightest_is_within_ten_percent_of_the_fastest():
    choice = choices(
        ran("ghost", 16, 64, 1.6, gib=8), ran("ghost", 8, 64, 0.88, gib=4), ran("ghost", 4, 64, 0.5, gib=2)
    )[64, "private"]
    assert (choice.fastest.batch_size, choice.lightest.batch_size) == (16, 8)
    assert choice.lightest.peak_bytes == 4 * GIB


def test_what_did_not_run_is_no_candidate():
    found = choices(ran("ghost", 4, 64), ended("ghost", 8, 64, "oom_device"))
    assert found[64, "private"].candidates == 1
    assert found[64, "private"].verdict == "the only one that ran"


def test_nothing_that_ran_gives_no_choice():
    assert choices(ended("ghost", 8, 64, "oom_device")) == {}


def test_the_interval_of_a_single_step_decides_nothing():
    """Its two ends are one point, which overlaps with nothing."""
    results = [ran("ghost", 8, 64, 1.00, spread=0), ran("dpsgd", 8, 64, 1.05, spread=0)]
    assert choices(*results)[64, "private"].tied == ()
    once = [replace(r, measured=replace(r.measured, steps=replace(r.measured.steps, count=1))) for r in results]
    assert [cell.trainer for cell in choices(*once)[64, "private"].tied] == ["dpsgd"]
