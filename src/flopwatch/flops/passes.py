"""One training step on a stand-in of the model: forward, loss, backward, and nothing left behind."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import _engine_run_backward
from torch.utils._pytree import tree_map

from flopwatch.errors import FlopwatchError, InputError, MeasurementError, UntraceableError
from flopwatch.flops.counter import CountingMode
from flopwatch.flops.replica import ModuleStack, own_generator

LossFn = Callable[[Any], torch.Tensor]


def run_step(model: nn.Module, batch: Any, loss_fn: LossFn | None, mode: CountingMode, *, training: bool) -> None:
    """Run the step under the counting mode; `training=False` runs the forward pass only."""
    args, kwargs = as_call(batch)
    if not training:
        with torch.no_grad(), mode:
            model.eval()(*args, **kwargs)
        return
    if not model.training:
        model.train()
    with torch.enable_grad(), mode:
        loss = _loss(model(*args, **kwargs), loss_fn)
        if not loss.requires_grad:
            raise InputError(
                "the loss does not depend on any parameter that requires a gradient; "
                "unfreeze one, or pass training=False to count the forward pass"
            )
        mode.in_backward = True
        _backward(loss)


def _backward(loss: torch.Tensor) -> None:
    """Do what `loss.backward()` does, but keep function modes on: recomputation must see them."""
    gradient = torch.ones_like(loss)
    _engine_run_backward((loss,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True)


@contextmanager
def failures_named(stack: ModuleStack, needs_values: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Turn what the model's code raises into our errors, with the module it came from.

    Args:
        stack: Knows the module.
        needs_values: The errors of fake tensors that were asked for a value.
    """
    try:
        yield
    except FlopwatchError:
        raise
    except Exception as error:
        what = (str(error).strip() or type(error).__name__).splitlines()[0]
        where = f"module {stack.failed_in!r}" if stack.failed_in else "the model itself"
        if isinstance(error, needs_values):
            raise UntraceableError(f"{where} needs the value of an activation ({what})") from error
        raise MeasurementError(f"the model's step raised {type(error).__name__} in {where}: {what}") from error


def copied_batch(batch: Any, copy: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The batch with every tensor copied; one that asks for a gradient goes on asking. Generators are copied too."""

    def copied(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return copy(value).requires_grad_(value.requires_grad)
        return own_generator(value)

    return tree_map(copied, batch)


def as_call(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A batch is keyword arguments, positional arguments or the one argument of the model."""
    if isinstance(batch, Mapping):
        if not all(isinstance(name, str) for name in batch):
            raise InputError(f"a batch given as a dict needs argument names as keys, got {list(batch)[:5]}")
        return (), dict(batch)
    if isinstance(batch, tuple | list):
        return tuple(batch), {}
    return (batch,), {}


def _loss(output: Any, loss_fn: LossFn | None) -> torch.Tensor:
    loss = loss_fn(output) if loss_fn else _loss_of_output(output)
    if not isinstance(loss, torch.Tensor):
        raise InputError(f"the loss must be a tensor, got {type(loss).__name__}; let loss_fn return a scalar tensor")
    # Any differentiable loss sends a gradient of the output's shape; which one does not change the count.
    return loss if loss.numel() == 1 else loss.sum()


def _loss_of_output(output: Any) -> Any:
    if isinstance(output, torch.Tensor):
        return output
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(output, tuple) and output and isinstance(output[0], torch.Tensor) and output[0].numel() == 1:
        loss = output[0]  # (loss, logits), as transformers returns without return_dict
    if loss is None:
        raise InputError(
            f"the model returned {type(output).__name__} without a loss; put labels into the batch, "
            "or pass loss_fn=lambda output: ... that returns the scalar your training minimises"
        )
    return loss
