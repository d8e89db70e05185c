import subprocess
import sys
from dataclasses import replace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from flopwatch.records.run import Row
from flopwatch.sinks.tensorboard import TensorBoardSink
from support.sinks.fresh_python import fresh_environment
from support.sinks.sample_run import START, STARTED_AT, WARNING, basic_row
from support.sinks.servers import get_json, tensorboard_server, wait_until


def points_of(folder, key):
    accumulator = EventAccumulator(str(folder / "flopwatch"), size_guidance={"scalars": 0})
    accumulator.Reload()
    return [(point.step, point.value) for point in accumulator.Scalars(key)]


def write_session(folder, *records):
    sink = TensorBoardSink(folder)
    for record in records:
        sink.write(record)
    sink.close()


def test_a_row_is_one_event_at_its_own_time(tmp_path):
    write_session(tmp_path, START, basic_row(10))
    accumulator = EventAccumulator(str(tmp_path / "flopwatch"))
    accumulator.Reload()
    (point,) = accumulator.Scalars("perf/mfu")
    assert point.wall_time == basic_row(10).unix_time
    assert set(accumulator.Tags()["scalars"]) == set(basic_row(10).values)


@pytest.mark.slow
@pytest.mark.parametrize("loading", ["--load_fast=false", "--load_fast=true"])
def test_steps_that_run_again_after_a_resume_are_drawn_once(tmp_path, loading):
    def row(step, loss):
        return Row(step, STARTED_AT + step + loss, {"training/loss": loss})

    folder = tmp_path / "logs"
    write_session(folder, START, *(row(step, 1.0) for step in (10, 20, 30, 40)))
    resumed = replace(START, session="again", unix_time=STARTED_AT + 100, resumed_after_step=20)
    write_session(folder, resumed, row(30, 2.0), row(50, 2.0))
    with tensorboard_server(sys.executable, folder, tmp_path, loading) as address:
        wait_until(
            lambda: get_json(f"{address}/data/plugin/scalars/tags").get("flopwatch"), "TensorBoard has read the files"
        )
        points = get_json(f"{address}/data/plugin/scalars/scalars", run="flopwatch", tag="training/loss")
    assert [(step, loss) for _, step, loss in points] == [(10, 1.0), (20, 1.0), (30, 2.0), (50, 2.0)]


def test_sessions_of_the_same_second_are_read_in_their_order(tmp_path):
    later = replace(START, session="0", unix_time=STARTED_AT + 0.001, resumed_after_step=0)
    write_session(tmp_path, START, Row(1, 0.0, {"a": 1.0}))
    write_session(tmp_path, later, Row(1, 0.0, {"a": 2.0}))
    assert points_of(tmp_path, "a") == [(1, 2.0)]


def test_rows_wait_until_they_are_flushed_and_a_notice_goes_at_once(tmp_path):
    sink = TensorBoardSink(tmp_path)
    sink.write(START)
    sink.write(basic_row(10))
    with pytest.raises(KeyError):
        points_of(tmp_path, "perf/mfu")
    sink.flush()
    assert [step for step, _ in points_of(tmp_path, "perf/mfu")] == [10]
    sink.write(basic_row(20))
    sink.write(WARNING)
    assert [step for step, _ in points_of(tmp_path, "perf/mfu")] == [10, 20]
    sink.close()


def test_neither_torch_nor_tensorflow_is_loaded(tmp_path):
    code = """
import sys
from flopwatch.sinks.tensorboard import TensorBoardSink
from support.sinks.sample_run import records
sink = TensorBoardSink(sys.argv[1])
for record in records():
    sink.write(record)
sink.close()
assert not {"torch", "tensorflow"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, env=fresh_environment())
    assert points_of(tmp_path, "perf/mfu")
