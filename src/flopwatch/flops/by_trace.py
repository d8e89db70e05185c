"""Count by following the model's own code with fake tensors: no weights, no device time, the live model untouched."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from flopwatch.errors import FlopwatchError, MeasurementError, UntraceableError
from flopwatch.flops.counter import CountingMode
from flopwatch.flops.fakes import NEEDS_VALUES, Faker
from flopwatch.flops.passes import LossFn, run_step
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
    with undisturbed():
        replica = replicate(model, faker.tensor, stack)
        fake_batch = tree_map_only(torch.Tensor, faker.tensor, batch)
        whole_attention = WholeAttention(mode.add) if attention == "causal" else nullcontext()
        try:
            with whole_attention:
                run_step(replica, fake_batch, loss_fn, mode, training=training)
        except FlopwatchError:
            raise
        except NEEDS_VALUES as error:
            raise UntraceableError(
                f"module {stack.failed_in!r} needs the value of an activation ({_first_line(error)})"
            ) from error
        except Exception as error:
            raise MeasurementError(
                f"the model's step raised {type(error).__name__} in module {stack.failed_in!r}: {_first_line(error)}"
            ) from error
    return mode.tally.as_count("trace", attention)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
