"""What a process trains: its optimizers, the modules that own their parameters, and the calls of a compiled module."""

import gc
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from flopwatch.torch_internals.autograd import compiled_original
from flopwatch.torch_internals.modules import compiled_call

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
                self._are_several = _are_several()
            return None if self._are_several and (last is not None or len(self._stepped) == 1) else True
        if optimizer is not last:
            self._steps_of_others += 1
            if last is not None and self._steps_of_others < _MOST_STEPS_WITHOUT_END:
                return False
            self._last = weakref.ref(optimizer)
        self._steps_of_others = 0
        return True


def _are_several() -> bool:
    """Whether the process has several optimizers; an earlier one may only wait for the garbage collector."""
    return exists(Optimizer, more_than=1) and gc.collect() >= 0 and exists(Optimizer, more_than=1)


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


def find_trained_modules(parameters: Iterable[torch.Tensor]) -> list[nn.Module]:
    """The modules that own these parameters and may be called in a training step, the likeliest first.

    If some modules contain all of the parameters (a model, and what wraps it), these are returned, the outermost first.
    Otherwise the outermost modules with a part of the parameters are returned, those with most of them first.

    >>> inner = nn.Linear(2, 2)
    >>> outer = nn.Sequential(inner)
    >>> [type(module).__name__ for module in find_trained_modules(inner.parameters())]
    ['Sequential', 'Linear']
    """
    wanted = {id(parameter) for parameter in parameters}
    # `isinstance` would read `__class__`, which runs code in objects that load something on first use.
    modules = [each for each in gc.get_objects() if issubclass(type(each), nn.Module) and "_modules" in each.__dict__]
    owners = [m for m in modules if any(id(p) in wanted for p in m.parameters(recurse=False))]
    ancestors = _with_ancestors(owners, modules)
    owned = {id(m): sum(id(p) in wanted for p in m.parameters()) for m in ancestors}
    found = len({id(p) for m in owners for p in m.parameters(recurse=False)} & wanted)
    sizes = {id(m): sum(1 for _ in m.modules()) for m in ancestors}
    whole = [m for m in ancestors if owned[id(m)] == found]
    if whole:
        return _until_compiled(sorted(whole, key=lambda m: -sizes[id(m)]))
    inside = {id(child) for m in ancestors for child in m.children()}
    outermost = [m for m in ancestors if id(m) not in inside]
    return sorted(outermost, key=lambda m: -owned[id(m)])


def _with_ancestors(owners: list[nn.Module], modules: list[nn.Module]) -> list[nn.Module]:
    parents: dict[int, list[nn.Module]] = {}
    for module in modules:
        for child in module.children():
            parents.setdefault(id(child), []).append(module)
    found: dict[int, nn.Module] = {}
    waiting = list(owners)
    while waiting:
        module = waiting.pop()
        if id(module) not in found:
            found[id(module)] = module
            waiting += parents.get(id(module), [])
    return list(found.values())


def _until_compiled(modules: list[nn.Module]) -> list[nn.Module]:
    """Leave out what is inside a compiled module, because a hook there would become part of the compiled code."""
    for number, module in enumerate(modules):
        if compiled_call(module) is not None or compiled_original(module) is not None:
            return modules[: number + 1]
    return modules


# The calls of a model that was compiled in place (`model.compile()`). The compiler traces the hooks of such a model. A
# hook that only appends to a list stays outside the compiled graph, and the compiled code appends in every call. A hook
# that reads a clock or calls the monitor would run once, in the tracing.

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
