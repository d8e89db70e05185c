"""One training step on a stand-in of the model: forward, loss, backward, and nothing left behind."""

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, fields, is_dataclass
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from flopwatch.errors import FlopwatchError, InputError, MeasurementError, UntraceableError
from flopwatch.flops.tracing.counter import CountingMode
from flopwatch.flops.tracing.replica import ModuleStack
from flopwatch.torch_internals import engine_run_backward

# Which of a model's outputs a training minimises.


LossFn = Callable[[Any], torch.Tensor]


def step_loss(output: Any, loss_fn: LossFn | None) -> tuple[torch.Tensor, str | None]:
    """The loss of a step as a scalar, and what a reader must know of how it was chosen."""
    parts = {"loss_fn": loss_fn(output)} if loss_fn else _losses_among(output)
    for loss in parts.values():
        if not isinstance(loss, torch.Tensor):
            given = type(loss).__name__
            raise InputError(f"the loss must be a tensor, got {given}; let loss_fn return a scalar tensor")
    # Any differentiable loss sends a gradient of the output's shape; which one does not change the count.
    scalars = [loss if loss.dim() == 0 else loss.sum() for loss in parts.values()]
    total = scalars[0]
    for loss in scalars[1:]:
        total = total + loss.to(total.dtype)
    return total, _told(list(parts)) if len(parts) > 1 else None


def _told(names: list[str]) -> str:
    return (
        f"the loss is taken to be the sum of what the model returns as {', '.join(names)}; "
        "pass loss_fn=lambda output: ... if your training minimises something else"
    )


def _losses_among(output: Any) -> dict[str, Any]:
    """The scalars that can be trained on, without those that another of them is made of."""
    if isinstance(output, torch.Tensor):
        return {"output": output}
    items = dict(_items(output))
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
        return trainable  # the training makes a loss of them itself
    if named is None:
        raise InputError(
            f"the model returned {type(output).__name__} without a loss; put labels into the batch, "
            "or pass loss_fn=lambda output: ... that returns the scalar your training minimises"
        )
    return {"loss": named}


def _items(output: Any) -> Iterator[tuple[str, Any]]:
    """What lies at the top of an output, by name."""
    if isinstance(output, Mapping):
        yield from ((str(name), value) for name, value in output.items())
    elif isinstance(output, tuple | list):
        yield from ((f"output[{index}]", value) for index, value in enumerate(output))
    elif is_dataclass(output):
        yield from ((field.name, getattr(output, field.name, None)) for field in fields(output))
    else:
        yield "loss", getattr(output, "loss", None)


def _is_trainable(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _outermost(losses: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Leave out parts of a sum: a loss that another one depends on runs backward with it anyway."""
    if len(losses) == 1:
        return losses
    seen: set[Any] = {None}  # a parameter of one number has no graph
    for loss in losses.values():
        seen |= _nodes_below(loss.grad_fn)
    kept: dict[str, torch.Tensor] = {}
    for name, loss in losses.items():
        if loss.grad_fn not in seen:
            kept[name] = loss
            seen.add(loss.grad_fn)
    return kept or losses


def _nodes_below(node: Any) -> set[Any]:
    """All nodes of the graph that a node leads to, without itself."""
    found: set[Any] = set()
    waiting = [node]
    while waiting:
        current = waiting.pop()
        nodes = (following for following, _ in getattr(current, "next_functions", ()))
        new = [following for following in nodes if following is not None and following not in found]
        found.update(new)
        waiting += new
    return found


# The user's autocast, on the stand-in.
#
# What a matmul runs in is decided by the autocast state of its device. A trace runs on CPU stand-ins, for which only
# the state of the CPU counts; so the state of the model's own device is carried over, as it was where the model was
# called, and again whenever the model's own code changes it.


_DEVICE_TYPES = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "xla")


@dataclass(frozen=True, slots=True)
class AutocastState:
    """Where autocast is on, and in which type: pairs of a device type and a dtype."""

    enabled: tuple[tuple[str, torch.dtype], ...] = ()

    def dtype(self, device_type: str) -> torch.dtype | None:
        """The type for one device type; None where autocast is off."""
        return dict(self.enabled).get(device_type)


def current_autocast() -> AutocastState:
    """Autocast as it is here and now.

    >>> with torch.autocast("cpu", torch.bfloat16):
    ...     current_autocast().dtype("cpu")
    torch.bfloat16
    """
    types = (device for device in _DEVICE_TYPES if torch.amp.is_autocast_available(device))
    return AutocastState(
        tuple((device, torch.get_autocast_dtype(device)) for device in types if torch.is_autocast_enabled(device))
    )


@contextmanager
def no_autocast() -> Iterator[None]:
    """Autocast off everywhere, and as it was afterwards. A backward pass runs outside of autocast, as torch asks."""
    with ExitStack() as stack:
        for device, dtype in current_autocast().enabled:
            stack.callback(_set, device, dtype)
            _set(device, None)
        yield


@contextmanager
def under_autocast(state: AutocastState, device_type: str, *, stand_in: bool) -> Iterator[None]:
    """Run the model under a state that was taken where the user calls it.

    Args:
        state: The user's.
        device_type: Of the live model.
        stand_in: Whether the model runs on CPU stand-ins of that device's tensors.
    """
    with ExitStack() as stack:
        for device in dict.fromkeys((*(name for name, _ in state.enabled), device_type, "cpu")):
            if torch.amp.is_autocast_available(device):
                stack.callback(_set, device, _dtype_now(device), torch.get_autocast_dtype(device))
                _set(device, state.dtype(device))
        if stand_in and device_type != "cpu":
            _carry_over(device_type)
            stack.enter_context(_CarriedOver(device_type))
        yield


def device_type_of(model: nn.Module, state: AutocastState) -> str:
    """The device the model runs on; of a model on the meta device, the one that autocast is on for."""
    types = {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} - {"meta"}
    accelerators = sorted(types - {"cpu"})
    if accelerators:
        return accelerators[0]
    return "cpu" if types or not state.enabled else state.enabled[-1][0]


class _CarriedOver(TorchFunctionMode):
    """Before every function of torch, the CPU's autocast is made that of the model's device."""

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


# Work of a step that a dispatch mode cannot see: threads that the model starts, Triton kernels launched directly.


Tell = Callable[[], None]


@contextmanager
def threads_noticed(tell: Tell) -> Iterator[None]:
    """Call `tell` for each thread that is started meanwhile; a dispatch mode is in force in its own thread only.

    Threads started by `threading` ask for a profile function when they begin: ours puts itself out of the way at once.
    """
    before: Any = threading.getprofile()

    def on_start(frame: FrameType, event: str, argument: Any) -> None:
        sys.setprofile(before)
        tell()

    threading.setprofile(on_start)
    try:
        yield
    finally:
        threading.setprofile(before)


@contextmanager
def threads_followed(modes: Callable[[], Sequence[Any]], tell: Tell) -> Iterator[None]:
    """Put modes on in each thread that is started meanwhile; call `tell` for one that has not ended in the end.

    A mode leaves its thread before the thread ends, or at the first call of a function after the count: a thread that
    is kept for later must not run the training's own work under it.
    """
    before: Any = threading.getprofile()
    under_way: set[_Followed] = set()
    is_over = threading.Event()

    def on_start(frame: FrameType, event: str, argument: Any) -> None:
        _Followed(modes(), frame, under_way, is_over, before).enter()

    threading.setprofile(on_start)
    try:
        yield
    finally:
        threading.setprofile(before)
        is_over.set()
        for _ in list(under_way):
            tell()


class _Followed:
    """The modes in one thread, from its first frame on."""

    def __init__(
        self, modes: Sequence[Any], first: FrameType, under_way: "set[_Followed]", is_over: threading.Event, before: Any
    ) -> None:
        self._modes, self._first, self._before = modes, first, before
        self._under_way, self._is_over = under_way, is_over

    def enter(self) -> None:
        self._under_way.add(self)
        for mode in self._modes:
            mode.__enter__()
        sys.setprofile(self._look)

    def _look(self, frame: FrameType, event: str, argument: Any) -> None:
        is_left = self._is_over.is_set() and not _is_inside_mode(frame)
        if is_left or (event == "return" and frame is self._first):
            sys.setprofile(self._before)
            for mode in reversed(self._modes):
                mode.__exit__(None, None, None)
            self._under_way.discard(self)


def _is_inside_mode(frame: FrameType | None) -> bool:
    """Whether an op is on its way through a mode, which is then not where it was put."""
    while frame is not None:
        if frame.f_code.co_name in ("__torch_dispatch__", "__torch_function__"):
            return True
        frame = frame.f_back
    return False


@contextmanager
def triton_launches_noticed(tell: Tell) -> Iterator[None]:
    """Call `tell` for each Triton kernel launched meanwhile, by the hook that Triton has for profilers."""
    knobs = getattr(sys.modules.get("triton"), "knobs", None)
    chain: Any = getattr(getattr(knobs, "runtime", None), "launch_enter_hook", None)
    if not hasattr(chain, "add") or not hasattr(chain, "remove"):  # no Triton, or one before its hooks were chains
        yield
        return

    def on_launch(*_: Any, **__: Any) -> None:
        tell()

    chain.add(on_launch)
    try:
        yield
    finally:
        chain.remove(on_launch)


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
    engine_run_backward((loss,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True)


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
