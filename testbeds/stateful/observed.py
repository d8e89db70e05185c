"""Everything about a training that its owner could notice, as numbers, texts and hashes."""

import gc
import hashlib
import random
import sys
import threading
import warnings
import weakref
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

forward_calls: Counter[str] = Counter()
"""By the name of the class, how often its `forward` has run; every `forward` of these testbeds counts itself."""


def called(module: Any) -> None:
    """The first line of every `forward`."""
    forward_calls[type(module).__name__] += 1


@dataclass
class Kept:
    """What a loop leaves.

    Attributes:
        modules: What was trained, and copies.
        optimizers: All of them.
        state: Whatever else it has kept: queues, counters, what hooks have seen.
    """

    modules: list[nn.Module]
    optimizers: list[Any]
    state: Mapping[str, Any] = field(default_factory=dict)


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]


def describe(value: Any) -> Any:
    """Its content as plain values; a tensor or an array is its type, its shape and a hash."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.Tensor):
        return _describe_tensor(value)
    if isinstance(value, np.ndarray):
        return ["ndarray", list(value.shape), digest(value.tobytes())]
    if isinstance(value, Mapping):
        return {str(name): describe(one) for name, one in value.items()}
    if isinstance(value, list | tuple | deque):
        return [describe(one) for one in value]
    if isinstance(value, bytes | bytearray):
        return digest(bytes(value))
    return str(value)


def _describe_tensor(tensor: torch.Tensor) -> Any:
    kind = type(tensor).__name__
    if kind == "FakeTensor":
        return [kind, list(tensor.shape)]
    with torch.no_grad():
        plain = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach()
        content = bytes(plain.contiguous().cpu().reshape(-1).view(torch.uint8).numpy()) if plain.numel() else b""
    return [kind, list(tensor.shape), digest(content)]


def weights_of(modules: list[nn.Module]) -> list[Any]:
    """Parameters, buffers and gradients, also those that are not saved."""
    found: list[Any] = []
    for module in modules:
        for kind in (module.named_parameters, module.named_buffers):
            found += [[name, describe(tensor), describe(tensor.grad)] for name, tensor in kind()]
    return found


def attributes_of(modules: list[nn.Module]) -> list[Any]:
    """Names and types of all that hangs on each module."""
    return [
        [name, *(f"{key} {type(value).__name__}" for key, value in sorted(vars(module).items()))]
        for name, module in _all_modules(modules)
    ]


def hooks_of(modules: list[nn.Module]) -> list[Any]:
    """How many hooks each module has, of every kind."""
    return [
        [name, *(f"{key} {len(value)}" for key, value in sorted(vars(module).items()) if "_hooks" in key and value)]
        for name, module in _all_modules(modules)
    ]


def _all_modules(modules: list[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    for module in modules:
        yield from module.named_modules()


def random_states() -> dict[str, str]:
    numpy_state: Any = np.random.get_state()
    return {
        "random": digest(repr(random.getstate()).encode()),
        "numpy": digest(numpy_state[1].tobytes() + repr(numpy_state[2:]).encode()),
        "torch": digest(bytes(torch.get_rng_state().numpy())),
    }


def settings() -> dict[str, str]:
    """Of the process and of torch."""
    values = {
        "gradients": torch.is_grad_enabled(),
        "dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "anomaly": torch.is_anomaly_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "torch modes": torch._C._len_torch_dispatch_stack(),
        "garbage collection": (gc.isenabled(), gc.get_threshold()),
        "recursion": sys.getrecursionlimit(),
        "trace": (sys.gettrace(), threading.gettrace(), sys.getprofile()),
        "warnings": len(warnings.filters),
        "numpy errors": np.geterr(),
    }
    return {name: str(value) for name, value in values.items()}


def live_tensors() -> dict[str, int]:
    """By class, the tensors that the garbage collector knows."""
    kinds = (type(one) for one in gc.get_objects())
    return dict(sorted(Counter(kind.__name__ for kind in kinds if issubclass(kind, torch.Tensor)).items()))


def references(kept: Kept) -> list[weakref.ref[Any]]:
    """To its modules, parameters and optimizers."""
    parameters = [parameter for module in kept.modules for parameter in module.parameters()]
    return [weakref.ref(one) for one in (*kept.modules, *kept.optimizers, *parameters)]
