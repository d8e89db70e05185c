"""One training step on a stand-in of the model: forward, loss, backward, and nothing left behind."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import _engine_run_backward

from flopwatch.errors import FlopwatchError, InputError, MeasurementError, UntraceableError
from flopwatch.flops.autocast import no_autocast
from flopwatch.flops.counter import CountingMode
from flopwatch.flops.losses import LossFn as LossFn
from flopwatch.flops.losses import step_loss
from flopwatch.flops.replica import ModuleStack

CHECKPOINTING_IN_EVAL_MODE = (
    "the model is in eval mode, where its gradient checkpointing is off, and is counted so; "
    "call model.train() first if your training does"
)


def run_step(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss_fn: LossFn | None,
    mode: CountingMode,
    *,
    training: bool,
    autocast: AbstractContextManager[None],
) -> None:
    """Run the step under the counting mode; `training=False` runs the forward pass only, in eval mode.

    A training step runs in the mode that the modules' own flags say: some models are trained in eval mode. Forward pass
    and loss run under the user's autocast, the backward pass outside of it.
    """
    with no_autocast():
        if not training:
            with torch.no_grad(), autocast, mode:
                model.eval()(*args, **kwargs)
            return
        _tell_of_eval_mode(model, mode)
        with torch.enable_grad(), mode:
            with autocast:
                loss, told = step_loss(model(*args, **kwargs), loss_fn)
            mode.tally.note(told)
            if not loss.requires_grad:
                raise InputError(
                    "the loss does not depend on any parameter that requires a gradient; "
                    "unfreeze one, or pass training=False to count the forward pass"
                )
            mode.in_backward = True
            _backward(loss)


def _tell_of_eval_mode(model: nn.Module, mode: CountingMode) -> None:
    modules = list(model.modules())
    in_training = any(module.training for module in modules)
    if not in_training and any(getattr(module, "gradient_checkpointing", False) is True for module in modules):
        mode.tally.note(CHECKPOINTING_IN_EVAL_MODE)


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
