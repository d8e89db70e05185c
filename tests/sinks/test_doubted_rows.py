"""A notice with doubted steps changes rows that are already in the log from exact to not exact."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from flopwatch.monitor.outlets import Outlets
from flopwatch.records.run import Notice, PartialRow, Row, RunStart
from flopwatch.sinks.jsonl import JsonlSink
from support.sinks.sample_run import START, summary

PEAK = {"flops_per_s": 1e12, "dtype": "fp32"}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "log.jsonl"


def row(first, last, *, kind=Row, exact=True, columns=True, metrics=()):
    known = {} if exact is None else {"perf/exact": int(exact)}
    steps = {"step": list(range(first, last + 1)), "seconds": [0.2] * (last - first + 1)} if columns else {}
    notes = ("a lower bound",) if exact is False else ()
    return kind(last, 0.0, {**known, **dict(metrics)}, steps=steps, exact=exact, notes=notes, peak=PEAK)


def doubt(*ranges):
    return Notice(99, "warning", "rows_in_doubt", "a count differs", ranges)


def write(path, *records, **options):
    sink = JsonlSink(path, **options)
    for record in records:
        sink.write(record)
    sink.close()


def lines_of(path):
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]


def exactness_of(path):
    """The last step of every row, whether it is exact, and the same as a metric."""
    found = [line for line in lines_of(path) if line["type"] in ("row", "partial_row")]
    return [(line["step"], line.get("exact"), line["values"].get("perf/exact")) for line in found]


def test_rows_with_a_doubted_step_are_changed_in_place_and_keep_their_length(path):
    rows = [row(1, 10), row(11, 20), row(21, 25, kind=PartialRow), row(21, 30), row(31, 40)]
    sink = JsonlSink(path)
    for record in (START, *rows):
        sink.write(record)
    sink.flush()
    before = path.read_bytes()
    sink.write(doubt((20, 21), (40, 70)))
    sink.close()
    after = path.read_bytes()
    *_, notice = lines_of(path)
    assert notice == {**doubt().to_json(), "doubted": [[20, 21], [40, 70]]}
    changed = {place for place, (old, new) in enumerate(zip(before, after, strict=False)) if old != new}
    assert after.count(b"\n") == before.count(b"\n") + 1
    assert len(changed) == 4 * (len(b"true ") + 1)
    assert exactness_of(path) == [(10, True, 1), (20, False, 0), (25, False, 0), (30, False, 0), (40, False, 0)]


def test_rows_of_earlier_sessions_stay_as_they_are(path):
    write(path, START, row(1, 10), row(11, 20))
    earlier = path.read_bytes()
    write(path, RunStart("2", 0.0, "o", resumed_after_step=10), row(11, 20), doubt((1, 20)))
    assert path.read_bytes().startswith(earlier)
    assert exactness_of(path) == [(10, True, 1), (20, True, 1), (20, False, 0)]


def test_rows_in_the_buffer_are_changed_too(path):
    sink = JsonlSink(path, flush_steps=10_000, flush_seconds=1e9)
    for record in (START, row(1, 10), row(11, 20), row(21, 30)):
        sink.write(record)
    assert len(lines_of(path)) == 2
    sink.write(doubt((11, 20)))
    assert exactness_of(path) == [(10, True, 1), (20, False, 0), (30, True, 1)]
    sink.close()


METRICS = {
    'exact":true ,"peak': 1,
    '"exact":true,"peak": 1, "x': 1,
    'of "perf/exact': 1,
    "training/exact": 1,
    "exact": True,
    "peak": 2,
    "steps": 7,
    "step": 7,
    "perf/exactly": 1,
}


@pytest.mark.parametrize("there_is", ["no file", "another file"])
def test_a_log_that_was_deleted_meanwhile_gets_the_notice_and_another_file_stays_as_it_is(path, there_is):
    sink = JsonlSink(path)
    for record in (START, row(1, 10)):
        sink.write(record)
    sink.flush()
    other = path.read_bytes()
    path.unlink()
    if there_is == "another file":
        path.write_bytes(other)
    sink.write(doubt((1, 10)))
    sink.write(row(11, 20))
    sink.write(doubt((11, 20)))
    sink.close()
    assert path.read_bytes().startswith(other if there_is == "another file" else b"")
    assert lines_of(path)[-4]["code"] == "log_recreated"
    assert lines_of(path)[-3]["doubted"] == [[1, 10]]
    assert exactness_of(path)[-1] == (20, False, 0)


def test_later_rows_are_exact_again_and_a_second_doubt_finds_them(path):
    write(path, START, row(1, 10), doubt((1, 10)), row(11, 20), row(21, 30), doubt((25, 25)))
    assert exactness_of(path) == [(10, False, 0), (20, True, 1), (30, False, 0)]


KILLED = """
import os, signal
from flopwatch.sinks import jsonl
from test_doubted_rows import START, doubt, row

patches, left = jsonl._patches, {writes}

def killing(line, ranges):
    global left
    for patch in patches(line, ranges):
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1
        yield patch

jsonl._patches = killing
sink = jsonl.JsonlSink({path!r}, flush_steps=1)
for record in (START, *(row(10 * n + 1, 10 * n + 10) for n in range(5)), doubt((1, 50))):
    sink.write(record)
"""


@pytest.mark.slow
@pytest.mark.parametrize("writes", [0, 1, 4, 9])
def test_a_kill_between_two_changes_leaves_a_log_whose_lines_are_all_whole(path, writes):
    code = KILLED.format(writes=writes, path=str(path))
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent)
    assert done.returncode == -9
    assert len(lines_of(path)) == 6
    assert [exact for _, exact, _ in exactness_of(path)].count(False) == (writes + 1) // 2


def test_the_monitor_sends_every_doubt_to_the_log_but_repeats_no_message_elsewhere(path):
    from flopwatch.testing import RecordingSink

    other = RecordingSink()
    outlets = Outlets([JsonlSink(path), other], is_quiet=True)
    outlets.start(START)
    for steps in (row(1, 10), row(11, 20), row(21, 30)):
        outlets.send(steps)
    for steps in ((1, 10), (21, 30)):
        outlets.notify("warning", "rows_in_doubt", "a count differs", step=30, doubted=[steps])
    outlets.notify("warning", "rows_in_doubt", "a count differs")
    outlets.close(replace(summary(), notices={}))
    assert exactness_of(path) == [(10, False, 0), (20, True, 1), (30, False, 0)]
    assert [record.doubted for record in other.records if isinstance(record, Notice)] == [((1, 10),)]
