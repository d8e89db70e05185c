"""Runs one training step (forward, loss, backward) on a copy of the model, under the user's autocast.

This module also notices threads that the model starts, whose ops a dispatch mode does not see.
"""

import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import fields, is_dataclass
from functools import cache
from types import FrameType
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode

from flopwatch.errors import FlopwatchError, InputError, MeasurementError, UntraceableError
from flopwatch.flops.tracing.counter import CountingMode
from flopwatch.flops.tracing.replica import ModuleStack
from flopwatch.records.flops import AttentionConvention
from flopwatch.text import first_line
from flopwatch.torch_internals.ops import needs_values

LossFn = Callable[[Any], torch.Tensor]
MethodChoice = Literal["auto", "trace", "step", "estimate"]


class CountOptions(NamedTuple):
    """How a step is counted; `count_flops` says what each option means."""

    attention: AttentionConvention = "full"
    loss_fn: LossFn | None = None
    training: bool = True
    method: MethodChoice | Callable[[Any], int] = "auto"


def step_loss(output: Any, loss_fn: LossFn | None) -> tuple[torch.Tensor, str | None]:
    parts = {"loss_fn": loss_fn(output)} if loss_fn else _losses_among(output)
    for loss in parts.values():
        if not isinstance(loss, torch.Tensor):
            given = type(loss).__name__
            raise InputError(f"the loss must be a tensor, got {given}; let loss_fn return a scalar tensor")
    # A sum may replace the real loss: gradients have the same shapes with any loss, so the backward FLOPs are equal.
    scalars = [loss if loss.dim() == 0 else loss.sum() for loss in parts.values()]
    total = scalars[0]
    for loss in scalars[1:]:
        total = total + loss.to(total.dtype)
    note = (
        f"the loss is taken to be the sum of the model's outputs {', '.join(parts)}; "
        "pass loss_fn=lambda output: ... if your training minimises something else"
    )
    return total, note if len(parts) > 1 else None


def _losses_among(output: Any) -> dict[str, Any]:
    """Return the outputs to use as the loss: scalars that need a gradient and are not part of another loss."""
    if isinstance(output, torch.Tensor):
        return {"output": output}
    items: dict[str, Any] = {"loss": getattr(output, "loss", None)}
    if isinstance(output, Mapping):
        items = {str(name): value for name, value in output.items()}
    elif isinstance(output, tuple | list):
        items = {f"output[{index}]": value for index, value in enumerate(output)}
    elif is_dataclass(output):
        items = {field.name: getattr(output, field.name, None) for field in fields(output)}
    named = items.get("loss")
    scalars = {name: value for name, value in items.items() if _is_trainable(value) and value.dim() == 0}
    if _is_trainable(named):
        scalars["loss"] = named
    if scalars:
        return _outermost(scalars)
    first = items.get("output[0]")
    if named is None and isinstance(first, torch.Tensor) and first.numel() == 1:
        named = first
    trainable = {name: value for name, value in items.items() if _is_trainable(value)}
    if named is None and trainable:
        return trainable  # the training computes its loss from these outputs
    if named is None:
        raise InputError(
            f"the model returned {type(output).__name__} without a loss; put labels into the batch, "
            "or pass loss_fn=lambda output: ... that returns the scalar your training minimises"
        )
    return {"loss": named}


def _is_trainable(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _outermost(losses: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Leave out losses that another loss depends on, because the backward pass of the other one includes them."""
    seen: set[Any] = {None}  # None is the `grad_fn` of an output that is a parameter, not a loss
    waiting: list[Any] = [loss.grad_fn for loss in losses.values()]
    while waiting:
        below = {each for each, _ in getattr(waiting.pop(), "next_functions", ())} - seen
        seen |= below
        waiting += below
    kept: dict[str, torch.Tensor] = {}
    for name, loss in losses.items():
        if loss.grad_fn not in seen:
            kept[name] = loss
            seen.add(loss.grad_fn)
    return kept or losses


# The autocast state of a tensor's device decides the type that a matmul runs in. A trace runs on CPU tensors, so it
# copies the autocast state of the model's device to the CPU: at the start, and whenever the model's code changes it.
_DEVICE_TYPES = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "xla")


AutocastState = tuple[tuple[str, torch.dtype], ...]


def current_autocast() -> AutocastState:
    """Return the autocast state of this thread.

    >>> with torch.autocast("cpu", torch.bfloat16):
    ...     current_autocast()
    (('cpu', torch.bfloat16),)
    """
    enabled = filter(torch.is_autocast_enabled, _types_with_autocast())
    return tuple((device, torch.get_autocast_dtype(device)) for device in enabled)


@cache
def _types_with_autocast() -> tuple[str, ...]:
    return tuple(filter(torch.amp.is_autocast_available, _DEVICE_TYPES))


@contextmanager
def no_autocast() -> Iterator[None]:
    """Switch autocast off for all devices in the block, because torch requires this for a backward pass."""
    with ExitStack() as stack:
        for device, dtype in current_autocast():
            stack.callback(_set, device, dtype)
            _set(device, None)
        yield


@contextmanager
def under_autocast(state: AutocastState, device_type: str, *, stand_in: bool) -> Iterator[None]:
    """Set the training's autocast state in the block; `stand_in` if CPU tensors replace those of the model's device."""
    with ExitStack() as stack:
        for device in dict.fromkeys((*dict(state), device_type, "cpu")):
            if torch.amp.is_autocast_available(device):
                stack.callback(_set, device, _dtype_now(device), torch.get_autocast_dtype(device))
                _set(device, dict(state).get(device))
        if stand_in and device_type != "cpu":
            _carry_over(device_type)
            stack.enter_context(_CarriedOver(device_type))
        yield


def device_type_of(model: nn.Module, state: AutocastState) -> str:
    types = {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} - {"meta"}
    accelerators = sorted(types - {"cpu"})
    if accelerators:
        return accelerators[0]
    return "cpu" if types or not state else state[-1][0]


class _CarriedOver(TorchFunctionMode):
    """Before every torch function, copies the autocast state of the model's device to the CPU."""

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        _carry_over(self._device_type)
        return func(*args, **(kwargs or {}))


def _carry_over(device_type: str) -> None:
    if torch.amp.is_autocast_available(device_type):
        _set("cpu", _dtype_now(device_type))


def _dtype_now(device_type: str) -> torch.dtype | None:
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


def _set(device_type: str, dtype: torch.dtype | None, default: torch.dtype | None = None) -> None:
    torch.set_autocast_enabled(device_type, dtype is not None)
    chosen = dtype or default
    if chosen is not None:
        torch.set_autocast_dtype(device_type, chosen)


@contextmanager
def threads_met(report: Callable[[], None]) -> Iterator[None]:
    """Call `report` for each thread that starts in the block, because a dispatch mode only works in its own thread.

    Each new thread calls the function given to `threading.setprofile`. Ours removes itself at its first call.
    """
    before: Any = threading.getprofile()

    def on_start(frame: FrameType, event: str, argument: Any) -> None:
        sys.setprofile(before)
        # A thread of the monitor, such as the one that connects the ranks, was not started by the model.
        if not threading.current_thread().name.startswith("flopwatch-"):
            report()

    threading.setprofile(on_start)
    try:
        yield
    finally:
        threading.setprofile(before)


CHECKPOINTING_IN_EVAL_MODE = (
    "the model is in eval mode, which switches its gradient checkpointing off, so no recomputation is counted; "
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

    A training step keeps each module's `training` flag, because some models are trained in eval mode. Forward pass and
    loss run under the user's autocast, the backward pass outside of it.
    """
    with no_autocast():
        if not training:
            with torch.no_grad(), autocast, mode, _generators_closed():
                model.eval()(*args, **kwargs)
            return
        modules = list(model.modules())
        checkpoints = any(getattr(module, "gradient_checkpointing", False) is True for module in modules)
        if checkpoints and not any(module.training for module in modules):
            mode.tally.note(CHECKPOINTING_IN_EVAL_MODE)
        with torch.enable_grad(), mode:
            with autocast, _generators_closed():
                loss, note = step_loss(model(*args, **kwargs), loss_fn)
            mode.tally.note(note)
            if not loss.requires_grad:
                raise InputError(
                    "the loss does not depend on any parameter that requires a gradient; "
                    "unfreeze a parameter, or pass training=False to count the forward pass"
                )
            # Torch would leave the function modes if it were given a tensor, but recomputation must run under them. It
            # stays in them for the edge of the graph that the tensor stands for.
            with _generators_closed():
                torch.autograd.backward((get_gradient_edge(loss),), (torch.ones_like(loss),))


@contextmanager
def _generators_closed() -> Iterator[None]:
    """If the block raises, close what its frames left open.

    Up to torch 2.12, `checkpoint` enters its hooks and dispatch modes in a generator, which its frame refers to. The
    error's traceback would keep both alive, and the training's next step would run with these hooks and modes.
    """
    handled_by_caller = sys.exc_info()[1]
    try:
        yield
    finally:
        link = sys.exc_info()[1]
        while link is not None and link is not handled_by_caller:
            traceback.clear_frames(link.__traceback__)
            link = link.__cause__ or link.__context__


@contextmanager
def failures_named(stack: ModuleStack) -> Iterator[None]:
    """Turn exceptions of the model's code into our errors, which name the module that failed according to `stack`."""
    try:
        yield
    except FlopwatchError:
        raise
    except Exception as error:  # code of the user
        what = first_line(error)
        where = f"module {stack.failed_in!r}" if stack.failed_in else "the model itself"
        if needs_values(error):
            raise UntraceableError(f"{where} needs the value of an activation ({what})") from error
        raise MeasurementError(f"the model's step raised {type(error).__name__} in {where}: {what}") from error
