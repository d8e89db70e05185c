"""Rows and the summary, where not everything is known: what is told is right, and what is missing is said."""

import pytest

from flopwatch.clock import monotonic_seconds
from flopwatch.monitor.config import MonitorConfig
from flopwatch.monitor.measured_step import MeasuredStep
from flopwatch.monitor.ranks.reports import Window, merge, report_of
from flopwatch.monitor.rows import RowMaker
from flopwatch.monitor.totals import RunTotals, Span
from flopwatch.records.flops import Peak

PEAK = Peak(4e12, "a device", "fp32", "a datasheet", "datasheet", "high")


def rows_of(world_size, config):
    return RowMaker(config, world_size, RunTotals(monotonic_seconds))


def steps(first=0, count=5, **known):
    return [MeasuredStep(number, seconds=0.5, **known) for number in range(first, first + count)]


def window(measured, *others, missing=0):
    """Of rank 0 with what other ranks tell; `missing` of them tell nothing."""
    ranks = [measured, *others]
    told = [report_of(rank, known, peak_flops_per_s=4e12) for rank, known in enumerate(ranks)]
    return Window(tuple(measured), merge(told[: len(told) - missing]))


def test_rates_of_a_session_leave_out_the_time_of_steps_that_are_not_known():
    known = steps(tokens=100, model_flops=10**12)
    session = Span()
    session.add(Window(tuple(known)), PEAK.flops_per_s)
    session.add(Window(tuple(step._replace(tokens=None, model_flops=None) for step in known)), PEAK.flops_per_s)

    values = session.values()
    assert values["perf/mfu"] == 0.5
    assert values["perf/tokens_per_second"] == 200
    assert values["perf/step_time"] == pytest.approx(0.5)
    assert values["perf/counted_steps_percent"] == 50


def test_what_not_all_ranks_know_is_in_no_row_of_all_ranks():
    """This rank knows its FLOPs, the other does not: the one's MFU is not that of the training."""
    rows = rows_of(2, MonitorConfig())
    own = steps(tokens=100, model_flops=10**12)
    row = rows.row(window(own, [step._replace(model_flops=None) for step in own]), PEAK, {})

    assert row.values["ranks/reporting"] == 2
    assert row.values["perf/tokens_per_second"] == 400
    assert "perf/mfu" not in row.values
    assert "total/model_flops" not in row.values


def test_a_rank_that_is_missing_is_told_in_the_row_and_in_the_summary():
    rows = rows_of(2, MonitorConfig(detailed_log_every=1000))
    for first, missing in ((0, 0), (5, 1), (10, 0)):
        own = steps(first, tokens=100)
        row = rows.row(window(own, own, missing=missing), PEAK, {})
        assert row.values["ranks/reporting"] == 2 - missing
        assert rows.newest.missing_ranks == missing
    assert not row.detailed
    assert rows.session_values()["ranks/reporting"] == 1


def test_the_run_s_time_waiting_for_input_is_that_of_all_ranks():
    """The logging rank hardly waits, another one for 0.4 of its 0.5 seconds: on the mean 0.1 of 0.5."""
    rows = rows_of(4, MonitorConfig())
    own = steps(tokens=100, input_wait_seconds=0.0)
    slow = [step._replace(input_wait_seconds=0.4) for step in own]
    row = rows.row(window(own, own, slow, own), PEAK, {})
    assert row.values["perf/input_wait_percent"] == pytest.approx(20)
    seconds = row.ledger["seconds"]
    assert 100 * seconds["input_wait"] / seconds["train"] == pytest.approx(20)
    assert row.steps["input_wait_seconds"] == [0.0] * 5, "the columns are the logging rank's own"


def test_the_time_of_a_window_that_not_all_ranks_told_of_is_the_logging_rank_s_own():
    rows = rows_of(2, MonitorConfig())
    own = steps(tokens=100, input_wait_seconds=0.1)
    slow = [step._replace(input_wait_seconds=0.4) for step in own]
    row = rows.row(window(own, slow, missing=1), PEAK, {})
    assert row.ledger["seconds"]["input_wait"] == pytest.approx(0.5)


def test_the_summary_keeps_the_last_loss_that_was_logged():
    rows = rows_of(1, MonitorConfig())
    rows.row(Window(tuple(steps(loss=2.5))), PEAK, {})
    rows.row(Window(tuple(steps(5, 1))), PEAK, {})
    assert rows.session_values()["training/loss"] == 2.5
