"""A count begins and ends anywhere among the dispatch modes of a training, and leaves them as they would be."""

from typing import Any

import torch
from torch import nn
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from flopwatch.flops.tracing.live import LiveStep
from flopwatch.torch_internals.ops import dispatch_mode_stack

MODEL, DATA = nn.Linear(8, 4), torch.ones(5, 8)
STEP_FLOPS = 2 * 2 * 5 * 8 * 4


class Counter(TorchDispatchMode):
    ops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops += 1
        return func(*args, **(kwargs or {}))


def step() -> None:
    MODEL(DATA).sum().backward()


def flags() -> list[Any]:
    """Torch's own notes on whether a dispatch mode is active."""
    return [value for name, value in vars(_python_dispatch).items() if name.startswith("_is_in_")]


def test_a_mode_that_begins_and_ends_in_the_step_changes_nothing() -> None:
    live = LiveStep("full")
    with Counter() as counter:
        step()
    assert (live.end().phases.total, counter.ops > 0) == (STEP_FLOPS, True)


def test_a_mode_that_ends_in_the_step_and_began_before_is_left() -> None:
    before = flags()
    with Counter(), Counter():
        live = LiveStep("full")
        step()
    assert "ended in the step" in str(live.end().failure)
    assert dispatch_mode_stack() == []
    assert flags() == before


def test_a_mode_that_began_in_the_step_and_goes_on_is_kept() -> None:
    before = flags()
    live = LiveStep("full")
    with Counter() as counter:
        assert "has not ended" in str(live.end().failure)
        seen = counter.ops
        step()
        assert counter.ops > seen
    LiveStep("full").end()
    assert dispatch_mode_stack() == []
    assert flags() == before
