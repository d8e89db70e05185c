"""A run that meets ever new shapes keeps a bounded number of things, and its numbers are those of every shape."""

import gc
from collections import deque
from functools import partial
from itertools import count

import pytest
import torch
from torch import nn

from flopwatch import TrainingMonitor
from flopwatch.testing import RecordingSink

pytestmark = pytest.mark.slow

SHAPES, PASSES, WIDTH = 4_300, 2, 2
MOST_ENTRIES = 4_200
"""The largest bound in the monitor is 4,096 shapes."""


class ManyLayers(nn.Module):
    """Runs as many operations as there are samples modulo 5, so that autograd's count changes with the shape."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        y = self.layer(x)
        for _ in range(len(x) % 5):
            y = y + 1
        return y.sum()


def containers_below(root):
    """Every dict, list, set and deque that can be reached from here, but for those of classes and modules."""
    seen, waiting = set(), [root]
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen or isinstance(thing, type | type(gc) | nn.Module | torch.Tensor):
            continue
        seen.add(id(thing))
        if type(thing).__name__ in ("function", "builtin_function_or_method", "frame"):
            continue
        if isinstance(thing, dict | list | set | deque | tuple):
            yield thing
        waiting += gc.get_referents(thing)


def wrong_steps(sink, steps):
    rows = [record for record in sink.records if record.type == "row"]
    known = [pair for row in rows for pair in zip(row.steps["step"], row.steps.get("model_flops", ()), strict=False)]
    return [step for step, flops in known if flops not in (None, 2 * 2 * WIDTH**2 * steps[step])]


@pytest.mark.parametrize(
    "logged", ["opened steps", pytest.param("batches that are only described", marks=pytest.mark.campaign)]
)
def test_a_run_with_thousands_of_shapes_keeps_a_bounded_number_of_them(tmp_path, logged):
    model = ManyLayers()
    sink = RecordingSink()
    monitor = TrainingMonitor(
        tmp_path, model=model, log_every=200, sinks=[sink], clock=partial(next, count(step=0.001))
    )
    steps = [samples for _ in range(PASSES) for samples in range(1, SHAPES + 1)]
    for number, samples in enumerate(steps):
        batch = torch.zeros(samples, WIDTH)
        if logged == "opened steps":
            with monitor.step(batch):
                model(batch).backward()
        else:
            monitor.log_step(number, batch=batch)
    monitor.log_now()
    largest = max(map(len, containers_below(monitor._run)))
    monitor.close()

    assert largest <= MOST_ENTRIES
    assert monitor.summary.values["total/steps"] == len(steps)
    assert wrong_steps(sink, steps) == []
    assert monitor.summary.values["total/model_flops"] > 0.25 * 2 * 2 * WIDTH**2 * sum(steps)
