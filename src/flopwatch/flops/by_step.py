"""Count one real step: for models that fake tensors cannot follow.

It runs on a stand-in that shares the live parameters' storage, so the live gradients, buffers and hooks are not
touched, but forward and backward really run and need their memory.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from flopwatch.errors import InputError
from flopwatch.flops.autocast import AutocastState, current_autocast, device_type_of, under_autocast
from flopwatch.flops.batches import as_call
from flopwatch.flops.counter import CountingMode
from flopwatch.flops.elsewhere import threads_followed, triton_launches_noticed
from flopwatch.flops.event_log import EventLog
from flopwatch.flops.losses import LossFn
from flopwatch.flops.passes import failures_named, run_step
from flopwatch.flops.replica import ModuleStack, own_generator, replicate
from flopwatch.flops.steering import PythonReads, Steering, following, python_draws, steered
from flopwatch.flops.structure import map_tensors
from flopwatch.flops.undisturbed import undisturbed
from flopwatch.records import AttentionConvention, FlopCount


def count_by_step(
    model: nn.Module,
    batch: Any,
    *,
    attention: AttentionConvention,
    loss_fn: LossFn | None,
    training: bool,
    autocast: AutocastState | None = None,
) -> FlopCount:
    """Raise InputError where one process cannot run the step, MeasurementError where it fails.

    `autocast` is the state to run the model under; None takes the one of here and now.
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
        log.tell(mode.tally)
    for told in stack.told():
        mode.tally.note(told)
    return steered(mode.tally.as_count("step", attention), steering, mode.risky_ops)


def step_obstacle(model: nn.Module) -> str | None:
    """Why a real step cannot be run in this process, or None."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device.type == "meta":
            return "the model is on the meta device and has no weights to run a step with"
        if hasattr(tensor, "full_tensor"):  # a DTensor
            return "its parameters are spread over ranks (DTensor), so one rank alone cannot run a step"
    return None


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """Parameters are only read and share storage; buffers (batch norm's statistics) are written to, so copied."""
    return tensor.detach() if isinstance(tensor, nn.Parameter) else tensor.detach().clone()


class _GradientKeeper:
    """Puts back the gradients of parameters that the stand-in does not know of (a module hidden in a closure)."""

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
    """The batch with every tensor copied; one that asks for a gradient goes on asking. Generators are copied too."""

    def copied(path: str, tensor: torch.Tensor) -> torch.Tensor:
        return copy(tensor).requires_grad_(tensor.requires_grad)

    return map_tensors(batch, copied, own_generator)
