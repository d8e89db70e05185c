"""Count one real step: for models that fake tensors cannot follow.

It runs on a stand-in that shares the live parameters' storage, so the live gradients, buffers and hooks are not
touched, but forward and backward really run and need their memory.
"""

from typing import Any

import torch
from torch import nn

from flopwatch.errors import InputError
from flopwatch.flops.counter import CountingMode
from flopwatch.flops.passes import LossFn, copied_batch, failures_named, run_step
from flopwatch.flops.replica import ModuleStack, replicate
from flopwatch.flops.undisturbed import undisturbed
from flopwatch.records import AttentionConvention, FlopCount


def count_by_step(
    model: nn.Module, batch: Any, *, attention: AttentionConvention, loss_fn: LossFn | None, training: bool
) -> FlopCount:
    """Raise InputError where one process cannot run the step, MeasurementError where it fails."""
    obstacle = step_obstacle(model)
    if obstacle:
        raise InputError(f"{obstacle}; use method='trace'")
    stack = ModuleStack()
    keeper = _GradientKeeper()
    mode = CountingMode(stack, attention, keeper.execute)
    with undisturbed(parameter.device for parameter in model.parameters()), keeper:
        replica = replicate(model, _alias, stack)
        own_batch = copied_batch(batch, lambda tensor: tensor.detach().clone())
        with failures_named(stack):
            run_step(replica, own_batch, loss_fn, mode, training=training)
    return mode.tally.as_count("step", attention)


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
