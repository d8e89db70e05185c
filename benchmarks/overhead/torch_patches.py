"""What a tool changes in torch itself, taken back while others have their turn."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

_PLACES: tuple[Any, ...] = (torch, functional, torch.Tensor, nn.Module, torch.optim.Optimizer, DataLoader)

Patches = dict[tuple[int, str], Any]


class TorchPatches:
    """Compares torch with the torch of its making."""

    def __init__(self) -> None:
        self._clean = _functions()

    def found(self) -> Patches:
        """The functions that are other ones now."""
        now = _functions()
        return {key: value for key, value in now.items() if key in self._clean and value is not self._clean[key]}

    def names(self) -> list[str]:
        return [f"{_PLACES[place].__name__}.{name}" for place, name in self.found()]

    @contextmanager
    def taken_back(self) -> Iterator[None]:
        patches = self.found()
        _set({key: self._clean[key] for key in patches})
        try:
            yield
        finally:
            _set(patches)


def _functions() -> Patches:
    return {
        (place, name): value
        for place, owner in enumerate(_PLACES)
        for name, value in vars(owner).items()
        if callable(value)
    }


def _set(functions: Patches) -> None:
    for (place, name), value in functions.items():
        setattr(_PLACES[place], name, value)
