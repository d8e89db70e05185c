"""The user's autocast, on the stand-in.

What a matmul runs in is decided by the autocast state of its device. A trace runs on CPU stand-ins, for which only the
state of the CPU counts; so the state of the model's own device is carried over, as it was where the model was called,
and again whenever the model's own code changes it.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

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
