import errno
import json
import math
import os
import shutil
import subprocess
import sys

import pytest

from flopwatch.records.run import Row, RunStart
from flopwatch.sinks.jsonl import JsonlSink
from support.sinks.sample_run import ORIGIN, START, WARNING, basic_row, summary


@pytest.fixture
def path(tmp_path):
    return tmp_path / "deep" / "run" / "log.jsonl"


def lines_of(path):
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]


def test_the_folder_is_made_at_the_first_record_and_not_before(path):
    sink = JsonlSink(path)
    assert not path.parent.exists()
    sink.write(START)
    assert lines_of(path) == [START.to_json()]
    sink.close()


def test_every_line_is_strict_json_with_nan_and_infinity_as_text(path):
    sink = JsonlSink(path)
    sink.write(
        Row(1, 0.0, {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 2**70}, steps={"loss": [math.nan, None]})
    )
    sink.close()
    (line,) = lines_of(path)
    assert line["values"] == {"a": "nan", "b": "inf", "c": "-inf", "d": 2**70}
    assert line["steps"] == {"loss": ["nan", None]}


def test_objects_of_a_configuration_are_written_as_text_and_numpy_numbers_as_numbers(path):
    numpy = pytest.importorskip("numpy")
    config = {"path": path, "ids": (1, 2), "rate": numpy.float32(0.5), "layers": numpy.int64(3), 7: {"x": numpy.nan}}
    sink = JsonlSink(path)
    sink.write(RunStart("a", 0.0, "o", config=config))
    sink.close()
    written = lines_of(path)[0]["config"]
    assert written == {"path": str(path), "ids": [1, 2], "rate": 0.5, "layers": 3, "7": {"x": "nan"}}


def test_rows_wait_for_200_steps_and_everything_else_goes_at_once(path):
    sink = JsonlSink(path, flush_steps=200)
    seen = []
    for record in (START, basic_row(10), basic_row(110), basic_row(209), basic_row(210), basic_row(220), WARNING):
        sink.write(record)
        seen.append(len(lines_of(path)))
    assert seen == [1, 2, 2, 2, 5, 5, 7]
    for record in (basic_row(230), ORIGIN, basic_row(240), summary()):
        sink.write(record)
    assert len(lines_of(path)) == 11
    sink.close()


def test_flush_and_close_leave_nothing_behind(path):
    sink = JsonlSink(path)
    for record in (START, basic_row(1), basic_row(2)):
        sink.write(record)
    sink.flush()
    assert len(lines_of(path)) == 3
    sink.write(basic_row(3))
    sink.close()
    assert len(lines_of(path)) == 4


def test_a_second_session_appends(path):
    for _ in range(2):
        sink = JsonlSink(path)
        sink.write(START)
        sink.close()
    assert lines_of(path) == [START.to_json()] * 2


def test_after_a_torn_line_only_that_line_is_lost(path):
    sink = JsonlSink(path)
    sink.write(START)
    sink.close()
    with path.open("a") as file:
        file.write('{"type":"row","step":1')
    sink = JsonlSink(path)
    sink.write(WARNING)
    sink.close()
    first, torn, last = path.read_text().splitlines()
    assert (json.loads(first), torn, json.loads(last)) == (START.to_json(), '{"type":"row","step":1', WARNING.to_json())


@pytest.mark.parametrize("deleted", ["file", "folder"])
def test_a_deleted_log_is_made_again_with_its_start_its_provenance_and_a_notice(path, deleted):
    sink = JsonlSink(path)
    for record in (START, ORIGIN, basic_row(10)):
        sink.write(record)
    path.unlink() if deleted == "file" else shutil.rmtree(path.parent)
    sink.write(basic_row(20))
    sink.flush()
    start, origin, notice, row = lines_of(path)
    assert start == START.to_json()
    assert origin == json.loads(json.dumps(ORIGIN.to_json()))
    assert (notice["code"], notice["step"]) == ("log_recreated", 20)
    assert str(path) in notice["message"]
    assert row["step"] == 20
    sink.write(basic_row(30))
    sink.close()
    assert len(lines_of(path)) == 5


def test_a_log_that_was_replaced_is_written_to_in_its_new_place(path):
    sink = JsonlSink(path)
    sink.write(START)
    path.rename(path.with_suffix(".old"))
    path.write_text("")
    sink.write(WARNING)
    sink.close()
    assert [line["type"] for line in lines_of(path)] == ["run", "notice", "notice"]
    assert lines_of(path.with_suffix(".old")) == [START.to_json()]


WRITE_UNDER_LIMIT = """
import resource, signal, sys
from pathlib import Path
from flopwatch.sinks.jsonl import JsonlSink
from support.sinks.sample_run import START, basic_row

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
sink = JsonlSink({path!r}, flush_steps=1)
sink.write(START)
try:
    for step in range(1, 1000):
        sink.write(basic_row(step))
except OSError as error:
    print(error.strerror, step)
    try:
        sink.close()
    except OSError:
        pass
"""


def test_a_file_that_may_not_grow_raises_and_holds_one_torn_line_at_most(path):
    code = WRITE_UNDER_LIMIT.format(limit=10_000, path=str(path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    message, _, step = done.stdout.strip().rpartition(" ")
    assert message == "File too large"
    *whole, last = path.read_text().splitlines()
    assert [json.loads(line)["type"] for line in whole] == ["run"] + ["row"] * (int(step) - 1)
    assert path.stat().st_size == 10_000
    with pytest.raises(json.JSONDecodeError):
        json.loads(last)


@pytest.fixture
def disk(monkeypatch):
    """`disk.free_bytes` is how much os.write can still write; None is no limit."""

    class Disk:
        free_bytes = None

    def write(descriptor, data, real=os.write):
        if Disk.free_bytes is None:
            return real(descriptor, data)
        if not Disk.free_bytes:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = real(descriptor, bytes(data)[: Disk.free_bytes])
        Disk.free_bytes -= written
        return written

    monkeypatch.setattr(os, "write", write)
    return Disk


def test_a_full_disk_is_told_once_and_the_cut_line_is_completed_when_there_is_space(path, disk):
    sink, told = JsonlSink(path, flush_steps=1), []
    sink.tell = told.append
    sink.write(START)
    disk.free_bytes = 100
    for step in range(1, 6):
        sink.write(basic_row(step))
    assert not path.read_text().endswith("\n")
    assert len(told) == 1
    assert "No space left on device" in told[0]
    disk.free_bytes = None
    sink.write(summary())
    sink.close()
    assert [line["type"] for line in lines_of(path)] == ["run", *["row"] * 5, "summary"]
