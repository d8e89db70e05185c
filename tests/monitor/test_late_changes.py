"""A training that changes late: no row that is called exact is wrong, and the change is noticed.

`python benchmarks/late_changes.py` prints the table of all loops, with other lengths by `--seeds`, by the real clock.
On a machine that is busy for seconds, no step may be counted after the change, which docs/exactness.md names.
"""

from functools import partial
from itertools import count

import pytest

from testbeds.late_changes.audit import Plan, audit
from testbeds.late_changes.loops import LOOPS

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.name)
def test_no_exact_row_is_wrong_after_a_late_change_and_it_is_noticed(loop, tmp_path):
    outcome = audit(loop, tmp_path, Plan.drawn(loop.name), partial(next, count(step=0.001)))

    assert outcome.wrong == []
    assert outcome.missing == []
    assert outcome.noticed is not None


def test_there_are_forty_loops_and_each_changes_after_step_50():
    plans = [Plan.drawn(loop.name) for loop in LOOPS]

    assert len(LOOPS) >= 40
    assert all(50 < plan.change < plan.steps - 50 and 150 <= plan.steps <= 400 for plan in plans)
