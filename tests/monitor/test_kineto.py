"""A trace on request: a few steps, compressed, with what multi-rank tools need."""

import gzip
import json

import pytest
import torch

import flopwatch
from support.small_models import TinyText, text_batch

pytestmark = pytest.mark.slow


def train(tmp_path, steps, ask_at=2, ask=3):
    model = TinyText()
    monitor = flopwatch.TrainingMonitor(tmp_path, model=model, strict=True, peak_flops_per_s=1e12)
    for number in range(steps):
        if number == ask_at:
            monitor.capture_trace(ask)
        batch = text_batch(2, 8)
        with torch.profiler.record_function(f"my step {number}"):
            model(**batch)["loss"].backward()
        monitor.log_step(number, batch=batch)
    monitor.close()
    return sorted((tmp_path / "traces").glob("*")) if (tmp_path / "traces").exists() else []


def names_in(path):
    return {event.get("name", "") for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]}


def test_the_trace_holds_the_steps_asked_for_and_no_others(tmp_path):
    (path,) = train(tmp_path, 12)

    assert path.name == "step5_rank0.pt.trace.json.gz"
    mine = {name for name in names_in(path) if name.startswith("my step")}
    assert mine == {"my step 3", "my step 4", "my step 5"}
    assert "aten::addmm" in names_in(path) or "aten::mm" in names_in(path)


def test_the_trace_says_which_rank_it_is_of(tmp_path):
    (path,) = train(tmp_path, 12)
    assert json.loads(gzip.decompress(path.read_bytes()))["distributedInfo"]["rank"] == 0


def test_shapes_are_recorded(tmp_path):
    (path,) = train(tmp_path, 12)
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert any("Input Dims" in event.get("args", {}) for event in events)


def test_without_asking_there_is_no_trace(tmp_path):
    assert train(tmp_path, 5, ask_at=-1) == []


def test_a_run_that_ends_in_between_writes_what_it_has(tmp_path):
    (path,) = train(tmp_path, 5)
    assert {name for name in names_in(path) if name.startswith("my step")} == {"my step 3", "my step 4"}


def test_so_many_steps_that_the_trace_would_fill_the_disk_are_cut(tmp_path):
    (path,) = train(tmp_path, 40, ask=1000)
    assert len({name for name in names_in(path) if name.startswith("my step")}) == 10
