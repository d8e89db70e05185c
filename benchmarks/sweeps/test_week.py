"""The simulated week of `benchmarks/sweeps/week.py`, an afternoon of it."""

import pytest

from sweeps.week import Week, live

pytestmark = pytest.mark.slow


def test_a_week_with_losses_a_killed_runner_and_a_viewer_loses_nothing(tmp_path):
    # Eight trials take 0.2 s, so that the sweep is not over before the runner can be killed.
    figures = live(Week(trials=200, kills=1, attaches=1, share_lost=0.05, seconds=0.2), tmp_path / "sweep")
    assert (figures.ok, figures.lost, figures.recorded_twice) == (200, 0, 0)
    assert figures.attempts_lost > 0
    assert (figures.kills, figures.attached, figures.runners) == (1, 1, 2)
    assert figures.most_growth_of_a_runner_mib < 30
