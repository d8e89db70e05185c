import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopwatch.stats import percentile
from flopwatch.sweep.supervisor.build_result import step_times


@given(st.lists(st.floats(0.001, 10), min_size=1, max_size=50), st.floats(0, 1))
def test_percentiles_are_numpys(values, share):
    assert percentile(sorted(values), share) == pytest.approx(np.percentile(values, 100 * share))


def test_no_steps_no_times():
    assert step_times([]) is None


def test_equal_steps_have_an_interval_of_no_width():
    times = step_times([0.5] * 10, first=2.0)
    assert (times.median, times.low, times.high, times.first, times.unstable) == (0.5, 0.5, 0.5, 2.0, False)


def test_scattered_steps_are_unstable():
    assert step_times([1.0, 2.0, 1.1, 2.2, 0.9, 1.9, 1.0, 2.0]).unstable


def test_two_steps_are_never_stable():
    assert step_times([1.0, 1.0]).unstable


def test_the_interval_covers_the_true_median_about_as_often_as_it_says():
    draw = np.random.default_rng(0)
    hits = 0
    for _ in range(200):
        times = step_times(draw.lognormal(0.0, 0.2, 25).tolist())
        hits += times.low <= 1.0 <= times.high
    assert hits >= 176  # 95 % of 200 is 190; three standard deviations of chance and the small sample allowed for
