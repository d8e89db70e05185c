"""Kills and long runs, in short; `make campaign` does them at length (docs/overhead.md has the figures)."""

from itertools import pairwise

import pytest

from reliability.kills import run_killed
from reliability.long_run import run_long


@pytest.mark.slow
def test_a_killed_run_loses_at_most_a_torn_line_and_continues_its_totals(tmp_path):
    outcome = run_killed(tmp_path, kills=1, seed=1)
    assert outcome.is_right, outcome


@pytest.mark.slow
def test_a_long_run_takes_no_more_memory_and_its_log_grows_evenly(tmp_path):
    blocks = run_long(tmp_path, calls=40_000)
    first, last = blocks[0], blocks[-1]
    assert last.resident_bytes - first.resident_bytes < 10 * 2**20
    sizes = [after.log_bytes - before.log_bytes for before, after in pairwise(blocks)]
    assert max(sizes) < 1.2 * min(sizes)
