"""The simulation of repeats says what the page on sweeps says."""

import random

from sweeps.repeat_coverage import covers_with_fixed_runs, normal_run, repeat


def test_repeating_until_narrow_costs_a_little_coverage_and_a_fixed_number_of_runs_costs_none():
    rng, run = random.Random(1), normal_run(0.01, 0.05)
    found = [repeat(run, rng) for _ in range(150)]
    repeated = [one.covers for one in found if one.runs > 1]
    fixed = [covers_with_fixed_runs(run, rng) for _ in range(2000)]

    assert 0.85 < sum(repeated) / len(repeated) < 0.98
    assert 0.93 < sum(fixed) / len(fixed) < 0.97
    assert max(one.runs for one in found) == 6
