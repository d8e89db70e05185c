"""Count by following the model's own code with fake tensors: no weights, no device time, the live model untouched."""

from contextlib import nullcontext
from typing import Any

from torch import nn

from flopwatch.flops.counter import CountingMode
from flopwatch.flops.fakes import NEEDS_VALUES, Faker, quiet_fakes
from flopwatch.flops.passes import LossFn, copied_batch, failures_named, run_step
from flopwatch.flops.replica import ModuleStack, replicate
from flopwatch.flops.undisturbed import undisturbed
from flopwatch.flops.unfused import WholeAttention
from flopwatch.records import AttentionConvention, FlopCount


def count_by_trace(
    model: nn.Module, batch: Any, *, attention: AttentionConvention, loss_fn: LossFn | None, training: bool
) -> FlopCount:
    """Raise UntraceableError where the model needs values that fake tensors do not have."""
    faker, stack = Faker(), ModuleStack()
    mode = CountingMode(stack, attention, faker.execute)
    whole_attention = WholeAttention(mode.add) if attention == "causal" else nullcontext()
    with undisturbed(), quiet_fakes():
        replica = replicate(model, faker.tensor, stack)
        fake_batch = copied_batch(batch, faker.tensor)
        with failures_named(stack, NEEDS_VALUES), whole_attention:
            run_step(replica, fake_batch, loss_fn, mode, training=training)
    return mode.tally.as_count("trace", attention)
