"""The search for the largest batch on made-up memory curves keeps to its bars."""

import pytest

from sweeps import fit_trials as made_up

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("seed", range(6))
def test_made_up_problems_take_half_the_trials_of_bisection(seed):
    problems = made_up.problems(seed=seed)
    fitted = [made_up.by_fit(problem, seed) for problem in problems]
    doubled = [made_up.by_doubling(problem, seed) for problem in problems]
    for one in fitted:
        assert 0.95 * one.problem.true_largest <= one.largest <= one.problem.true_largest, one
    assert mean_trials(fitted) < 0.6 * mean_trials(doubled)


def test_over_all_made_up_problems_the_mean_is_within_the_bar():
    affine, others = [], []
    for seed in range(6):
        for problem in made_up.problems(seed=seed):
            (affine if problem.kind == "affine" else others).append(made_up.by_fit(problem, seed))
    assert mean_trials(affine) <= 5.0
    assert mean_trials(affine + others) <= 6.0


def mean_trials(solved):
    return sum(one.trials for one in solved) / len(solved)
