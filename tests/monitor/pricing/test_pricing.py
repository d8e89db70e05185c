"""What steps cost on ranks that wait for another one's count."""

from contextlib import nullcontext

import pytest
import torch

import flopwatch
from flopwatch.clock import monotonic_seconds
from flopwatch.models.load import load_model
from flopwatch.monitor.config import MonitorConfig
from flopwatch.monitor.intake.batch_reader import as_work
from flopwatch.monitor.pricing.pricing import Pricing


def batch_of(length):
    ids = torch.zeros(2, length, dtype=torch.long)
    return {"input_ids": ids, "labels": ids}


def pricing_of(model):
    nothing = {"loss_fn": None, "flops_fn": None, "peak_flops_per_s": None}
    pricing = Pricing(MonitorConfig(), monotonic_seconds, **nothing, apart=nullcontext, tell=lambda *words: None)
    pricing.set_model(model)
    return pricing


def noted(pricing, length, step):
    reading = pricing.read(batch_of(length), None)
    return reading, pricing.end_step([reading], step, lambda: None)


def flops_of(pricing, step):
    reading, calls = step
    return pricing.flops(calls, [as_work(pricing.look_at_held(reading), iter(()))])


@pytest.mark.requirement("R13")
def test_batches_met_before_the_laws_came_are_priced_too_whatever_their_length():
    model = load_model("tiny")
    logging, other = pricing_of(model), pricing_of(model)
    noted(logging, 32, 0)
    other.waits_for_laws = True
    lengths = (32, 8, 90, 300, 120)
    steps = [noted(other, length, number) for number, length in enumerate(lengths)]
    assert flops_of(other, steps[0]) is None

    other.adopt(logging.offer())
    for _, calls in steps:
        other.learn_kept(calls)

    for length, step in zip(lengths, steps, strict=True):
        assert flops_of(other, step).model == flopwatch.count_flops(model, batch_of(length)).model_flops
