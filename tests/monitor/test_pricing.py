"""What steps cost on ranks that wait for another one's count."""

from contextlib import nullcontext

import pytest
import torch

import flopwatch
from flopwatch.clock import monotonic_seconds
from flopwatch.models.load import load_model
from flopwatch.monitor.batch_reader import as_work
from flopwatch.monitor.config import MonitorConfig
from flopwatch.monitor.pricing import Pricing


def batch_of(length):
    ids = torch.zeros(2, length, dtype=torch.long)
    return {"input_ids": ids, "labels": ids}


def pricing_of(model):
    nothing = {"loss_fn": None, "flops_fn": None, "peak_flops_per_s": None}
    pricing = Pricing(MonitorConfig(), monotonic_seconds, **nothing, apart=nullcontext, tell=lambda *words: None)
    pricing.set_model(model)
    return pricing


@pytest.mark.requirement("R13")
def test_batches_met_before_the_laws_came_are_priced_too_whatever_their_length():
    model = load_model("tiny")
    logging, other = pricing_of(model), pricing_of(model)
    logging.read(batch_of(32), None)
    other.waits_for_laws = True
    lengths = (32, 8, 90, 300, 120)
    readings = [other.read(batch_of(length), None) for length in lengths]
    assert other.flops(as_work(other.look_at_held(readings[0]), iter(()))) is None

    other.adopt(logging.offer())

    for length, reading in zip(lengths, readings, strict=True):
        flops = other.flops(as_work(other.look_at_held(reading), iter(())))
        assert flops.model == flopwatch.count_flops(model, batch_of(length)).model_flops
