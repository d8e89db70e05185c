"""A short form of benchmarks/ranks/straggler_ranks.py: a rank that is plainly slow is named, with the cause."""

import pytest

from ranks.straggler_ranks import SLOW_RANK, cause, run


@pytest.mark.slow
@pytest.mark.parametrize("case", ["input"])
def test_a_rank_that_is_slow_by_three_steps_is_named_with_its_cause(case, tmp_path):
    """By so much that a machine with other work does not hide it."""
    windows = run(case, 4, tmp_path, delay_share=3.0, rows=128)
    found = [(values["ranks/straggler"], cause(values)) for values in windows if "ranks/straggler" in values]

    assert len(windows) == 4
    assert len(found) >= 3
    assert set(found) == {(SLOW_RANK, case)}
