"""Counts of single steps, with the steps of optimizers announced as the monitor does it."""

from collections.abc import Callable
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from flopwatch.flops.tracing.live import StepCount


def counted(kind: type[Any], step: Callable[[], Any], attention: str = "full") -> StepCount:
    """Run a step under a `LiveStep` and return its count."""
    counter = kind(attention)
    handles = [
        register_optimizer_step_pre_hook(counter.enter_optimizer),
        register_optimizer_step_post_hook(lambda *_: counter.leave_optimizer()),
    ]
    try:
        step()
    finally:
        for handle in handles:
            handle.remove()
        count: StepCount = counter.end()
    return count
