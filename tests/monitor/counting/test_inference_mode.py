"""Inference mode keeps torch's dispatch keys from before it began, so that counts may not begin or end inside it."""

import contextlib

import pytest
import torch
from torch import nn

import flopwatch
from flopwatch.testing import RecordingSink

FLOPS = 3 * 2 * 4 * 8 * 8 - 2 * 4 * 8 * 8
"""Of a step: forward, and the gradient of the weight."""
OF_AN_EVALUATION = 2 * 4 * 8 * 8


@contextlib.contextmanager
def monitored(tmp_path):
    model, sink = nn.Linear(8, 8), RecordingSink()
    monitor = flopwatch.TrainingMonitor(tmp_path, model=model, sinks=[sink], log_every=1, strict=True)
    try:
        yield model, monitor, sink
    finally:
        monitor.close()


def train(model):
    model(torch.randn(4, 8)).sum().backward()


def exact_flops(sink):
    return {row.steps["hardware_flops"][0] for row in sink.records if row.type == "row" and row.exact}


def test_a_training_survives_an_evaluation_in_inference_mode_within_a_counted_step(tmp_path):
    with monitored(tmp_path) as (model, monitor, sink):
        for number in range(12):
            if number > 1:
                model.eval()
                with torch.inference_mode():
                    model(torch.randn(4, 8))
                model.train()
            train(model)
            monitor.log_step(number)
        train(model)

    assert exact_flops(sink) <= {FLOPS, FLOPS + OF_AN_EVALUATION}


def test_a_step_that_begins_in_inference_mode_is_counted_as_a_whole(tmp_path):
    with monitored(tmp_path) as (model, monitor, sink):
        teacher = nn.Linear(8, 8)
        for number in range(12):
            with monitor.step():
                if number >= 5:
                    with torch.inference_mode():
                        teacher(torch.randn(4, 8))
                train(model)

    assert exact_flops(sink) == {FLOPS, FLOPS + OF_AN_EVALUATION}


@pytest.mark.slow
@pytest.mark.parametrize("way", ["step", "log_step"])
def test_a_risky_op_in_inference_mode_leaves_the_training_alone(tmp_path, way):
    with monitored(tmp_path) as (model, monitor, sink):
        for number in range(6):
            with monitor.step() if way == "step" else contextlib.nullcontext():
                with torch.inference_mode():
                    torch.rand(3, 3).prod(0)
                train(model)
            if way == "log_step":
                monitor.log_step(number)

    assert exact_flops(sink) == set()
    last = [record for record in sink.records if record.type == "row"][-1]
    assert "prod computes other last bits" in " ".join(last.notes)
