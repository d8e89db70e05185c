"""A small form of benchmarks/ranks/store_dies.py."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from flopwatch.monitor.run import CLOSE_RANKS_SECONDS

SCRIPT = Path(__file__).with_name("store_dies.py")
RANKS, STEPS = 4, 60


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize(("what", "told"), [("killed", "ranks_lost"), ("frozen", "ranks_late")])
def test_a_store_whose_process_dies_in_the_middle_keeps_no_rank_from_training_and_ending(what, told):
    command = [sys.executable, str(SCRIPT), "--ranks", str(RANKS), "--what", what, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=450, check=False)
    assert done.returncode == 0, done.stderr
    monitored, bare = json.loads(done.stdout)

    for training in (monitored, bare):
        assert training["exit_codes"] == [0] * RANKS
        assert [len(rank["steps"]) for rank in training["results"]] == [STEPS] * RANKS
    for rank in monitored["results"]:
        assert rank["close"] + rank["exit"] < 4 * CLOSE_RANKS_SECONDS
    assert told in monitored["results"][0]["told"]
    assert monitored["rows"][0][1] == RANKS
    assert monitored["rows"][-1] == [STEPS - 1, 1]
