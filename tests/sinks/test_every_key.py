"""One run goes through all sinks at once; what each system says it holds is compared with what was logged."""

import json
import math
import struct
import sys
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from flopwatch.sinks.jsonl import JsonlSink
from flopwatch.sinks.thread import SinkThread, build_sinks
from support.sinks.sample_run import ORIGIN, WARNING, records, rows
from support.sinks.servers import free_port, get_json, post_json, prometheus_server, tensorboard_server, wait_until
from support.sinks.wandb_file import (
    find_file,
    read_config,
    read_exit_code,
    read_history,
    read_step_metrics,
    read_summary,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """As the fixture of every test, for the one run of this module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("WANDB_SILENT", "true")
        patch.setenv("WANDB_ERROR_REPORTING", "false")
        patch.delenv("WANDB_DIR", raising=False)
        patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        yield patch


@pytest.fixture(scope="module")
def run(environment, mlflow_address, tmp_path_factory):
    """The run after its end: its folder, and what Prometheus answered while it lasted."""
    folder = tmp_path_factory.mktemp("run")
    port = free_port()
    options = {
        "mlflow": {"tracking_uri": mlflow_address, "experiment": "every key"},
        "prometheus": {"port": port},
        "console": {"stream": (folder / "console.txt").open("w")},
    }
    names = ["console", "tensorboard", "wandb", "mlflow", "prometheus"]
    sinks, failures = build_sinks(names, folder, options)
    assert failures == {}
    errors = []
    threads = [
        SinkThread(sink, lambda name, error: errors.append((name, error)))
        for sink in (JsonlSink(folder / "log.jsonl"), *sinks)
    ]
    with ExitStack() as stack:
        prometheus = stack.enter_context(prometheus_server(tmp_path_factory.mktemp("prometheus"), f"127.0.0.1:{port}"))
        for record in records():
            assert all(thread.put(record) for thread in threads)
        scraped = wait_until(lambda: scrape(prometheus, rows()[-1].step), "Prometheus has scraped the last row")
        assert all(thread.close(60) for thread in threads)
    assert errors == []
    options["console"]["stream"].close()
    return SimpleNamespace(folder=folder, scraped=scraped)


def scrape(prometheus, last_step):
    answer = get_json(f"{prometheus}/api/v1/query", query='{job="flopwatch"}')["data"]["result"]
    series = {}
    for found in answer:
        labels = {key: value for key, value in found["metric"].items() if key not in ("instance", "job")}
        name = labels.pop("__name__")
        series[name, labels.get("dataset")] = SimpleNamespace(labels=labels, value=float(found["value"][1]))
    step = series.get(("flopwatch_global_step", None))
    return series if step and step.value == last_step else None


def logged():
    """The truth: (step, key, value) of every number, in order."""
    return [(row.step, key, value) for row in rows() for key, value in row.values.items()]


def same(found, value):
    return math.isnan(found) if math.isnan(value) else found == value


def test_the_log_holds_every_number_exactly(run):
    lines = [
        json.loads(line, parse_constant=pytest.fail) for line in (run.folder / "log.jsonl").read_text().splitlines()
    ]
    found = [
        (line["step"], key, float(value) if isinstance(value, str) else value)
        for line in lines
        if line["type"] == "row"
        for key, value in line["values"].items()
    ]
    assert len(found) == len(logged())
    for (step, key, value), (true_step, true_key, true_value) in zip(found, logged(), strict=True):
        assert (step, key) == (true_step, true_key)
        assert same(value, true_value)
        assert type(value) is type(true_value)
    assert [line["type"] for line in lines] == [record.type for record in records()]
    assert lines[2]["steps"] == rows()[0].to_json()["steps"]


@pytest.mark.parametrize("loading", ["--load_fast=false", "--load_fast=true"])
def test_tensorboard_shows_every_number_as_a_32_bit_float(run, tmp_path, loading):
    with tensorboard_server(sys.executable, run.folder / "tensorboard", tmp_path, loading) as address:
        scalars = f"{address}/data/plugin/scalars"
        tags = wait_until(lambda: get_json(f"{scalars}/tags").get("flopwatch"), "TensorBoard has read the file")
        assert set(tags) == {key for _, key, _ in logged()}
        for tag in tags:
            points = get_json(f"{scalars}/scalars", run="flopwatch", tag=tag)
            true = [(step, value) for step, key, value in logged() if key == tag]
            assert [step for _, step, _ in points] == [step for step, _ in true]
            for (_, _, shown), (_, value) in zip(points, true, strict=True):
                assert same(float(shown), as_float32(value))
        texts = get_json(f"{address}/data/plugin/text/tags")["flopwatch"]
        assert {"flopwatch/provenance", "flopwatch/notices", "flopwatch/summary", "flopwatch/run"} <= set(texts)
        notices = get_json(f"{address}/data/plugin/text/text", run="flopwatch", tag="flopwatch/notices")
        assert WARNING.message in notices[0]["text"]


def as_float32(value):
    return struct.unpack("f", struct.pack("f", value))[0]


def test_wandb_holds_every_number_over_the_global_step(run):
    file = find_file(run.folder)
    history = read_history(file)
    assert [found["global_step"] for found in history] == [row.step for row in rows()]
    for found, row in zip(history, rows(), strict=True):
        assert {key for key in found if not key.startswith("_")} == {*row.values, "global_step"}
        assert all(same(float(found[key]), float(value)) for key, value in row.values.items())
    over = read_step_metrics(file)
    assert all(over[key] == "global_step" for _, key, _ in logged())
    assert read_config(file)["flopwatch"]["provenance"]["peak"] == ORIGIN.peak
    about = read_summary(file)["flopwatch"]
    assert about["messages"] == {WARNING.code: WARNING.message}
    assert about["values"]["total/steps"] == 60
    assert read_exit_code(file) == 0


def test_mlflow_holds_every_number(run, mlflow_address):
    experiment = get_json(f"{mlflow_address}/api/2.0/mlflow/experiments/get-by-name", experiment_name="every key")
    found = search_runs(mlflow_address, experiment["experiment"]["experiment_id"])
    assert found["info"]["status"] == "FINISHED"
    tags = {tag["key"]: tag["value"] for tag in found["data"]["tags"]}
    assert json.loads(tags["flopwatch.provenance"])["peak"] == ORIGIN.peak
    assert tags["flopwatch.notice.mfu_above_peak"] == WARNING.message
    for key in {key for _, key, _ in logged()}:
        known_as = {"my metric!": "my metric_", "dataset/数学 (zh)/loss": "dataset/数学 _zh_/loss"}.get(key, key)
        history = get_json(
            f"{mlflow_address}/api/2.0/mlflow/metrics/get-history", run_id=found["info"]["run_id"], metric_key=known_as
        )["metrics"]
        points = sorted((point["step"], point["timestamp"], float(point["value"])) for point in history)
        true = [(row.step, int(row.unix_time * 1000), row.values[key]) for row in rows() if key in row.values]
        assert [point[:2] for point in points] == [point[:2] for point in true]
        for (*_, shown), (*_, value) in zip(points, true, strict=True):
            assert same(shown, in_mlflow(value))


def search_runs(address, experiment_id):
    (found,) = post_json(f"{address}/api/2.0/mlflow/runs/search", experiment_ids=[experiment_id])["runs"]
    return found


def in_mlflow(value):
    """Its database has no infinity and keeps the largest double instead."""
    return math.copysign(sys.float_info.max, value) if math.isinf(value) else float(value)
