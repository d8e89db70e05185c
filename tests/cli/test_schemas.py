"""The JSON Schemas in the package describe what flopwatch writes: real logs, results and `--json` outputs."""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

import flopwatch as package
from flopwatch import TrainingMonitor
from flopwatch.cli.doctor import gpu
from support.make_trace import steps_on_device, write_trace
from testbeds.made_up_sweep import example_specs, make_result, write_sweep

SCHEMAS = Path(package.__file__).parent / "schemas"
RECORDED = Path(__file__).parents[2] / "benchmarks" / "pages" / "recorded"
"""Written by an earlier commit, so these may have fields that are gone."""


def closed(schema):
    """The same schema, in which an object has no field that is not described. Files may get more in later versions."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    inside = {name: closed(item) for name, item in schema.items()}
    return {"additionalProperties": False, **inside} if "required" in schema and "type" in schema else inside


@cache
def validator(kind, *, allows_more):
    schema = json.loads((SCHEMAS / f"{kind}.json").read_text())
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema if allows_more else closed(schema))


def problem(kind, content, *, allows_more=False):
    """What is wrong with the content; None if it has all fields of its kind, no others, and the right types."""
    return best_match(validator(kind, allows_more=allows_more).iter_errors(content))


def lines_of(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize("file", sorted(RECORDED.glob("runs/*/training_log.jsonl")), ids=lambda file: file.parent.name)
def test_recorded_logs_match(file):
    for line in lines_of(file):
        assert problem("run_log", line, allows_more=True) is None, line


def test_the_results_of_the_recorded_sweep_match():
    for line in lines_of(RECORDED / "flopwatch-sweep" / "results.jsonl"):
        assert problem("trial_result", line, allows_more=True) is None, line


class FailingSink:
    """A notice in the log says that it failed."""

    name = "failing"

    def write(self, record):
        raise OSError("no route to the server")

    def flush(self):
        pass

    def close(self):
        pass


def trained(folder, **settings):
    """The log of a real training with a checkpoint inside a window, and a loss that is not a number."""
    model = torch.nn.Linear(4, 4)
    with TrainingMonitor(folder, model=model, log_every=2, quiet=True, **settings) as monitor:
        for number in range(5):
            batch = torch.randn(2, 4)
            model(batch).sum().backward()
            monitor.log_step(number, loss=float("nan"), batch=batch)
            if number == 2:
                monitor.state_dict()
    return folder / "training_log.jsonl"


@pytest.fixture
def log(tmp_path):
    return trained(tmp_path / "run", peak_flops_per_s=1e12, sinks=[FailingSink()])


def test_the_log_of_a_real_training_matches(log):
    lines = lines_of(log)
    assert {line["type"] for line in lines} >= {"run", "provenance", "row", "partial_row", "notice", "summary"}
    assert any(line.get("values", {}).get("training/loss") == "nan" for line in lines)
    for line in lines:
        assert problem("run_log", line) is None, line


@pytest.mark.parametrize("kind", ["run", "provenance", "row", "notice", "summary"])
def test_a_record_without_a_field_or_with_a_wrong_type_does_not_match(log, kind):
    line = next(line for line in lines_of(log) if line["type"] == kind)
    assert problem("run_log", {name: value for name, value in line.items() if name not in ("step", "session")})
    assert problem("run_log", {**line, "type": "something"})
    assert problem("run_log", {**line, "step": "four"})
    assert problem("run_log", {**line, "unknown": 1})


@pytest.mark.parametrize("has_peak", [True, False], ids=["with a peak", "without a peak"])
def test_the_outputs_about_a_run_match(flopwatch, tmp_path, has_peak):
    run = RECORDED / "runs" / "example" if has_peak else trained(tmp_path / "run").parent
    commands = {"why": ["why", run], "report_run": ["report", run], "compare_runs": ["compare", run, run]}
    if has_peak:
        commands["explain"] = ["explain", run]
    for kind, words in commands.items():
        status, out, err = flopwatch(*map(str, words), "--json")
        assert (status, err) == (0, "")
        assert problem(kind, json.loads(out)) is None, kind


def test_the_output_about_a_sweep_matches(flopwatch, tmp_path):
    folder = write_sweep(tmp_path / "a", [make_result(spec) for spec in example_specs()[:40]])
    status, out, err = flopwatch("report", str(folder), "--json")
    assert (status, err) == (0, "")
    assert problem("report_sweep", json.loads(out)) is None


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("flops", ["flops", "--model", "tiny", "--seq-len", "16", "--device", "H100", "--step-time", "0.1"]),
        ("flops", ["flops", "--model", "tiny", "--seq-len", "16"]),
        ("peak", ["peak", "--name", "H100"]),
    ],
)
def test_the_outputs_about_models_and_devices_match(flopwatch, kind, words):
    status, out, err = flopwatch(*words, "--json")
    assert (status, err) == (0, "")
    assert problem(kind, json.loads(out)) is None


def test_the_output_about_a_trace_matches(flopwatch, tmp_path):
    file = write_trace(tmp_path / "trace.json", steps_on_device(3))
    status, out, err = flopwatch("trace", str(file), "--json")
    assert (status, err) == (0, "")
    assert problem("trace", json.loads(out)) is None


def test_the_output_about_a_machine_and_the_file_about_an_accelerator_match(flopwatch, tmp_path, monkeypatch):
    _, out, _ = flopwatch("doctor", "--json")
    assert problem("doctor", json.loads(out)) is None

    monkeypatch.setattr(gpu, "_accelerator", lambda: torch.device("cpu"))
    monkeypatch.setattr(gpu, "CHECKS", {"memory": gpu.memory})
    file = tmp_path / "found.json"
    flopwatch("doctor", "--gpu", "--output", str(file))
    assert problem("doctor_gpu", json.loads(file.read_text())) is None


@pytest.mark.slow
def test_a_real_sweep_a_trial_and_a_fit_match(flopwatch, tmp_path, monkeypatch):
    monkeypatch.setenv("FLOPWATCH_SLOT_DIR", str(tmp_path / "slots"))
    monkeypatch.chdir(tmp_path)
    flopwatch("sweep", "--command", "test {batch_size} -lt 4", "--batch-size=1,4", "--seq-len=8", "-o", "s")
    for file in (tmp_path / "s" / "results.jsonl", *(tmp_path / "s" / "trials").glob("*/result.json")):
        for line in lines_of(file) if file.suffix == ".jsonl" else [json.loads(file.read_text())]:
            assert problem("trial_result", line) is None, line
    # In a process of its own: it supervises the trial, and kills what is left below it at the end.
    words = ["trial", "--model", "tiny", "--batch-size", "1", "--seq-len", "8", "--json"]
    trial = subprocess.check_output([sys.executable, "-m", "flopwatch", *words])
    assert problem("trial_result", json.loads(trial)) is None
    _, fit, _ = flopwatch("fit", "device=cpu", "--command", "true", "--max-batch", "2", "--json")
    assert problem("fit", json.loads(fit)) is None
