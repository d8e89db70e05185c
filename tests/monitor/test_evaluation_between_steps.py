"""Loops with a `TrainingMonitor` and no `phase("eval")`: evaluations are recognised as with `flopwatch run`."""

from contextlib import contextmanager

import pytest
import torch
from torch import nn

from flopwatch.monitor.training_monitor import TrainingMonitor
from flopwatch.testing import FakeClock

STEP_FLOPS = 2 * (2 * 4 * 8 * 8)
"""Forward pass and weight gradient of a linear layer with 4 samples; its input needs no gradient."""
STEPS, STEP_SECONDS, CALL_SECONDS, BATCHES = 60, 0.1, 1.0, 3


class Loop:
    """A loop in which each step takes 0.1 s and each call outside of steps 1 s."""

    def __init__(self, folder, opens_steps):
        self.clock, self.opens_steps = FakeClock(), opens_steps
        self.model, self.teacher = nn.Linear(8, 8), nn.Linear(8, 8)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.monitor = TrainingMonitor(folder, model=self.model, log_every=10, quiet=True, clock=self.clock)

    @contextmanager
    def _step(self, number, batch):
        if self.opens_steps:
            with self.monitor.step(batch):
                yield
        else:
            yield
            self.monitor.log_step(number, batch=batch)

    def run(self, between):
        for number in range(STEPS):
            between(number)
            batch = torch.randn(4, 8)
            with self._step(number, batch):
                self.model(batch).sum().backward()
                self.optimizer.step()
                self.clock.advance(STEP_SECONDS)
        self.monitor.close()
        return self.monitor.summary

    def call(self, model):
        with torch.no_grad():
            model(torch.randn(4, 8))
            self.clock.advance(CALL_SECONDS)

    def evaluate(self):
        self.model.eval()
        for _ in range(BATCHES):
            self.clock.advance(CALL_SECONDS)  # the data of the validation
            with torch.no_grad():
                self.model(torch.randn(4, 8))
        self.model.train()


@pytest.fixture(params=[True, False], ids=["step", "log_step"])
def loop(tmp_path, request):
    return Loop(tmp_path, request.param)


def test_evaluation_now_and_then_is_evaluation_and_no_part_of_steps(loop):
    summary = loop.run(lambda number: loop.evaluate() if number in (20, 40) else None)
    assert summary.values["time/eval_seconds"] == pytest.approx(2 * BATCHES * CALL_SECONDS)
    assert summary.values["time/train_seconds"] == pytest.approx(STEPS * STEP_SECONDS, rel=0.05)
    assert summary.values.get("time/outside_seconds", 0) == summary.values.get("time/stall_seconds", 0) == 0
    assert summary.values["total/model_flops"] == STEPS * STEP_FLOPS
    assert "work_between_steps" not in summary.notices


def test_a_teacher_before_every_step_is_no_evaluation(loop):
    loop.teacher.eval()
    summary = loop.run(lambda number: loop.call(loop.teacher))
    assert summary.values.get("time/eval_seconds", 0) == 0


def test_an_evaluation_in_a_phase_is_counted_once(loop):
    def evaluate(number):
        if number == 30:
            with loop.monitor.phase("eval"):
                loop.evaluate()

    assert loop.run(evaluate).values["time/eval_seconds"] == pytest.approx(BATCHES * CALL_SECONDS)
