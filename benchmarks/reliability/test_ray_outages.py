"""The short form of the campaign that kills the raylet and the GCS of a Ray cluster."""

import pytest

from reliability.ray_outages import Tally, one_kill

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("victim", "away_seconds"), [("raylet", 3.0), ("gcs", 1.0)])
def test_all_trials_end_and_none_is_lost_that_had_not_begun(tmp_path, victim, away_seconds):
    tally = Tally()
    one_kill(tmp_path, victim, 1.0, away_seconds, tally)
    assert tally.is_clean, tally
    assert tally.ok == tally.trials == 6, tally
