"""The ways to count a batch as it stands, and which one is tried when another fails."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, get_args

from torch import nn

from flopwatch.errors import InputError, MeasurementError
from flopwatch.flops.autocast import AutocastState
from flopwatch.flops.by_estimate import count_by_estimate
from flopwatch.flops.by_step import count_by_step, step_obstacle
from flopwatch.flops.by_trace import count_by_trace
from flopwatch.flops.collectives import NeedsOtherRanksError
from flopwatch.flops.counter import THREADS
from flopwatch.flops.losses import LossFn
from flopwatch.records import AttentionConvention, FlopCount

MethodChoice = Literal["auto", "trace", "step", "estimate"]


def count_as_is(
    model: nn.Module,
    batch: Any,
    *,
    method: MethodChoice | Callable[[Any], int],
    attention: AttentionConvention,
    loss_fn: LossFn | None,
    training: bool,
    autocast: AutocastState | None = None,
) -> FlopCount:
    """Count every position, padding or not; under this autocast state, or the current one."""
    if callable(method):
        return _count_by_user(method, batch, attention)
    if method not in get_args(MethodChoice):
        choices = ", ".join(map(repr, get_args(MethodChoice)))
        raise InputError(f"method is one of {choices} or a function from a batch to its FLOPs, got {method!r}")
    ways = {"trace": count_by_trace, "step": count_by_step}
    options: dict[str, Any] = {"attention": attention, "loss_fn": loss_fn, "training": training}
    if method == "estimate":
        return count_by_estimate(model, batch, **options)
    if method != "auto":
        return ways[method](model, batch, autocast=autocast, **options)
    return _count_by_first_that_works(model, batch, autocast, **options)


def _count_by_first_that_works(
    model: nn.Module, batch: Any, autocast: AutocastState | None, **options: Any
) -> FlopCount:
    try:
        traced = count_by_trace(model, batch, autocast=autocast, **options)
        if THREADS not in {op.op for op in traced.uncounted} or step_obstacle(model) is not None:
            return traced
        trace_error = MeasurementError("it starts threads, in which fake tensors are not seen")
    except NeedsOtherRanksError as error:
        return _estimated(model, batch, str(error), options)
    except MeasurementError as error:
        trace_error = error
    cannot_follow = f"fake tensors could not follow the model ({trace_error})"
    obstacle = step_obstacle(model)
    if obstacle is not None:
        return _estimated(model, batch, f"{cannot_follow}, and {obstacle}", options)
    try:
        count = count_by_step(model, batch, autocast=autocast, **options)
    except NeedsOtherRanksError as error:
        return _estimated(model, batch, f"{cannot_follow}, and {error}", options)
    note = f"counted on one real step, because fake tensors could not follow the model: {trace_error}"
    return replace(count, notes=(note, *count.notes))


def _estimated(model: nn.Module, batch: Any, reason: str, options: dict[str, Any]) -> FlopCount:
    count = count_by_estimate(model, batch, **options)
    return replace(count, notes=(f"estimated: {reason}", *count.notes))


def _count_by_user(flops_fn: Callable[[Any], int], batch: Any, attention: AttentionConvention) -> FlopCount:
    flops = flops_fn(batch)
    if isinstance(flops, bool) or not isinstance(flops, int | float) or not 0 < flops < float("inf"):
        raise InputError(f"the function given as method must return a positive finite number of FLOPs, got {flops!r}")
    note = "as the user's function says; forward and backward are not told apart"
    return FlopCount(int(flops), int(flops), 0, 0, 0, method="flops_fn", attention=attention, notes=(note,))
