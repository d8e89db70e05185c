"""The time of forward and backward passes is measured, so that what is between them has a name of its own."""

from collections import namedtuple

import pytest
import torch
from torch import nn

from flopwatch import TrainingMonitor
from flopwatch.records.metrics import goodput_of
from flopwatch.runs.reading import read_log
from flopwatch.testing import FakeClock

clock: FakeClock


class Taking(torch.autograd.Function):
    """Takes 1 s in the forward pass and 2 s in the backward pass."""

    @staticmethod
    def forward(ctx, x):
        clock.advance(1.0)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        clock.advance(2.0)
        return grad


class Model(nn.Module):
    def __init__(self, give=lambda out: out):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.give = give

    def forward(self, x):
        return self.give(Taking.apply(self.layer(x)))


def loss_of(output):
    return output.sum()


def run(tmp_path, train_step, model=None, steps=12):
    """The ledger of a training with a step that calls `train_step(model, x, optimizer)`."""
    global clock
    clock = FakeClock()
    model = model or Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with TrainingMonitor(tmp_path, model=model, log_every=steps, clock=clock) as monitor:
        for _ in range(steps):
            x = torch.ones(3, 2)
            with monitor.step(x):
                train_step(model, x, optimizer)
    return read_log(tmp_path / "training_log.jsonl").rows[-1].ledger["seconds"]


def usual(model, x, optimizer, between=0.5, read=loss_of):
    output = model(x)
    clock.advance(between)
    read(output).backward()
    optimizer.step()
    optimizer.zero_grad()


def test_what_is_between_forward_and_backward_pass_is_measured(tmp_path):
    seconds = run(tmp_path, usual)

    assert seconds["outside_passes"] / seconds["passes_timed"] == pytest.approx(0.5 / 3.5)


Output = namedtuple("Output", "loss logits")


def test_what_is_between_micro_batches_and_after_the_last_backward_pass_is_measured_too(tmp_path):
    def accumulate(model, x, optimizer):
        for _ in range(2):
            clock.advance(0.25)
            model(x).sum().backward()
        clock.advance(0.125)
        optimizer.step()

    seconds = run(tmp_path, accumulate)

    assert seconds["outside_passes"] / seconds["passes_timed"] == pytest.approx(0.625 / 6.625)


class Hidden:
    """An output that hides its tensor from everybody but its method."""

    __slots__ = ("_tensor",)

    def __init__(self, tensor):
        self._tensor = tensor

    def sum(self):
        return self._tensor.sum()


def without_modules(model, x, optimizer):
    Taking.apply(nn.functional.linear(x, model.layer.weight)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("step", "model"),
    [(usual, Model(Hidden)), (without_modules, Model())],
    ids=["hidden output", "no call of a module"],
)
def test_passes_that_were_not_seen_whole_are_unknown(tmp_path, step, model):
    assert "passes_timed" not in run(tmp_path, step, model)


def test_a_second_backward_pass_that_is_not_seen_makes_the_passes_unknown(tmp_path):
    def step(model, x, optimizer):
        usual(model, x, optimizer)
        without_modules(model, x, optimizer)

    assert "passes_timed" not in run(tmp_path, step)


def test_what_runs_when_the_engine_ends_belongs_to_the_backward_pass(tmp_path):
    """DDP waits there for the gradients of other ranks."""

    queue = torch.autograd.Variable._execution_engine.queue_callback
    model = Model()
    model.layer.weight.register_post_accumulate_grad_hook(lambda _: queue(lambda: clock.advance(0.75)))
    seconds = run(tmp_path, usual, model)

    assert seconds["outside_passes"] / seconds["passes_timed"] == pytest.approx(0.5 / 4.25)


def test_goodput_does_not_rise_when_the_input_between_the_passes_gets_slower():
    fast = {"wall": 100.0, "train": 50.0, "passes_timed": 50.0, "outside_passes": 0.0}
    slow = {"wall": 150.0, "train": 100.0, "passes_timed": 100.0, "outside_passes": 50.0}

    assert goodput_of(slow).share == goodput_of(fast).share == 0.5
    assert "waits for batches that were not timed" in goodput_of(slow).caveat
    assert goodput_of(fast).caveat is None
