"""The counters that run in this process: flopwatch, torch's own and the rules of thumb."""

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import flopwatch
from accuracy.hand_rules import DoesNotApplyError, hf_trainer_flops, seven_and_a_half_n_flops, six_n_flops
from accuracy.outcomes import Outcome
from flopwatch.flops.tracing.live import LiveStep
from testbeds.architectures import SEED, Architecture, Batch, true_flops

BATCH_SIZE = 2
SEQ_LEN = 32

CountFn = Callable[[nn.Module, Batch], int]


def flopwatch_flops(method: Literal["trace", "step", "estimate"], model: nn.Module, batch: Batch) -> int:
    return flopwatch.count_flops(model, batch, method=method).model_flops


def live_flops(model: nn.Module, batch: Batch) -> int:
    """Count one step of a training as it runs, as the monitor does."""
    step = LiveStep("full", model.parameters())
    model(**batch).loss.backward()
    count = step.end()
    assert count.is_whole, count.failure or count.uncounted
    return count.phases.forward + count.phases.backward


def flop_counter_mode_flops(model: nn.Module, batch: Batch) -> int:
    with FlopCounterMode(display=False) as counter:
        model(**batch).loss.backward()
    return int(counter.get_total_flops())


def profiler_flops(model: nn.Module, batch: Batch) -> int:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], with_flops=True) as profiler:
        model(**batch).loss.backward()
    return int(sum(event.flops for event in profiler.key_averages()))


COUNTERS: dict[str, CountFn] = {
    "flopwatch_trace": partial(flopwatch_flops, "trace"),
    "flopwatch_step": partial(flopwatch_flops, "step"),
    "flopwatch_estimate": partial(flopwatch_flops, "estimate"),
    "flop_counter_mode": flop_counter_mode_flops,
    "profiler": profiler_flops,
    "hf_trainer": hf_trainer_flops,
    "six_n": six_n_flops,
    "seven_and_a_half_n": seven_and_a_half_n_flops,
}


def truth_flops(architecture: Architecture) -> int:
    return true_flops(architecture.build(eager=True), architecture.batch(BATCH_SIZE, SEQ_LEN))


def count(tool: str, architecture: Architecture) -> Outcome:
    return outcome(COUNTERS[tool], architecture)


def outcome(counter: CountFn, architecture: Architecture) -> Outcome:
    """One tool on a fresh model, built as a user builds it."""
    model = architecture.build()
    batch = architecture.batch(BATCH_SIZE, SEQ_LEN)
    torch.manual_seed(SEED)  # layer drop
    try:
        return Outcome(counter(model, batch))
    except DoesNotApplyError as error:
        return Outcome(None, str(error), applies=False)
    except Exception as error:
        first_line = (str(error).strip().splitlines() or [""])[0]
        return Outcome(None, f"{type(error).__name__}: {first_line}")
