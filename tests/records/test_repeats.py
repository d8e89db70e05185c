"""Repeats of a trial: the interval over several runs, and when a trial is run again."""

import math
from dataclasses import replace

import pytest

from flopwatch.errors import InputError
from flopwatch.records.repeats import (
    RepeatPolicy,
    after_failed_repeat,
    has_interval,
    interval_of_runs,
    repeats_of,
    with_repeats,
)
from flopwatch.records.trial import Measured, StepCost, StepTimes, TrialResult, TrialSpec
from flopwatch.sweep.spec.parsing import parse_share


def measured(median=1.0, width=0.2, count=10):
    low, high = median * (1 - width / 2), median * (1 + width / 2)
    steps = StepTimes(count, median, low, high, low, high, high, median, width > 0.05)
    return Measured(steps=steps, samples_per_s=4 / median, tokens_per_s=32 / median, cost=StepCost(mfu=0.5 / median))


def runs(*medians):
    return [{"outcome": "ok", "median_seconds": median} for median in medians]


def ended(found, attempts=(), outcome="ok"):
    return TrialResult(
        "t", "key", TrialSpec("standard", "tiny", 4, 8), outcome, measured=found, earlier_attempts=attempts
    )


def test_the_interval_is_students_of_the_logarithms():
    middle, low, high = interval_of_runs([math.exp(0.00), math.exp(0.02), math.exp(0.04)])

    assert math.log(middle) == pytest.approx(0.02, abs=1e-12)
    assert math.log(high) - 0.02 == pytest.approx(4.302653 * 0.02 / math.sqrt(3), rel=1e-5)
    assert 0.02 - math.log(low) == pytest.approx(4.302653 * 0.02 / math.sqrt(3), rel=1e-5)


@pytest.mark.parametrize("count", range(2, 32))
def test_every_number_of_runs_has_the_quantile_of_scipy(count):
    quantile = pytest.importorskip("scipy.stats").t.ppf(0.975, count - 1)
    medians = [math.exp((-1) ** place * 0.01) for place in range(count)]
    logs = [math.log(median) for median in medians]
    mean = sum(logs) / count
    deviation = math.sqrt(sum((one - mean) ** 2 for one in logs) / (count - 1))

    _, low, high = interval_of_runs(medians)

    assert math.log(high / low) == pytest.approx(2 * quantile * deviation / math.sqrt(count), rel=1e-5)


def test_all_rates_follow_the_time_of_all_runs_and_the_runs_are_kept():
    found = with_repeats(measured(4.0), runs(1.0, 2.0))

    assert found.steps.median == pytest.approx(2.0)
    assert found.run_medians == (1.0, 2.0, 4.0)
    assert (found.samples_per_s, found.tokens_per_s, found.cost.mfu) == pytest.approx((2.0, 16.0, 0.25))
    assert found.steps.unstable
    assert found.steps.count == 10


def test_what_was_lost_or_is_damaged_is_no_run():
    damaged = [{"outcome": "ok", "median_seconds": value} for value in (None, "1", True, float("nan"), -1.0, 0)]
    attempts = [{"outcome": "lost", "median_seconds": 9.0}, {}, *damaged]

    assert with_repeats(measured(), attempts) == measured()
    assert with_repeats(Measured(), runs(1.0)) == Measured()


def test_runs_that_agree_are_stable_from_the_third_on():
    assert with_repeats(measured(1.0), runs(1.001)).steps.unstable
    assert not with_repeats(measured(1.0), runs(1.001, 1.0)).steps.unstable


@pytest.mark.parametrize(
    ("found", "attempts", "repeats"),
    [
        (measured(width=0.0501), (), True),
        (measured(width=0.0499), (), False),
        (measured(width=0.0, count=5), (), True),  # too few steps for an interval
        (measured(), runs(1.0), True),  # two runs that agree are not enough
        (measured(), runs(1.0, 1.0), False),
        (measured(1.1), runs(1.0, 1.0), True),
        (measured(1.1), runs(1.0, 1.0, 1.0, 1.0, 1.0), False),  # five repeats are used up
        (Measured(), (), False),
    ],
)
def test_a_trial_is_repeated_until_its_interval_is_narrow_or_the_repeats_are_used_up(found, attempts, repeats):
    result = ended(with_repeats(found, attempts), tuple(attempts))

    assert RepeatPolicy(0.05, 5).repeats(result) is repeats
    assert repeats_of(result) == len(attempts)
    assert not RepeatPolicy(None).repeats(result)
    assert not RepeatPolicy(0.05).repeats(replace(result, outcome="error"))


def test_a_repeat_that_failed_ends_the_repeating_and_one_that_was_cancelled_does_not():
    before = ended(measured())

    assert not RepeatPolicy(0.05).repeats(after_failed_repeat(before, {"outcome": "crash"}))
    assert RepeatPolicy(0.05).repeats(after_failed_repeat(before, {"outcome": "cancelled"}))
    assert after_failed_repeat(before, {"outcome": "crash"}).measured == before.measured


def test_three_short_runs_have_an_interval_and_one_has_none():
    assert not has_interval(measured(count=5))
    assert has_interval(with_repeats(measured(count=5), runs(1.0, 1.0)))
    assert not has_interval(with_repeats(measured(count=5), runs(1.0)))
    assert has_interval(measured(count=6))


@pytest.mark.parametrize("text", ["5", "0", "100%", "-5%", "five", "", True, 5, "5%%", 0])
def test_what_is_no_share_is_refused(text):
    with pytest.raises(InputError, match=r"is not a share between 0 and 100 %; write it as 5% or 0\.05"):
        parse_share(text)
