"""Counts the FLOPs of one batch, padding included, by a trace with fake tensors, a real step or an estimate.

A trace runs the model's own code on fake tensors, which have shapes but no values, so it needs neither weights nor a
device. Models that need values are counted on a real step, which runs on a stand-in: a copy of the module tree
that shares the live parameters' storage. The live model's gradients, buffers and hooks stay untouched, but forward and
backward really run and need their memory.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from contextvars import copy_context
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import nn

from flopwatch.errors import InputError, MeasurementError
from flopwatch.flops.batch_contents import as_call
from flopwatch.flops.by_estimate import count_by_estimate
from flopwatch.flops.formulas.attention import WholeAttention
from flopwatch.flops.steering import PythonReads, Steering, following, python_draws, with_steering
from flopwatch.flops.tracing.copies import Copies, NotCopyableError
from flopwatch.flops.tracing.counter import THREADS, CountingMode, NeedsOtherRanksError, run_op
from flopwatch.flops.tracing.fakes import Faker, quiet_fakes
from flopwatch.flops.tracing.kernels import watch_launches
from flopwatch.flops.tracing.passes import (
    AutocastState,
    LossFn,
    current_autocast,
    device_type_of,
    failures_named,
    run_step,
    threads_met,
    under_autocast,
)
from flopwatch.flops.tracing.replica import ModuleStack, undisturbed
from flopwatch.flops.tracing.tally import Tally
from flopwatch.records.flops import AttentionConvention, FlopCount, Method
from flopwatch.torch_internals.autograd import current_graph_task_id
from flopwatch.torch_internals.probes import check_countable, untested_release


def count_by_step(
    model: nn.Module,
    batch: Any,
    *,
    attention: AttentionConvention,
    loss_fn: LossFn | None,
    training: bool,
) -> FlopCount:
    """Count the FLOPs of a real step. Raises InputError if one process cannot run it, MeasurementError if it fails."""
    obstacle = step_obstacle(model)
    if obstacle:
        raise InputError(f"{obstacle}; use method='trace'")
    state = current_autocast()
    under = under_autocast(state, device_type_of(model, state), stand_in=False)
    stack, steering = ModuleStack(), Steering()
    copies, execute = Copies(_alias, stack), following(run_op, steering)
    mode, in_threads = CountingMode(stack, attention, execute), list[Tally]()

    def modes_of_thread() -> tuple[Any, ...]:
        in_threads.append(Tally())
        own = CountingMode(stack, attention, execute, in_threads[-1])
        return (PythonReads(steering), own) if training else (own,)

    with undisturbed(parameter.device for parameter in model.parameters()):
        replica, own_batch, own_loss = copies.all_of(model, _apart(batch), loss_fn)
        steering.name(own_batch, (*replica.parameters(), *replica.buffers()))
        noticed = threads_met(mode.add_threads, modes_of_thread)
        reads = PythonReads(steering) if training else nullcontext()
        with copies.in_place(), failures_named(stack), python_draws(steering), reads, noticed, ExitStack() as ends:
            ends.callback(watch_launches(mode.add_kernel))
            copy_context().run(
                run_step, replica, *as_call(own_batch), own_loss, mode, training=training, autocast=under
            )
    for log in in_threads:
        log.add_to(mode.tally)
    return _as_count("step", mode.tally, stack, attention, steering)


def step_obstacle(model: nn.Module) -> str | None:
    """Return why a real step cannot run in this process; None if it can."""
    if current_graph_task_id() != -1:
        return "a backward pass is running, in which no other step can run"
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device.type == "meta":
            return "the model is on the meta device, so it has no weights to run a step with"
        if hasattr(tensor, "full_tensor"):  # a DTensor
            return "the model's parameters are spread over ranks (DTensor), so one rank alone cannot run a step"
    return None


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a parameter, which the step only reads, or a copy of a buffer, which the step may write to."""
    return tensor.detach() if isinstance(tensor, nn.Parameter) else tensor.detach().clone()


def _apart(batch: Any) -> Any:
    """Return the batch with a tensor of its own for each argument, because `Steering` tells arguments apart by it."""

    def own(value: Any) -> Any:
        return value.detach().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value

    if isinstance(batch, dict):
        return {name: own(value) for name, value in batch.items()}
    return tuple(map(own, batch)) if type(batch) is tuple else batch


WITHOUT_AUTOCAST = "the model could not be traced under autocast, so the compute types of its products are not known"


def count_by_trace(
    model: nn.Module,
    batch: Any,
    *,
    attention: AttentionConvention,
    loss_fn: LossFn | None,
    training: bool,
) -> FlopCount:
    """Count the FLOPs of a step on fake tensors. Raises UntraceableError if the model needs the values of tensors."""
    state = current_autocast()
    count = _Trace(model, batch, state, attention, loss_fn, training).count_with_autocast_or_without
    if current_graph_task_id() == -1:
        return count()
    # A hook of a backward pass has called us. In its thread, all ops would seem to belong to that backward pass.
    with ThreadPoolExecutor(1, "flopwatch-count") as thread:
        return thread.submit(copy_context().run, count).result()


@dataclass(frozen=True)
class _Trace:
    model: nn.Module
    batch: Any
    autocast: AutocastState
    attention: AttentionConvention
    loss_fn: LossFn | None
    training: bool
    keep_whole: bool = False
    """Whether to count attention as one op where torch would decompose it; this takes longer."""

    def count_with_autocast_or_without(self) -> FlopCount:
        """Count the step's FLOPs, and if that fails under autocast, count them without it.

        A trace runs under the CPU's autocast, which may keep an op in fp32 that an accelerator runs in bf16. If the
        model fails because another op gets tensors of both types, a trace without autocast may work.
        """
        try:
            return self.count()
        except MeasurementError:
            if not self.autocast.enabled:
                raise
            count = replace(self, autocast=AutocastState()).count()
            return replace(count, by_dtype={}, notes=(*count.notes, WITHOUT_AUTOCAST))

    def count(self) -> FlopCount:
        """Count the step's FLOPs, with `keep_whole` only where the result depends on it, because it takes longer."""
        if self.attention == "causal" or device_type_of(self.model, self.autocast) != "cpu":
            return replace(self, keep_whole=True)._counted()
        try:
            return self._counted()
        except MeasurementError as error:
            # The message names FlexAttention, or its op flex_attention, if the model needs its backward pass, which the
            # CPU does not have.
            if "flexattention" not in str(error).lower().replace("_", ""):
                raise
            return replace(self, keep_whole=True)._counted()

    def _counted(self) -> FlopCount:
        faker, stack, steering = Faker(), ModuleStack(), Steering()
        mode = CountingMode(stack, self.attention, following(faker.execute, steering))
        whole_attention = WholeAttention(mode.add, self.attention) if self.keep_whole else nullcontext()
        autocast = under_autocast(self.autocast, device_type_of(self.model, self.autocast), stand_in=True)
        copies = Copies(faker.tensor, stack)
        # A model that calls `torch.manual_seed` also seeds its own device, though the trace does not use it.
        with undisturbed(parameter.device for parameter in self.model.parameters()), quiet_fakes():
            replica, fake_batch, loss_fn = copies.all_of(self.model, _apart(self.batch), self.loss_fn)
            steering.name(fake_batch)
            # In inference, torch runs an encoder layer as one op, which a function mode (`PythonReads`) would prevent.
            reads = PythonReads(steering) if self.training else nullcontext()
            noticed = python_draws(steering), reads, threads_met(mode.add_threads)
            # `whole_attention` must be the innermost mode, because it inspects its caller's frame.
            with copies.in_place(), failures_named(stack), noticed[0], noticed[1], noticed[2], whole_attention:
                copy_context().run(
                    run_step, replica, *as_call(fake_batch), loss_fn, mode, training=self.training, autocast=autocast
                )
        return _as_count("trace", mode.tally, stack, self.attention, steering)


def _as_count(
    method: Method, tally: Tally, stack: ModuleStack, attention: AttentionConvention, steering: Steering
) -> FlopCount:
    for note in (*stack.notes(), untested_release()):
        tally.note(note)
    return with_steering(tally.as_count(method, attention), steering)


MethodChoice = Literal["auto", "trace", "step", "estimate"]


def count_as_is(
    model: nn.Module,
    batch: Any,
    *,
    method: MethodChoice | Callable[[Any], int],
    attention: AttentionConvention,
    loss_fn: LossFn | None,
    training: bool,
) -> FlopCount:
    """Count the FLOPs of all positions, padding included, under the current autocast state."""
    if callable(method):
        return _count_by_user(method, batch, attention)
    if method not in get_args(MethodChoice):
        choices = ", ".join(map(repr, get_args(MethodChoice)))
        raise InputError(f"method must be one of {choices}, or a function that takes a batch, got {method!r}")
    counters = {"trace": count_by_trace, "step": count_by_step}
    options: dict[str, Any] = {"attention": attention, "loss_fn": loss_fn, "training": training}
    if method == "estimate":
        return count_by_estimate(model, batch, **options)
    if method != "auto":
        return counters[method](model, batch, **options)
    return _count_by_first_that_works(model, batch, options)


def _count_by_first_that_works(model: nn.Module, batch: Any, options: dict[str, Any]) -> FlopCount:
    try:
        check_countable()
    except MeasurementError as error:
        return _estimated(model, batch, str(error), options)
    try:
        traced = count_by_trace(model, batch, **options)
        # A real step can count ops in threads that the model starts, a trace cannot.
        if THREADS not in {op.op for op in traced.uncounted} or step_obstacle(model) is not None:
            return traced
        trace_error = MeasurementError("the model starts threads, and a trace does not see the ops in them")
    except (NeedsOtherRanksError, NotCopyableError) as error:
        return _estimated(model, batch, str(error), options)
    except MeasurementError as error:
        trace_error = error
    cannot_trace = f"the model could not be traced with fake tensors ({trace_error})"
    obstacle = step_obstacle(model)
    if obstacle is not None:
        return _estimated(model, batch, f"{cannot_trace}, and {obstacle}", options)
    try:
        count = count_by_step(model, batch, **options)
    except (NeedsOtherRanksError, NotCopyableError) as error:
        return _estimated(model, batch, f"{cannot_trace}, and {error}", options)
    note = f"counted on one real step, because the model could not be traced with fake tensors: {trace_error}"
    return replace(count, notes=(note, *count.notes))


def _estimated(model: nn.Module, batch: Any, reason: str, options: dict[str, Any]) -> FlopCount:
    count = count_by_estimate(model, batch, **options)
    return replace(count, notes=(f"the FLOPs are estimated, because {reason}", *count.notes))


def _count_by_user(flops_fn: Callable[[Any], int], batch: Any, attention: AttentionConvention) -> FlopCount:
    flops = flops_fn(batch)
    if isinstance(flops, bool) or not isinstance(flops, int | float) or not 0 < flops < float("inf"):
        raise InputError(f"the function given as method must return a positive finite number of FLOPs, got {flops!r}")
    note = "the FLOPs come from the user's function, which does not separate forward and backward"
    return FlopCount(int(flops), int(flops), 0, 0, 0, method="flops_fn", attention=attention, notes=(note,))
