"""What a training writes to TensorBoard and MLflow itself must stay what it would be without us."""

from dataclasses import replace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from flopwatch.records.run import Row
from flopwatch.sinks.mlflow import MlflowSink
from flopwatch.sinks.tensorboard import TensorBoardSink
from flopwatch.sinks.thread import SinkThread
from support.sinks.sample_run import START, STARTED_AT

ROWS = 1000


def our_row(step):
    return Row(step, STARTED_AT + step, {"training/loss": -float(step), "perf/mfu": 0.5})


def points(accumulator, key):
    return [(point.step, point.value) for point in accumulator.Scalars(key)]


@pytest.mark.parametrize("ours_is_older", [True, False])
def test_a_summary_writer_in_the_same_folder_loses_no_point_while_tensorboard_looks_on(tmp_path, ours_is_older):
    """TensorBoard reads a folder file by file and does not come back to one it has left."""
    started_at = 1.0 if ours_is_older else 4e9  # the name of our file tells, and TensorBoard goes by names
    sink = TensorBoardSink(tmp_path, flush_seconds=0.0)
    sink.write(replace(START, unix_time=started_at))
    writer = SummaryWriter(tmp_path)
    looking = EventAccumulator(str(tmp_path), size_guidance={"scalars": 0})
    for step in range(ROWS):
        writer.add_scalar("training/loss", float(step), step)
        if step % 100 == 0:
            sink.write(our_row(step))
            writer.flush()
            looking.Reload()
    sink.close()
    writer.close()
    assert points(looking.Reload(), "training/loss") == [(step, float(step)) for step in range(ROWS)]
    ours = EventAccumulator(str(tmp_path / "flopwatch")).Reload()
    assert points(ours, "training/loss") == [(step, -float(step)) for step in range(0, ROWS, 100)]


def test_a_resume_of_ours_takes_no_point_of_the_users_back(tmp_path):
    """We tell TensorBoard to forget the steps that run again, and it forgets them for a whole folder."""
    writer = SummaryWriter(tmp_path)
    for session, resumed_after in enumerate((None, 20)):
        sink = TensorBoardSink(tmp_path)
        started_at = 4e9 + session  # after the user's file
        sink.write(replace(START, session=str(session), unix_time=started_at, resumed_after_step=resumed_after))
        sink.write(our_row(30))
        sink.close()
    for step in range(ROWS):
        writer.add_scalar("loss", float(step), step)
    writer.close()
    looking = EventAccumulator(str(tmp_path), size_guidance={"scalars": 0}).Reload()
    assert points(looking, "loss") == [(step, float(step)) for step in range(ROWS)]


@pytest.mark.slow
def test_a_user_s_points_in_the_same_mlflow_run_are_all_there(mlflow_address, tmp_path, monkeypatch):
    import mlflow
    from mlflow.entities import Metric

    mlflow.set_tracking_uri(mlflow_address)
    mlflow.set_experiment("beside the user")
    try:
        with mlflow.start_run() as run:
            thread = SinkThread(MlflowSink(tmp_path, send_seconds=0.1), lambda name, error: pytest.fail(str(error)))
            thread.put(START)
            client = mlflow.MlflowClient()
            for begin in range(0, ROWS, 100):
                mlflow.log_metric("loss", float(begin), step=begin)
                thread.put(our_row(begin))
                assert thread.flush(60)
                rest = [Metric("loss", float(step), 1000 + step, step) for step in range(begin + 1, begin + 100)]
                client.log_batch(run.info.run_id, metrics=rest)
            assert thread.close(60)
        found = client.get_metric_history(run.info.run_id, "loss")
        assert sorted((point.step, point.value) for point in found) == [(step, float(step)) for step in range(ROWS)]
        ours = client.get_metric_history(run.info.run_id, "perf/mfu")
        assert sorted(point.step for point in ours) == list(range(0, ROWS, 100))
    finally:
        mlflow.set_tracking_uri(None)
        monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
