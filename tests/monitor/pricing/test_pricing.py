"""What steps cost on ranks that wait for another one's count."""

from contextlib import nullcontext

import pytest
import torch

import flopwatch
from flopwatch.clock import monotonic_seconds
from flopwatch.models.load import load_model
from flopwatch.monitor.config import MonitorConfig
from flopwatch.monitor.pricing.batch_reader import as_work
from flopwatch.monitor.pricing.call_costs import CallCosts
from flopwatch.monitor.pricing.law_book import choose_mode
from flopwatch.monitor.pricing.step_calls import StepNoter
from flopwatch.monitor.pricing.step_prices import StepPricer


def batch_of(length):
    ids = torch.zeros(2, length, dtype=torch.long)
    return {"input_ids": ids, "labels": ids}


class Rank:
    """The stages of one rank that note and price steps."""

    def __init__(self, model, *, waits_for_laws=False):
        config, notify = MonitorConfig(), lambda *notice: None
        mode = choose_mode(config, monotonic_seconds, None, None, notify)
        self.costs = CallCosts(
            config, monotonic_seconds, mode, waits_for_laws=waits_for_laws, off_the_clock=nullcontext, notify=notify
        )
        self.noter = StepNoter(config, self.costs, True, lambda has_grad: None, notify)
        self.pricer = StepPricer(config, self.costs, None, notify)
        self.noter.set_model(model)

    def note(self, batch, step):
        reading = self.noter.read(batch, None)
        return reading, self.noter.end_step([reading], step, lambda: None)

    def flops_of(self, step):
        reading, calls = step
        work = as_work(self.noter.look_at_held(reading), iter(()))
        return self.pricer.cost(calls, [work], None, None).flops


@pytest.mark.slow
@pytest.mark.requirement("R13")
def test_batches_met_before_the_laws_came_are_priced_too_whatever_their_length():
    model = load_model("tiny")
    logging, other = Rank(model), Rank(model, waits_for_laws=True)
    logging.note(batch_of(32), 0)
    lengths = (32, 8, 90, 300, 120)
    steps = [other.note(batch_of(length), number) for number, length in enumerate(lengths)]
    assert other.flops_of(steps[0]) is None

    other.costs.adopt(logging.costs.offer())
    for _, calls in steps:
        other.costs.learn_kept(calls)

    for length, step in zip(lengths, steps, strict=True):
        assert other.flops_of(step).model == flopwatch.count_flops(model, batch_of(length)).model_flops


def test_a_rank_whose_calls_were_seen_keeps_the_laws_it_has_adopted():
    """What a look at the model compares must not depend on whether calls were seen before or after the laws came."""
    model, batch = torch.nn.Linear(8, 8), torch.zeros(4, 8)
    logging, other = Rank(model), Rank(model, waits_for_laws=True)
    model(batch).sum().backward()  # both listen
    logging.note(batch, 0)
    other.note(batch, 0)
    other.costs.adopt(logging.costs.offer())
    laws = other.costs.mode.book.laws

    assert other.noter.look_at_model() is None
    assert laws
    assert other.costs.mode.book.laws == laws
