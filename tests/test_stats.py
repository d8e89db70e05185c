"""One percentile and one bootstrap: numpy's percentile, and intervals that hold the truth as often as they say."""

import random
import statistics

import numpy as np
import pytest

from flopwatch.stats import cut, interval, median, percentile, resampled


@pytest.mark.parametrize("count", [1, 2, 5, 512])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 0.99, 1.0])
def test_percentiles_are_those_of_numpy(count, share):
    ordered = sorted(random.Random(count).expovariate(1.0) for _ in range(count))
    assert percentile(ordered, share) == pytest.approx(float(np.percentile(ordered, 100 * share)), rel=1e-12)


@pytest.mark.parametrize("count", [1, 2, 3, 512])
def test_the_median_is_everyone_s_median(count):
    ordered = sorted(random.Random(count).random() for _ in range(count))
    assert median(ordered) == pytest.approx(statistics.median(ordered), rel=1e-12)


def test_draws_are_as_long_as_what_they_draw_from_and_the_same_for_the_same_seed():
    units = list("abcdefgh")
    drawn = list(resampled(units, 50, seed=3))
    assert {len(draw) for draw in drawn} == {8}
    assert {unit for draw in drawn for unit in draw} == set(units)
    assert any(len(set(draw)) < 8 for draw in drawn), "drawn with replacement"
    assert drawn == list(resampled(units, 50, seed=3)) != list(resampled(units, 50, seed=4))


def test_the_95_percent_interval_of_a_median_holds_the_true_median_about_95_times_in_100():
    held = 0
    for seed in range(200):
        chance = random.Random(seed)
        steps = [chance.gauss(10.0, 1.0) for _ in range(30)]
        low, high = interval((median(sorted(draw)) for draw in resampled(steps, 300, seed)), 0.95)
        held += low <= 10.0 <= high
    # 200 tries of 95 % vary by 1.5 %; the bootstrap of a median from 30 steps is known to be a little narrow.
    assert 0.88 <= held / 200 <= 0.99


def test_blocks_hold_every_step_once_in_order():
    steps = list(range(437))
    blocks = cut(steps)
    assert [step for block in blocks for step in block] == steps
    assert len(blocks) == 10
    assert {len(block) for block in blocks} == {43, 44}
    assert cut(steps[:24]) == []
