"""Counts the FLOPs of one batch, padding included, by a trace with fake tensors, a real step or an estimate.

A trace runs the model's own code on fake tensors, which have shapes but no values, so it needs neither weights nor a
device. Models that need values are counted on a real step, which runs on a stand-in: a copy of the module tree
that shares the live parameters' storage. The live model's gradients, buffers and hooks stay untouched, but forward and
backward really run and need their memory.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args
from weakref import WeakKeyDictionary

import torch
from torch import nn

from flopwatch.errors import InputError, MeasurementError
from flopwatch.flops.batch_contents import as_call, map_tensors
from flopwatch.flops.by_estimate import count_by_estimate
from flopwatch.flops.formulas.attention import WholeAttention
from flopwatch.flops.steering import PythonReads, Steering, following, python_draws, with_steering
from flopwatch.flops.tracing.counter import THREADS, CountingMode, NeedsOtherRanksError
from flopwatch.flops.tracing.fakes import Faker, quiet_fakes
from flopwatch.flops.tracing.passes import (
    AutocastState,
    LossFn,
    current_autocast,
    device_type_of,
    failures_named,
    run_step,
    threads_followed,
    threads_noticed,
    triton_launches_noticed,
    under_autocast,
)
from flopwatch.flops.tracing.replay import Replay, ReplayMemory, ReplayRefusedError
from flopwatch.flops.tracing.replica import ModuleStack, own_generator, replicate, undisturbed
from flopwatch.flops.tracing.tally import EventLog, Tally
from flopwatch.records.flops import AttentionConvention, FlopCount, Method
from flopwatch.torch_internals import check_schemas, knows_nodes, what_is_missing


def count_by_step(
    model: nn.Module,
    batch: Any,
    *,
    attention: AttentionConvention,
    loss_fn: LossFn | None,
    training: bool,
    autocast: AutocastState | None = None,
) -> FlopCount:
    """Count the FLOPs of a real step. Raises InputError if one process cannot run it, MeasurementError if it fails.

    `autocast` is the autocast state that the model runs under; None means the current one.
    """
    obstacle = step_obstacle(model)
    if obstacle:
        raise InputError(f"{obstacle}; use method='trace'")
    state = current_autocast() if autocast is None else autocast
    under = under_autocast(state, device_type_of(model, state), stand_in=False)
    stack, keeper, steering = ModuleStack(), _GradientKeeper(), Steering()
    execute = following(keeper.execute, steering)
    mode, in_threads = CountingMode(stack, attention, execute), list[EventLog]()

    def modes_of_thread() -> tuple[Any, ...]:
        in_threads.append(EventLog())
        own = CountingMode(stack, attention, execute, in_threads[-1])
        return (PythonReads(steering), own) if training else (own,)

    with undisturbed(parameter.device for parameter in model.parameters()), keeper:
        replica = replicate(model, _alias, stack)
        own_batch = copied_batch(batch, lambda tensor: tensor.detach().clone())
        steering.name_weights((*replica.parameters(), *replica.buffers()))
        steering.name_batch(own_batch)
        noticed = threads_followed(modes_of_thread, mode.add_threads), triton_launches_noticed(mode.add_triton_kernel)
        reads = PythonReads(steering) if training else nullcontext()
        with failures_named(stack), python_draws(steering), reads, noticed[0], noticed[1]:
            run_step(replica, *as_call(own_batch), loss_fn, mode, training=training, autocast=under)
    for log in in_threads:
        log.add_to(mode.tally)
    return _as_count("step", mode.tally, stack, mode, attention, steering)


def step_obstacle(model: nn.Module) -> str | None:
    """Return why a real step cannot run in this process; None if it can."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device.type == "meta":
            return "the model is on the meta device, so it has no weights to run a step with"
        if hasattr(tensor, "full_tensor"):  # a DTensor
            return "the model's parameters are spread over ranks (DTensor), so one rank alone cannot run a step"
    return None


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a parameter, which the step only reads, or a copy of a buffer, which the step may write to."""
    return tensor.detach() if isinstance(tensor, nn.Parameter) else tensor.detach().clone()


class _GradientKeeper:
    """Restores `grad` of the user's own parameters, because the model's copy may reach them through a closure."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}

    def execute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for value in args:
            if isinstance(value, nn.Parameter):
                gradient = value.grad
                self._kept.setdefault(id(value), (value, None if gradient is None else gradient.clone()))
        return func(*args, **kwargs)

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        for parameter, gradient in self._kept.values():
            parameter.grad = gradient


def copied_batch(batch: Any, copy: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return the batch with copies of all its tensors and random generators; `requires_grad` is kept."""

    def copied(path: str, tensor: torch.Tensor) -> torch.Tensor:
        return copy(tensor).requires_grad_(tensor.requires_grad)

    return map_tensors(batch, copied, own_generator)


WITHOUT_AUTOCAST = "the model could not be traced under autocast, so the compute types of its products are not known"

# The keys are weak references, so that a counted model can be freed.
_memories: "WeakKeyDictionary[nn.Module, ReplayMemory]" = WeakKeyDictionary()


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """In the block, traces reuse what earlier traces found about the model, so the caller must not change the model."""
    with _memories.setdefault(model, ReplayMemory()).unchanged():
        yield


def count_by_trace(
    model: nn.Module,
    batch: Any,
    *,
    attention: AttentionConvention,
    loss_fn: LossFn | None,
    training: bool,
    autocast: AutocastState | None = None,
    replay: bool = True,
    memory: ReplayMemory | None = None,
) -> FlopCount:
    """Count the FLOPs of a step on fake tensors. Raises UntraceableError if the model needs the values of tensors.

    `autocast` is the autocast state that the model runs under; None means the current one. With `replay`, only a few of
    the layers with equal structure run, which gives the same count. `memory` holds what earlier traces have proven
    about the layers; None uses the memory kept for this model.
    """
    state = current_autocast() if autocast is None else autocast
    memory = memory or _memories.setdefault(model, ReplayMemory())
    trace = _Trace(model, batch, state, attention, loss_fn, training, memory)
    try:
        return trace.count(replay=replay)
    except MeasurementError:
        if not state.enabled:
            raise
        # A trace runs under the CPU's autocast, which may keep an op in fp32 that an accelerator runs in bf16. If
        # the model fails because another op gets tensors of both types, a trace without autocast may work.
        count = replace(trace, autocast=AutocastState()).count(replay=replay)
        return replace(count, by_dtype={}, notes=(*count.notes, WITHOUT_AUTOCAST))


@dataclass(frozen=True)
class _Trace:
    model: nn.Module
    batch: Any
    autocast: AutocastState
    attention: AttentionConvention
    loss_fn: LossFn | None
    training: bool
    memory: ReplayMemory
    keep_whole: bool = False
    """Whether to count attention as one op where torch would decompose it; this takes longer."""

    def count(self, *, replay: bool) -> FlopCount:
        """Count the step's FLOPs, with `keep_whole` only where the result depends on it, because it takes longer."""
        if self.attention == "causal" or device_type_of(self.model, self.autocast) != "cpu":
            return replace(self, keep_whole=True)._counted(replay=replay)
        try:
            return self._counted(replay=replay)
        except MeasurementError as error:
            # The message names FlexAttention, or its op flex_attention, if the model needs its backward pass, which the
            # CPU does not have.
            if "flexattention" not in str(error).lower().replace("_", ""):
                raise
            return replace(self, keep_whole=True)._counted(replay=replay)

    def _counted(self, *, replay: bool) -> FlopCount:
        can_replay = replay and not self.memory.is_refused and knows_nodes()
        return self._with_replay() if can_replay else self._in_full()

    def _in_full(self) -> FlopCount:
        faker, stack, steering = Faker(), ModuleStack(), Steering()
        mode = CountingMode(stack, self.attention, following(faker.execute, steering))
        self._run(faker, stack, mode, steering, lambda _: None)
        return _as_count("trace", mode.tally, stack, mode, self.attention, steering)

    def _with_replay(self) -> FlopCount:
        faker, stack, steering = Faker(), ModuleStack(), Steering()
        replay = Replay(faker, self.memory)
        execute = replay.watch(following(faker.execute, steering))
        mode = CountingMode(stack, self.attention, execute, replay.log)
        try:
            self._run(faker, stack, mode, steering, replay.attach)
            return _as_count("trace", replay.tally(), stack, mode, self.attention, steering)
        except Exception as error:
            # Replaying layers instead of running them may have caused the failure, so all layers are run now.
            if replay.failed_like_the_model(error, in_backward=mode.in_backward):
                raise
            self.memory.is_refused = isinstance(error, ReplayRefusedError)
            return self._in_full()

    def _run(
        self,
        faker: Faker,
        stack: ModuleStack,
        mode: CountingMode,
        steering: Steering,
        prepare: Callable[[nn.Module], None],
    ) -> None:
        whole_attention = WholeAttention(mode.add, self.attention) if self.keep_whole else nullcontext()
        autocast = under_autocast(self.autocast, device_type_of(self.model, self.autocast), stand_in=True)
        with undisturbed(), quiet_fakes():
            replica = replicate(self.model, faker.tensor, stack)
            prepare(replica)
            fake_batch = copied_batch(self.batch, faker.tensor)
            steering.name_batch(fake_batch)
            # In inference, torch runs an encoder layer as one op, which a function mode (`PythonReads`) would prevent.
            reads = PythonReads(steering) if self.training else nullcontext()
            noticed = python_draws(steering), reads, threads_noticed(mode.add_threads)
            # `whole_attention` must be the innermost mode, because it inspects its caller's frame.
            with failures_named(stack), noticed[0], noticed[1], noticed[2], whole_attention:
                run_step(replica, *as_call(fake_batch), self.loss_fn, mode, training=self.training, autocast=autocast)


def _as_count(
    method: Method,
    tally: Tally,
    stack: ModuleStack,
    mode: CountingMode,
    attention: AttentionConvention,
    steering: Steering,
) -> FlopCount:
    for note in (*stack.notes(), *what_is_missing()):
        tally.note(note)
    return with_steering(tally.as_count(method, attention), steering, mode.risky_ops)


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
    """Count the FLOPs of all positions, padding included; `autocast=None` means the current autocast state."""
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
        return counters[method](model, batch, autocast=autocast, **options)
    return _count_by_first_that_works(model, batch, autocast, **options)


def _count_by_first_that_works(
    model: nn.Module, batch: Any, autocast: AutocastState | None, **options: Any
) -> FlopCount:
    try:
        check_schemas()
    except MeasurementError as error:
        return _estimated(model, batch, str(error), options)
    try:
        traced = count_by_trace(model, batch, autocast=autocast, **options)
        # A real step can count ops in threads that the model starts, a trace cannot.
        if THREADS not in {op.op for op in traced.uncounted} or step_obstacle(model) is not None:
            return traced
        trace_error = MeasurementError("the model starts threads, and a trace does not see the ops in them")
    except NeedsOtherRanksError as error:
        return _estimated(model, batch, str(error), options)
    except MeasurementError as error:
        trace_error = error
    cannot_trace = f"the model could not be traced with fake tensors ({trace_error})"
    obstacle = step_obstacle(model)
    if obstacle is not None:
        return _estimated(model, batch, f"{cannot_trace}, and {obstacle}", options)
    try:
        count = count_by_step(model, batch, autocast=autocast, **options)
    except NeedsOtherRanksError as error:
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
