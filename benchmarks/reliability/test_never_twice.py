"""The short form of the campaign that kills runners, supervisors and trials."""

import pytest

from reliability.never_twice import Campaign, make_ready, run


@pytest.mark.slow
def test_whoever_is_killed_and_whenever_nothing_runs_twice_and_nothing_is_left(tmp_path):
    """Each trial holds a lock while it runs, and says so if another attempt has it."""
    make_ready(tmp_path)
    tally = run(
        Campaign(tmp_path, ["--engine", "local", "--jobs", "2"], "shell", trials=4), kills=1, seed=0, longest=1.0
    )
    assert tally.is_clean, tally
    assert tally.met_a_running_trial >= 2, "kills that meet nothing show nothing"
