"""Steps of data parallel ranks are counted as they run: rows of several ranks can be exact, and are right then."""

from pathlib import Path

import pytest

from support.torchrun import torchrun

SCRIPT = Path(__file__).parents[1] / "scripts" / "counted_ranks.py"
PRODUCT = 2 * 8 * 64 * 64
"""8 rows through 64 x 64 weights."""
STUDENT, TEACHER = 5 * PRODUCT, 2 * PRODUCT
"""Two forward, two for weights, one for the input of the second layer; the teacher has no backward."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    def run(asking, changing=""):
        return torchrun(SCRIPT, str(tmp_path_factory.mktemp("ranks")), asking, changing, ranks=2)[0]["rows"]

    return run


def flops_of_window(row):
    return row["all_ranks"]["model_flops"]


@pytest.mark.parametrize(
    ("asking", "of_both"),
    [("", 2 * STUDENT), ("0,1", 2 * (STUDENT + TEACHER)), ("1", 2 * STUDENT + TEACHER)],
    ids=["plain", "a teacher", "a teacher on one rank"],
)
def test_rows_are_exact_once_the_ranks_have_counted_and_right_then(rows, asking, of_both):
    found = rows(asking)
    exact = [row for row in found if row["exact"]]
    assert len(exact) >= 5
    assert {flops_of_window(row) for row in exact} == {10 * of_both}
    assert all(row["notes"] for row in found if not row["exact"])
    assert {flops_of_window(row) for row in found[:3]} == {10 * of_both}, "from the first step on"


@pytest.mark.parametrize("changing", ["0", "1"])
def test_a_late_change_on_one_rank_is_noticed_and_no_exact_row_is_wrong(rows, changing):
    found = rows("", changing)
    right = [20 * STUDENT + PRODUCT * sum(step >= 86 for step in row["steps"]["step"]) for row in found]
    assert not [row for row, flops in zip(found, right, strict=True) if row["exact"] and flops_of_window(row) != flops]
    assert flops_of_window(found[-1]) == right[-1]
    assert not found[8]["exact"], "the row of the change"
