"""Finds the modules that an optimizer trains."""

import gc
from collections.abc import Iterable

import torch
from torch import nn

from flopwatch.torch_internals.autograd import compiled_original
from flopwatch.torch_internals.modules import compiled_call


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
