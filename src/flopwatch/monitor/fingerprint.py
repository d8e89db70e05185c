"""Whether a model has changed in a way that may change what it costs; looked at once per logging window."""

from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

_PLAIN = (bool, int, float, str)
_MOST_ITEMS = 64
_STATE = {"_parameters", "_buffers", "_modules", "_compiled_call_impl", "_non_persistent_buffers_set"}


def fingerprint(model: nn.Module) -> int:
    """Changes with parameters, what requires a gradient, and settings of any module."""
    return hash((structure_of(model, with_trained=True), tuple(settings_of(model).items())))


def structure_of(model: nn.Module, *, with_trained: bool) -> int:
    """Changes with the modules and their parameters: about a microsecond per parameter."""
    parameters = tuple(
        (name, tuple(p.shape), p.dtype, p.requires_grad if with_trained else None, len(p._backward_hooks or ()))
        for name, p in model.named_parameters()
    )
    return hash((parameters, tuple(type(module) for module in model.modules())))


def settings_of(model: nn.Module) -> dict[tuple[str, str], Any]:
    """Attributes of all modules that may steer them: flags, a depth that a curriculum raises, functions, hooks."""
    seen: dict[int, Any] = {}
    found: dict[tuple[str, str], Any] = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            continue  # its own flags change from step to step, and steer communication only
        for name, value in module.__dict__.items():
            if type(value) in _PLAIN:
                found[path, name] = value
            elif name not in _STATE and value is not None:
                found[path, name] = _told(value, seen)
    return found


def _told(value: Any, seen: dict[int, Any], depth: int = 2) -> Any:
    """A value that can be compared later; None for tensors, modules and whatever says nothing of itself.

    A configuration is shared by all layers, so what was looked at once is not looked at again.
    """
    if type(value) in _PLAIN:
        return value
    if id(value) in seen:
        return seen[id(value)]
    told: Any = None
    if isinstance(value, FunctionType | MethodType):
        told = id(getattr(value, "__func__", value))
    elif isinstance(value, torch.Tensor | nn.Module) or not depth:
        return None
    elif isinstance(value, dict):
        told = tuple((str(key), _told(item, seen, depth - 1)) for key, item in list(value.items())[:_MOST_ITEMS])
    elif isinstance(value, list | tuple):
        told = len(value), tuple(_told(item, seen, depth - 1) for item in value[:_MOST_ITEMS])
    elif isinstance(held := getattr(value, "__dict__", None), dict):
        told = _told(held, seen, depth)
    seen[id(value)] = told
    return told
