"""The rank that the others wait for is found in the traces of all ranks.

The real trace is of one rank of two. Both ranks here are made of it: from the start of an all-reduce on, everything is
put off by a tenth of the step. On the early rank the all-reduce lasts so much longer, because it waits for the other
one; on the late rank a kernel runs meanwhile, or nothing does.
"""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest

from flopwatch.runs.traces import TraceSplit, read_trace
from flopwatch.runs.traces.slow_rank import can_compare, slow_rank
from support.make_trace import ELEMENTWISE, event

REAL = Path(__file__).parents[1] / "data" / "gpu_traces" / "hta_nccl.json.gz"
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


def put_off(trace, microseconds, *, is_late, computes=True):
    """The trace of a rank that is `microseconds` late at its first all-reduce, or waits so long there."""
    all_reduce = min((e for e in trace["traceEvents"] if "AllReduce" in e["name"]), key=lambda e: e["ts"])
    at = all_reduce["ts"]
    events = []
    for each in trace["traceEvents"]:
        later = dict(each)
        if each is all_reduce and not is_late:
            later["dur"] += microseconds
        elif each.get("ts", 0) >= at:
            later["ts"] += microseconds
        elif each.get("ts", at) + each.get("dur", 0) > at and each.get("cat") not in ON_DEVICE:
            later["dur"] += microseconds
        events.append(later)
    if is_late and computes:
        events.append(event("kernel", ELEMENTWISE, at, microseconds))
    return {**trace, "traceEvents": events, "distributedInfo": {"rank": int(is_late), "world_size": 2}}


@pytest.fixture
def both(tmp_path):
    def write(*, share=0.1, computes=True):
        with gzip.open(REAL) as file:
            trace = json.load(file)
        late_by, splits = share * 1e6 * read_trace(REAL).seconds, []
        for rank in range(2):
            path = tmp_path / f"step6_rank{rank}.pt.trace.json.gz"
            with gzip.open(path, "wt") as file:
                json.dump(put_off(trace, late_by, is_late=rank == 1, computes=computes), file)
            splits.append(read_trace(path))
        return splits

    return write


@pytest.mark.parametrize("computes", [True, False])
def test_the_late_rank_is_found_with_what_it_does(both, computes):
    splits = both(computes=computes)
    assert splits[0].seconds == pytest.approx(splits[1].seconds), "step times do not show the slow rank"

    found = slow_rank(splits)
    assert (found.rank, found.is_idle) == (1, not computes)
    assert found.excess_seconds == pytest.approx(0.1 * read_trace(REAL).seconds, rel=1e-3)
    assert found.excess_share == pytest.approx(0.1 / 1.1, rel=1e-3)


def test_ranks_that_differ_by_less_than_5_percent_are_not_told_apart(both):
    assert slow_rank(both(share=0.04)) is None


def test_one_of_many_ranks_must_stand_out_from_their_spread():
    def split(rank, waits):
        return TraceSplit(f"step6_rank{rank}", rank, "cuda", 3, 3.0, exposed_communication_seconds=waits)

    wide = [split(rank, 0.5 - 0.1 * (rank % 4)) for rank in range(8)]
    assert slow_rank([*wide, split(8, 0.0)]) is None
    assert slow_rank([*(split(rank, 0.5) for rank in range(8)), split(8, 0.2)]).rank == 8


def test_only_traces_of_the_same_steps_are_compared(both):
    early, late = both()
    assert can_compare([early, late])
    assert not can_compare([early])
    assert not can_compare([early, early])
    for other in (replace(late, steps=2), replace(late, device="cpu"), replace(late, file="step9_rank1.json")):
        assert not can_compare([early, other])
    assert not can_compare([replace(split, device="cpu") for split in (early, late)])


@pytest.mark.slow
def test_the_command_names_the_rank(both):
    from flopwatch.cli.run_logs.traces import _document
    from flopwatch.present.markdown import to_markdown

    said = to_markdown(_document(both()))
    assert "Rank 1 slows down the other ranks: it needs 22.2 ms per step" in said
    assert "most of it computing." in said
    assert "No rank slows down the others" in to_markdown(_document(both(share=0.0)))
