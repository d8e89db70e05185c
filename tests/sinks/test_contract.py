"""What holds for every sink."""

import io

import pytest

from flopwatch.records.run import Summary
from flopwatch.sinks.console import ConsoleSink
from flopwatch.sinks.jsonl import JsonlSink
from flopwatch.sinks.mlflow import MlflowSink
from flopwatch.sinks.prometheus import PrometheusSink
from flopwatch.sinks.tensorboard import TensorBoardSink
from flopwatch.sinks.wandb import WandbSink
from flopwatch.testing import RecordingSink
from support.sinks.sample_run import ORIGIN, START, WARNING, records, rows, summary
from support.sinks.servers import free_port

MAKERS = {
    "console": lambda folder: ConsoleSink(io.StringIO()),
    "jsonl": lambda folder: JsonlSink(folder / "log.jsonl"),
    "mlflow": MlflowSink,
    "prometheus": lambda folder: PrometheusSink(free_port()),
    "recording": lambda folder: RecordingSink(),
    "tensorboard": lambda folder: TensorBoardSink(folder / "tensorboard"),
    "wandb": WandbSink,
}


@pytest.fixture(
    params=[pytest.param(name, marks=pytest.mark.slow if name in ("mlflow", "wandb") else ()) for name in MAKERS]
)
def sink(request, tmp_path, monkeypatch):
    if request.param == "mlflow":
        monkeypatch.setenv("MLFLOW_TRACKING_URI", request.getfixturevalue("mlflow_address"))
    made = MAKERS[request.param](tmp_path / "run")
    assert made.name == request.param
    yield made
    made.close()


def test_it_takes_a_whole_run_with_missing_keys_nan_infinity_and_huge_integers(sink):
    for record in records():
        sink.write(record)
    sink.flush()
    sink.close()


def test_making_it_touches_neither_disk_nor_network(sink, tmp_path):
    assert list(tmp_path.iterdir()) == []


def test_closing_twice_or_before_any_record_is_harmless(sink):
    sink.close()
    sink.close()


def test_flushing_without_anything_to_flush_is_harmless(sink):
    sink.flush()
    sink.write(START)
    sink.flush()
    sink.flush()
    sink.close()


def test_a_run_that_ends_before_its_first_row_is_harmless(sink):
    for record in (START, ORIGIN, WARNING, Summary(None, 1.0)):
        sink.write(record)
    sink.close()
    sink.close()


def test_two_rows_of_the_same_step_are_harmless(sink):
    for record in (START, ORIGIN, rows()[0], rows()[0], summary()):
        sink.write(record)
    sink.close()
