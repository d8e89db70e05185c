"""Counts the FLOPs of one batch, padding included, by a trace with fake tensors, a real step or an estimate.

A trace runs the model's own code on fake tensors, which have shapes but no values, so it needs neither weights nor a
device. Models that need values are counted on a real step, which runs on a stand-in: a copy of the module tree
that shares the live parameters' storage. The live model's gradients, buffers and hooks stay untouched, but forward and
backward really run and need their memory.
"""

from collections.abc import Callable
from contextlib import ExitStack
from contextvars import copy_context
from dataclasses import replace
from typing import Any, Literal, get_args

import torch
from torch import nn

from flopwatch.errors import InputError, MeasurementError
from flopwatch.flops.batch_contents import as_call
from flopwatch.flops.by_estimate import count_by_estimate
from flopwatch.flops.formulas.attention import WholeAttention
from flopwatch.flops.steering import PythonReads, Steering, following, python_draws
from flopwatch.flops.tracing.copies import Copies, NotCopyableError
from flopwatch.flops.tracing.counter import CountingMode, NeedsOtherRanksError, run_op
from flopwatch.flops.tracing.fakes import Faker, quiet_fakes
from flopwatch.flops.tracing.kernels import watch_launches
from flopwatch.flops.tracing.masked_products import MaskedProducts
from flopwatch.flops.tracing.passes import (
    AutocastState,
    CountOptions,
    MethodChoice,
    current_autocast,
    device_type_of,
    failures_named,
    run_step,
    threads_met,
    under_autocast,
)
from flopwatch.flops.tracing.replica import ModuleStack, undisturbed
from flopwatch.records.flops import AttentionConvention, FlopCount
from flopwatch.torch_internals import check_countable, untested_release
from flopwatch.torch_internals.autograd import current_graph_task_id

WITHOUT_AUTOCAST = "the model could not be traced under autocast, so the compute types of its products are not known"


def count_by_step(model: nn.Module, batch: Any, options: CountOptions) -> FlopCount:
    obstacle = step_obstacle(model)
    if obstacle:
        raise InputError(f"{obstacle}; use method='trace'")
    return _counted("step", model, batch, options, current_autocast())


def step_obstacle(model: nn.Module) -> str | None:
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device.type == "meta":
            return "the model is on the meta device, so it has no weights to run a step with"
        if hasattr(tensor, "full_tensor"):  # a DTensor
            return "the model's parameters are spread over ranks (DTensor), so one rank alone cannot run a step"
    return None


def _own(value: Any) -> Any:
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value


def count_by_trace(model: nn.Module, batch: Any, options: CountOptions) -> FlopCount:
    """Count the FLOPs of a step on fake tensors. Raises UntraceableError if the model needs the values of tensors.

    A trace runs under the CPU's autocast, which may keep an op in fp32 that an accelerator runs in bf16. If the
    model fails because another op gets tensors of both types, a trace without autocast may work.
    """
    autocast = current_autocast()
    try:
        return _traced(model, batch, options, autocast)
    except MeasurementError:
        if not autocast:
            raise
        count = _traced(model, batch, options, ())
        return replace(count, by_dtype={}, notes=(*count.notes, WITHOUT_AUTOCAST))


def _traced(model: nn.Module, batch: Any, options: CountOptions, autocast: AutocastState) -> FlopCount:
    """Trace with attention as one op only where the result depends on it, because it takes longer."""
    keep_whole = options.attention == "causal" or device_type_of(model, autocast) != "cpu"
    try:
        return _counted("trace", model, batch, options, autocast, keep_whole=keep_whole)
    except MeasurementError as error:
        # The message names FlexAttention, or its op flex_attention, if the model needs its backward pass, which the
        # CPU does not have.
        if keep_whole or "flexattention" not in str(error).lower().replace("_", ""):
            raise
        return _counted("trace", model, batch, options, autocast, keep_whole=True)


def _counted(
    method: Literal["trace", "step"],
    model: nn.Module,
    batch: Any,
    options: CountOptions,
    autocast: AutocastState,
    *,
    keep_whole: bool = False,
) -> FlopCount:
    if current_graph_task_id() != -1:
        raise InputError("a backward pass is running, in which no other step can be counted; count before or after it")
    stack, steering = ModuleStack(), Steering()
    faker = Faker() if method == "trace" else None
    execute = following(faker.execute if faker else run_op, steering)
    products = MaskedProducts() if options.attention == "causal" else None
    mode = CountingMode(stack, options.attention, execute, products)
    # A real step only reads a parameter, so a view of it is enough. It may write to a buffer.
    alias = lambda it: it.detach() if isinstance(it, nn.Parameter) else it.detach().clone()  # noqa: E731
    copies = Copies(faker.tensor if faker else alias, stack)
    # `Steering` tells arguments apart by their tensors.
    if isinstance(batch, dict):
        batch = {name: _own(value) for name, value in batch.items()}
    elif type(batch) is tuple:
        batch = tuple(map(_own, batch))
    under = under_autocast(autocast, device_type_of(model, autocast), stand_in=faker is not None)
    # A model that calls `torch.manual_seed` also seeds its own device, though a trace does not use it.
    with undisturbed(parameter.device for parameter in model.parameters()), quiet_fakes(), ExitStack() as contexts:
        replica, own_batch, loss_fn = copies.all_of(model, batch, options.loss_fn)
        steering.name(own_batch, () if faker else (*replica.parameters(), *replica.buffers()))
        for context in (copies.in_place(), failures_named(stack), python_draws(steering)):
            contexts.enter_context(context)
        if options.training:  # in inference, torch runs an encoder layer as one op, which a function mode would prevent
            contexts.enter_context(PythonReads(steering))
        contexts.enter_context(threads_met(mode.add_threads))
        if method == "step":
            contexts.callback(watch_launches(mode.add_kernel))
        if keep_whole:  # must be the innermost mode, because it inspects its caller's frame
            contexts.enter_context(WholeAttention(mode.add, options.attention))
        run = copy_context().run
        run(run_step, replica, *as_call(own_batch), loss_fn, mode, training=options.training, autocast=under)
    for note in (*stack.notes(), untested_release()):
        mode.tally.note(note)
    return steering.add_to(mode.tally.as_count(method, options.attention, products))


def count_as_is(model: nn.Module, batch: Any, options: CountOptions) -> FlopCount:
    """Count the FLOPs of all positions, padding included, under the current autocast state."""
    method = options.method
    if callable(method):
        return _count_by_user(method, batch, options.attention)
    by_name = {"trace": count_by_trace, "step": count_by_step, "estimate": count_by_estimate}
    if method in by_name:
        return by_name[method](model, batch, options)
    if method != "auto":
        choices = ", ".join(map(repr, get_args(MethodChoice)))
        raise InputError(f"method must be one of {choices}, or a function that takes a batch, got {method!r}")
    try:
        check_countable()
    except MeasurementError as error:
        return _estimated(model, batch, str(error), options)
    try:
        return count_by_trace(model, batch, options)
    except (NeedsOtherRanksError, NotCopyableError) as error:
        return _estimated(model, batch, str(error), options)
    except MeasurementError as error:
        trace_error = error
    cannot_trace = f"the model could not be traced with fake tensors ({trace_error})"
    obstacle = step_obstacle(model)
    if obstacle is not None:
        return _estimated(model, batch, f"{cannot_trace}, and {obstacle}", options)
    try:
        count = count_by_step(model, batch, options)
    except (NeedsOtherRanksError, NotCopyableError) as error:
        return _estimated(model, batch, f"{cannot_trace}, and {error}", options)
    note = f"counted on one real step, because the model could not be traced with fake tensors: {trace_error}"
    return replace(count, notes=(note, *count.notes))


def _estimated(model: nn.Module, batch: Any, reason: str, options: CountOptions) -> FlopCount:
    count = count_by_estimate(model, batch, options)
    return replace(count, notes=(f"the FLOPs are estimated, because {reason}", *count.notes))


def _count_by_user(flops_fn: Callable[[Any], int], batch: Any, attention: AttentionConvention) -> FlopCount:
    flops = flops_fn(batch)
    if isinstance(flops, bool) or not isinstance(flops, int | float) or not 0 < flops < float("inf"):
        raise InputError(f"the function given as method must return a positive finite number of FLOPs, got {flops!r}")
    note = "the FLOPs come from the user's function, which does not separate forward and backward"
    return FlopCount(int(flops), int(flops), 0, 0, 0, method="flops_fn", attention=attention, notes=(note,))
