"""The page of a long run stays small, and reading its log needs no more memory than that of a short one."""

import tracemalloc

import pytest

from flopwatch.present.page import to_page
from flopwatch.report.run.contents import MOST_POINTS, read_report
from flopwatch.report.run.document import run_document
from testbeds.long_run_log import write_long_run

MOST_BYTES = 2_000_000


def check(report, steps):
    assert report.steps == steps
    assert len(report.starts) == 4
    assert all(len(curve.points) <= MOST_POINTS for curve in report.curves.values())
    assert report.curves["perf/step_time"].points[-1].last_step == steps
    assert report.waterfall is not None
    page = to_page(run_document(report))
    assert len(page.encode()) < MOST_BYTES
    return page


@pytest.mark.slow
def test_a_twentieth_of_ten_days_makes_a_small_page(tmp_path):
    steps = 50_000
    report = read_report(write_long_run(tmp_path, steps))
    assert report.windows == steps // 50
    assert len(check(report, steps).encode()) < MOST_BYTES / 2
    assert max(point.high for point in report.curves["perf/step_time"].points) > 4.0, "a spike of a step stays visible"


@pytest.mark.slow
def test_the_memory_does_not_grow_with_the_log(tmp_path):
    most = []
    for steps in (10_000, 40_000):
        path = write_long_run(tmp_path / str(steps), steps)
        tracemalloc.start()
        read_report(path)
        most.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    # The curves of the shorter run are not full yet. All rows of the longer run together would take 40 MB.
    assert most[1] < most[0] + 4_000_000


@pytest.mark.slow
@pytest.mark.campaign
def test_ten_days_make_a_page_below_2_mb(tmp_path):
    check(read_report(write_long_run(tmp_path)), 1_000_000)
