"""Readers of a log show a doubted row as not exact, with the notice's message as the reason."""

import json

import pytest

from flopwatch.report.run.contents import read_report
from flopwatch.runs import read_around, read_log
from flopwatch.runs.log_file import TornLineError, to_record
from flopwatch.runs.state import WatchedRun, WatchFeed
from flopwatch.runs.waterfall import exactness_of
from support.hand_made_run import records, write_run

REASON = "a later count differs"


def doubt(*ranges, message=REASON):
    return {
        "type": "notice", "step": 7, "level": "warning", "code": "rows_in_doubt", "message": message,
        "doubted": list(ranges),
    }  # fmt: skip


@pytest.fixture
def patched(tmp_path):
    """A run whose last row was changed by the notice after it."""
    lines = records()
    lines[8] |= {"exact": False}
    lines[9] |= {"exact": False, "notes": [REASON]}
    lines.insert(9, doubt([5, 5]))
    return write_run(tmp_path / "run", lines)


def exactness(log):
    return [(row.step, row.exact, row.notes) for row in log.rows]


def test_a_changed_row_has_the_message_as_its_reason(patched):
    expected = [(2, True, ()), (4, True, ()), (7, False, (REASON,))]
    assert exactness(read_log(patched)) == expected
    assert exactness(read_around(patched, 3)) == expected


def test_a_doubt_is_about_rows_of_its_own_session_only(tmp_path):
    lines = records()
    lines.insert(6, doubt([1, 2], [5, 6]))
    log = write_run(tmp_path, lines)
    expected = [(2, False, (REASON,)), (4, True, ()), (7, True, ())]
    assert exactness(read_log(log)) == expected
    assert exactness(read_around(log, 3)) == expected


def test_several_doubts_about_a_row_are_all_named_once(tmp_path):
    lines = records()
    lines[8] |= {"exact": False, "notes": ["a lower bound"], "values": {"perf/exact": 1}}
    lines[9:9] = [doubt([5, 7]), doubt([6, 6], message="another"), doubt([6, 6]), doubt([8, 9], message="not this")]
    row = read_log(write_run(tmp_path, lines)).rows[-1]
    assert row.notes == ("a lower bound", REASON, "another")
    assert row.values == {"perf/exact": 0}


def test_a_follower_marks_the_row_that_it_has_read_before_the_notice():
    run = WatchedRun()
    for line in [*records()[6:9], doubt([1, 4])]:
        run.add(to_record(line))
    assert run.row.exact is True
    run.add(to_record(doubt([5, 5])))
    assert (run.row.exact, run.row.notes, len(run.notices)) == (False, (REASON,), 2)


def test_a_feed_that_looked_before_the_change_marks_its_row(tmp_path):
    lines = records()[:9]
    log = write_run(tmp_path, lines)
    feed = WatchFeed(str(tmp_path), lambda: 0.0)
    feed.look()
    assert feed.run.row.exact is True
    with log.open("a") as file:
        file.write(json.dumps(doubt([7, 7])) + "\n")
    feed.look()
    assert (feed.run.row.exact, feed.run.row.notes) == (False, (REASON,))


def test_the_report_of_a_run_says_the_reason(patched):
    found = read_report(patched.parent)
    assert (found.exact, found.why_not_exact) == (False, (REASON,))


def test_the_waterfall_names_the_reason_of_a_run_without_a_summary(tmp_path):
    lines = [*records()[:9], doubt([5, 5])]
    assert exactness_of(read_around(write_run(tmp_path, lines))) == (False, (REASON,))


@pytest.mark.parametrize("broken", [7, [7], [[1]], [[1, 2, 3]], [["1", "2"]], [[1, None]], {"1": 2}, "12"])
def test_a_notice_whose_ranges_are_damaged_counts_as_torn(broken):
    with pytest.raises(TornLineError, match="doubted"):
        to_record({**doubt(), "doubted": broken})


def test_watch_says_it(flopwatch, patched):
    _, out, _ = flopwatch("watch", str(patched.parent), "--once")
    assert f"not exact: {REASON}" in out
    assert f"step 7: {REASON}" in out
