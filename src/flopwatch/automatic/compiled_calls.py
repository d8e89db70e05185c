"""Records the calls of a model that was compiled in place (`model.compile()`).

The compiler traces the hooks of such a model. A hook that only appends to a list stays outside the compiled graph, and
the compiled code appends in every call. A hook that reads a clock or calls the monitor would run once, in the tracing.
"""

from typing import Any

import torch
from torch import nn

Call = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]

_calls: list[Call] = []
"""Module and arguments of each call with gradients since the last optimizer step."""


def note_call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A forward pre-hook. It must stay a plain function, and do no more than this."""
    if torch.is_grad_enabled():  # the batches of an evaluation would stay in memory until the next step
        _calls.append((module, args, kwargs))


def take_calls(module: nn.Module) -> list[Call]:
    """The calls of this module with gradients since the last time; they are forgotten."""
    calls = [call for call in _calls if call[0] is module]
    _calls.clear()
    return calls
