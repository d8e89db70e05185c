"""A trace is read as a stream into the uses of its time; what is no whole trace is refused with a message."""

import gzip
import json
import os
import re
import subprocess
import sys
from dataclasses import fields

import pytest

from flopwatch.errors import InputError
from flopwatch.runs.traces import TraceSplit, read_trace
from flopwatch.runs.traces.files import newest_traces, trace_name
from support.make_trace import PART_TRUTH, event, steps_on_device, write_large_trace, write_trace

USES = [field.name for field in fields(TraceSplit) if field.name.endswith("_seconds")]


def uses_of(split):
    return {name.removesuffix("_seconds"): getattr(split, name) for name in USES}


def assert_adds_up(split):
    assert sum(uses_of(split).values()) - split.hidden_communication_seconds == pytest.approx(split.seconds, rel=1e-12)


@pytest.mark.parametrize("name", ["t.json", "t.json.gz", "compressed.json"])
def test_a_trace_of_a_device_gives_the_known_seconds(tmp_path, name):
    path = write_trace(tmp_path / name.replace("compressed.json", "c.gz"), steps_on_device(4))
    if name == "compressed.json":  # the name does not decide what the file is
        path = path.rename(tmp_path / name)
    split = read_trace(path)
    assert (split.file, split.device, split.rank, split.steps) == (name, "cuda", 0, 4)
    assert split.seconds == pytest.approx(4e-3, rel=1e-12)
    assert uses_of(split) == pytest.approx({use: 4e-6 * truth for use, truth in PART_TRUTH.items()}, rel=1e-12)
    assert_adds_up(split)


def test_the_order_of_the_events_in_the_file_does_not_matter(tmp_path):
    events = list(steps_on_device(5))
    ordered = read_trace(write_trace(tmp_path / "t.json", events))
    (tmp_path / "reversed").mkdir()
    assert read_trace(write_trace(tmp_path / "reversed" / "t.json", reversed(events))) == ordered


def test_events_are_read_however_the_file_is_cut_into_chunks(tmp_path, monkeypatch):
    path = write_trace(tmp_path / "t.json", steps_on_device(3))
    whole = read_trace(path)
    for chunk_bytes in (1, 7, 100, 1001):
        monkeypatch.setattr("flopwatch.runs.traces.events._CHUNK_BYTES", chunk_bytes)
        assert read_trace(path) == whole


def test_the_rank_is_the_one_that_the_trace_names(tmp_path):
    path = write_trace(tmp_path / "step9_rank2.pt.trace.json", steps_on_device(1), distributedInfo={"rank": 5})
    assert read_trace(path).rank == 5
    path = write_trace(tmp_path / "step9_rank2.pt.trace.json", steps_on_device(1), distributedInfo=None)
    assert read_trace(path).rank == 2


@pytest.mark.parametrize("rank", [True, -1, 1.5, "1"])
def test_what_is_no_rank_is_not_taken_for_one(tmp_path, rank):
    path = write_trace(tmp_path / "step9_rank2.pt.trace.json", steps_on_device(1), distributedInfo={"rank": rank})
    assert repr(read_trace(path).rank) == "2"


def test_a_name_of_megabytes_is_read_in_no_more_than_the_time_of_its_start(tmp_path):
    """All of this name would take days."""
    path = write_trace(tmp_path / "t.json", [*steps_on_device(1), event("kernel", "triton" * 1_000_000, 4e12, 5)])
    assert read_trace(path).steps == 1


def test_a_step_that_had_not_ended_is_left_out(tmp_path):
    path = write_trace(tmp_path / "t.json", steps_on_device(3), flopwatch={"steps": 2, "device": "cuda"})
    split = read_trace(path)
    assert (split.steps, split.seconds) == (2, pytest.approx(2e-3))


def test_names_that_are_not_utf_8_or_not_quite_json_are_read(tmp_path):
    path = write_trace(tmp_path / "t.json", [*steps_on_device(1), event("cpu_op", "my op", 1, 1)])
    path.write_bytes(path.read_bytes().replace(b"my op", b"my \xff\t op"))
    assert read_trace(path).steps == 1


def without_steps():
    return [each for each in steps_on_device(2) if not re.match(r"ProfilerStep|Optimizer", each["name"])]


def only_steps():
    return [event("user_annotation", "ProfilerStep#1", 0, 100)]


def refused(path):
    with pytest.raises(InputError) as error:
        read_trace(path)
    assert str(path) in str(error.value)
    return str(error.value)


class TestRefused:
    @pytest.fixture
    def whole(self, tmp_path):
        return write_trace(tmp_path / "whole.json", steps_on_device(40))

    @pytest.mark.parametrize("share", [0.01, 0.3, 0.5, 0.9, 0.999])
    def test_a_trace_that_is_cut(self, whole, share, tmp_path):
        content = whole.read_bytes().rstrip()
        cut = tmp_path / "cut.json"
        cut.write_bytes(content[: int(share * (len(content) - 1))])
        assert "is not a whole trace of torch's profiler" in refused(cut)
        assert "flopwatch trace RUN_DIR" in refused(cut)

    @pytest.mark.parametrize("share", [0.1, 0.5, 0.95])
    def test_a_compressed_trace_that_is_cut(self, whole, share, tmp_path):
        content = gzip.compress(whole.read_bytes())
        cut = tmp_path / "cut.json.gz"
        cut.write_bytes(content[: int(share * len(content))])
        assert "is not a whole trace" in refused(cut)

    @pytest.mark.slow
    def test_every_cut_of_a_small_trace(self, tmp_path):
        """No cut leads to another exception or to numbers."""
        content = write_trace(tmp_path / "whole.json", steps_on_device(1)).read_bytes().rstrip()
        cut = tmp_path / "cut.json"
        for length in range(len(content)):
            cut.write_bytes(content[:length])
            refused(cut)

    @pytest.mark.parametrize("at", [0.2, 0.5, 0.8])
    def test_a_trace_with_a_damaged_block(self, whole, at, tmp_path):
        content = bytearray(whole.read_bytes())
        start = int(at * len(content))
        content[start : start + 300] = bytes(300)
        damaged = tmp_path / "damaged.json"
        damaged.write_bytes(content)
        assert "is not a whole trace" in refused(damaged)

    def test_a_compressed_trace_with_damaged_bytes(self, whole, tmp_path):
        content = bytearray(gzip.compress(whole.read_bytes()))
        content[len(content) // 2] ^= 0xFF
        damaged = tmp_path / "damaged.json.gz"
        damaged.write_bytes(content)
        assert re.search("is not a whole trace|cannot be read", refused(damaged))

    @pytest.mark.parametrize(
        ("content", "why"),
        [
            (b"", "does not begin with {"),
            (b"  \n", "does not begin with {"),
            (bytes(range(256)) * 40, "does not begin with {"),
            (b"\x1f\x8b" + bytes(range(256)) * 40, "cannot be read"),
            (gzip.compress(b"", mtime=0), "does not begin with {"),
            (b"[1, 2, 3]", "does not begin with {"),
            (b"{}", "has no list traceEvents"),
            (b'{"hello": [1, 2], "world": {"a": null}}', "has no list traceEvents"),
            (b'{"traceEvents": 3}', "has no list traceEvents"),
            (b'{"traceEvents": [1, 2]}', "its events are of type int"),
            (b'{"traceEvents": []}', "has no events"),
            (b'{"traceEvents": [{}]}', "does not mark its steps"),
        ],
    )
    def test_what_is_no_trace(self, tmp_path, content, why):
        path = tmp_path / "t.json"
        path.write_bytes(content)
        assert why in refused(path)

    def test_a_trace_without_steps_or_without_ops(self, tmp_path):
        path = write_trace(tmp_path / "t.json", without_steps())
        assert "does not mark its steps with ProfilerStep#N" in refused(path)
        assert "schedule=" in refused(path)
        path = write_trace(tmp_path / "t.json", only_steps())
        assert "has steps, but neither kernels nor ops" in refused(path)

    def test_a_trace_of_a_device_on_which_the_profiler_saw_nothing(self, tmp_path):
        """Its ops on the host do not tell how busy the device was."""
        events = [*only_steps(), event("cpu_op", "aten::mm", 1, 5)]
        path = write_trace(tmp_path / "t.json", events, flopwatch={"steps": 1, "device": "cuda"})
        assert "is of a training on cuda, but the profiler recorded no kernels" in refused(path)

    def test_a_folder_a_pipe_and_a_missing_file(self, tmp_path):
        assert "the path is a folder" in refused(tmp_path)
        os.mkfifo(tmp_path / "pipe.json")
        assert "not a regular file" in refused(tmp_path / "pipe.json")
        assert "does not exist" in refused(tmp_path / "missing.json")

    @pytest.mark.parametrize("time", ["NaN", "1e400", "-1e300", '"late"', "null", "[]"])
    def test_an_event_without_a_usable_time_is_passed_over(self, tmp_path, time):
        path = write_trace(tmp_path / "t.json", [*steps_on_device(2), event("kernel", "gemm", 123456789, 5)])
        truth = read_trace(path)
        path.write_text(path.read_text().replace("123456789", time))
        assert read_trace(path) == truth


class TestNewest:
    def write(self, folder, step, rank, seconds_ago=0.0):
        (folder / "traces").mkdir(exist_ok=True)
        path = folder / "traces" / trace_name(step, rank)
        write_trace(path, steps_on_device(2), distributedInfo={"rank": rank})
        os.utime(path, (1e9 - seconds_ago, 1e9 - seconds_ago))
        return path

    def test_the_newest_trace_of_each_rank_is_read(self, tmp_path):
        """By the time it was written: a run that restarts may come to the same steps again."""
        for step, rank, seconds_ago in [(900, 0, 50), (20, 0, 5), (900, 1, 50), (910, 1, 5), (905, 10, 5)]:
            self.write(tmp_path, step, rank, seconds_ago)
        found = newest_traces(tmp_path)
        assert [(split.rank, split.file) for split in found] == [
            (0, trace_name(20, 0)),
            (1, trace_name(910, 1)),
            (10, trace_name(905, 10)),
        ]

    def test_a_run_without_traces_has_none(self, tmp_path):
        assert newest_traces(tmp_path) == ()

    def test_files_that_are_no_traces_of_ranks_are_passed_over(self, tmp_path):
        (tmp_path / "traces").mkdir()
        for name in ("request.json", ".1.step3_rank0.pt.trace.json.gz", "stepx_rank0.pt.trace.json.gz", "a.json"):
            (tmp_path / "traces" / name).write_text("nothing")
        assert newest_traces(tmp_path) == ()

    def test_a_damaged_trace_is_refused(self, tmp_path):
        self.write(tmp_path, 9, 0).write_bytes(b"\x1f\x8b" + bytes(range(100)))
        with pytest.raises(InputError, match="cannot be read"):
            newest_traces(tmp_path)


MEASURE = """
import json, resource, sys
from flopwatch.runs.traces import read_trace
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
split = read_trace(sys.argv[1])
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({"split": split.to_json(), "before_kib": before, "after_kib": after}))
"""


def measured(path):
    """Read in a process of its own: the split, the growth of its memory and all of it, in MiB."""
    done = subprocess.run([sys.executable, "-c", MEASURE, str(path)], capture_output=True, text=True, check=True)
    said = json.loads(done.stdout)
    return said["split"], (said["after_kib"] - said["before_kib"]) / 1024, said["after_kib"] / 1024


@pytest.mark.slow
def test_a_large_trace_needs_little_memory(tmp_path):
    parts = write_large_trace(tmp_path / "t.json", 60_000_000)
    split, grown, _ = measured(tmp_path / "t.json")
    assert split["matmul_seconds"] == pytest.approx(parts * PART_TRUTH["matmul"] * 1e-6, rel=1e-12)
    assert grown < 40, "the file has 57 MiB"


@pytest.mark.slow
@pytest.mark.campaign  # three minutes
def test_a_trace_of_a_gigabyte_is_read_with_less_than_600_mib(tmp_path):
    parts = write_large_trace(tmp_path / "t.json", 1_000_000_000)
    split, _, whole_process = measured(tmp_path / "t.json")
    assert split["steps"] == 3
    truth = {f"{use}_seconds": pytest.approx(parts * part * 1e-6, rel=1e-12) for use, part in PART_TRUTH.items()}
    assert {use: split[use] for use in truth} == truth
    assert whole_process < 600
