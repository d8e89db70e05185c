"""The optimizers of the process, and which of them ends a step of the training."""

import gc
import weakref
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

_MOST_STEPS_WITHOUT_END = 100
"""If the optimizer that ends steps pauses for so many steps of another one, the other one ends steps from then on."""


class Optimizers:
    """Knows the optimizers of the process, and which of them ends a step.

    Attributes:
        has_changed: Whether an optimizer is new since somebody has set this to False.
    """

    def __init__(self) -> None:
        self._known: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._last: weakref.ref[Optimizer] | None = None
        self._stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._steps_of_others = 0
        self._are_several: bool | None = None
        self.has_changed = False

    @property
    def last(self) -> Optimizer | None:
        """The optimizer whose step ends a step of the training."""
        return None if self._last is None else self._last()

    def is_new(self, optimizer: Optimizer) -> bool:
        if optimizer in self._known:
            return False
        self._known.add(optimizer)
        return True

    def parameters(self) -> list[torch.Tensor]:
        return [p for optimizer in self._stepped for group in optimizer.param_groups for p in group["params"]]

    def stepped(self, optimizer: Optimizer) -> bool | None:
        """Whether this step of an optimizer ends a step; None if that is not known before it steps again."""
        is_first, last = optimizer not in self._stepped, self.last
        self._stepped.add(optimizer)
        if is_first:
            self.has_changed = True
            self._last, self._steps_of_others = weakref.ref(optimizer), 0
            if self._are_several is None:
                self._are_several = exists(Optimizer, more_than=1)
            return None if self._are_several and (last is not None or len(self._stepped) == 1) else True
        if optimizer is not last:
            self._steps_of_others += 1
            if last is not None and self._steps_of_others < _MOST_STEPS_WITHOUT_END:
                return False
            self._last = weakref.ref(optimizer)
        self._steps_of_others = 0
        return True


def exists(kind: type, more_than: int = 0) -> bool:
    """Whether the process has objects of a class, or more than so many."""
    # `isinstance` would read `__class__`, which runs code in objects that load something on first use.
    found = [each for each in gc.get_objects() if issubclass(type(each), kind)]
    # Accelerate wraps an optimizer in another one.
    return sum(not isinstance(getattr(each, "__dict__", {}).get("optimizer"), kind) for each in found) > more_than


def has_optimizer() -> bool:
    """Whether an optimizer was made in this process: torch marks the `step` of its class then."""
    kinds: list[Any] = [Optimizer]
    while kinds:
        kind = kinds.pop()
        if getattr(kind.step, "hooked", False):
            return True
        kinds += kind.__subclasses__()
    return False
