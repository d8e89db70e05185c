"""A known amount of lost time or FLOPs appears in its own loss of the waterfall, and in no other."""

import pytest

from support.injected_losses import CASES, run_case

MOST_POINTS = 2.0


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_an_injected_loss_is_recovered_within_2_points_and_booked_nowhere_else(case, tmp_path):
    outcome = run_case(case, tmp_path)

    assert outcome.sum_percent == pytest.approx(100, abs=0.1)
    for key, points in outcome.true.items():
        assert outcome.found[key] == pytest.approx(points, abs=MOST_POINTS), key
