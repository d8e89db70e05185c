"""The report of a run has the numbers of its log: checked against a log that was written by hand."""

import pytest

from flopwatch.report.run.contents import CurveMaker, Point, read_report
from support.hand_made_run import records, start, write_run


@pytest.fixture
def report(tmp_path):
    return read_report(write_run(tmp_path / "run").parent)


def points(curve):
    return [(point.first_step, point.last_step, point.low, point.mean, point.high) for point in curve.points]


def test_each_window_is_a_point_with_the_extremes_of_its_steps(report):
    assert points(report.curves["perf/step_time"]) == [
        (1, 2, 2.0, 3.0, 4.0), (3, 4, 1.0, 2.0, 3.0), (5, 7, 1.0, pytest.approx(4 / 3), 2.0),
    ]  # fmt: skip
    assert points(report.curves["training/loss"]) == [(1, 2, 7, 8, 9), (3, 4, 4, 5, 6), (5, 7, 1, 2, 3)]
    assert [point.unix_time for point in report.curves["training/loss"].points] == [1006.0, 1013.0, 1040.0]


def test_windows_that_a_later_session_ran_again_count_once(report):
    assert report.windows == 3
    assert (report.first_step, report.last_step, report.steps) == (1, 7, 7)


def test_the_mean_of_a_rate_is_weighted_by_time_and_that_of_the_step_time_by_steps(report):
    assert report.mean("perf/mfu_percent") == pytest.approx((20 * 6 + 30 * 4 + 50 * 4) / 14)
    assert report.mean("perf/step_time") == pytest.approx(14 / 7)
    assert report.mean("perf/tokens_per_second") == pytest.approx(10 * 7 / 14)


def test_notices_are_kept_and_restarts_are_starts(report):
    assert [(notice.step, notice.code) for notice in report.notices] == [(2, "slow")]
    assert [start.resumed_after_step for start in report.starts] == [None, 4]


def test_the_wall_time_is_divided_as_at_the_end_of_the_run(report):
    assert report.wall_seconds == 41.0
    assert report.goodput.productive_seconds == 14.0
    lost = {"start_up": 9.0, "eval": 5.0, "checkpoint": 1.0, "restart": 10.0, "rerun": 2.0}
    assert report.goodput.lost_seconds == lost | {"other": 0.0}


def test_metrics_of_the_user_have_a_curve_and_a_value(report):
    assert report.values["training/<temperature>"] == (0.5, 7)
    assert report.curves["training/<temperature>"].mean == 0.5


def test_the_state_of_a_run_is_that_of_its_last_session(tmp_path):
    lines = records()
    assert read_report(write_run(tmp_path / "whole", lines)).state == "ended"
    assert read_report(write_run(tmp_path / "open", lines[:-1])).state == "running or killed"
    failed = {**lines[-1], "ended_by": "RuntimeError: no beads left"}
    assert read_report(write_run(tmp_path / "failed", [*lines[:-1], failed])).state == "failed"
    stopped = {**lines[-1], "ended_by": "KeyboardInterrupt"}
    assert read_report(write_run(tmp_path / "stopped", [*lines[:-1], stopped])).state == "stopped"


def test_values_that_are_not_finite_are_counted_and_not_drawn(tmp_path):
    lines = records()
    lines[4]["values"]["training/loss"] = "nan"
    curve = read_report(write_run(tmp_path, lines)).curves["training/loss"]
    assert (len(curve.points), curve.broken_windows, curve.broken_at_step) == (2, 1, 3)


def test_one_inexact_window_makes_the_run_inexact_and_says_why(tmp_path):
    lines = records()
    assert read_report(write_run(tmp_path / "exact", lines)).exact is True
    lines[2] |= {"exact": False, "notes": ["a lower bound"]}
    report = read_report(write_run(tmp_path / "not", lines))
    assert (report.exact, report.why_not_exact) == (False, ("a lower bound",))


def test_torn_lines_are_counted(tmp_path):
    path = write_run(tmp_path)
    path.write_bytes(path.read_bytes() + b'{"type": "row", "st')
    assert read_report(path).torn_lines == 1


def test_a_log_with_nothing_but_its_start_makes_a_report(tmp_path):
    report = read_report(write_run(tmp_path, [start("one", 1000.0)]))
    assert (report.windows, report.curves, report.notices, report.last_step) == (0, {}, (), None)


def test_a_spike_survives_any_thinning():
    maker = CurveMaker("perf/step_time", most_points=10)
    for step in range(1000, 0, -1):
        value = 50.0 if step == 317 else 1.0
        maker.add(Point(step, step, float(step), value, value, value))
    curve = maker.curve()
    assert len(curve.points) <= 10
    assert max(point.high for point in curve.points) == 50.0
    assert curve.mean == pytest.approx(1.049)
    assert [curve.points[0].first_step, curve.points[-1].last_step] == [1, 1000]
    assert all(a.last_step + 1 == b.first_step for a, b in zip(curve.points, curve.points[1:], strict=False))
