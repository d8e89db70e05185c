"""Ops that compute other last bits while a step is counted: the training ends as without flopwatch, bit by bit."""

import json

import pytest

from support.warm_python import TORCH, start_warm
from testbeds.disturbing_ops import AUTOCAST, FUNCTIONS

QUICK = ("prod", "inv")
CASES = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in FUNCTIONS if name not in AUTOCAST
]
SCRIPT = """
import os, sys
if sys.argv[2]:
    import flopwatch
    flopwatch.watch(sys.argv[2], quiet=True, log_every=1)
import testbeds.disturbing_ops as ops
print(ops.train(sys.argv[1]))
import atexit
atexit._run_exitfuncs()
sys.stdout.flush()
os._exit(0)
"""


def trained(name, folder=""):
    process = start_warm(SCRIPT, name, str(folder), modules=(*TORCH, "testbeds.disturbing_ops"))
    out, err = process.communicate()
    assert process.returncode == 0, err
    return out


@pytest.mark.parametrize("name", CASES)
def test_the_training_ends_with_the_weights_that_it_has_without_flopwatch(name, tmp_path):
    assert trained(name, tmp_path) == trained(name)


def test_such_a_training_is_counted_no_further_and_the_rows_name_the_op(tmp_path):
    trained("prod", tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "training_log.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["type"] == "row"]
    assert len(rows) == 12
    assert not any(row["exact"] for row in rows)
    reasons = {reason for row in rows for reason in row["notes"]}
    assert all(reason.startswith("prod computes other last bits while a step is counted") for reason in reasons)
    assert reasons
