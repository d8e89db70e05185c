"""Finds the layers of a model that have equal structure: the same classes, tensors and settings.

Equal layers may differ only in their own index (`layer_idx` and the like). In the copy of the model that is traced, the
index is replaced by an integer that notices when code calculates or decides with it, because then layers of equal
structure may compute different things.
"""

import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from flopwatch.library_internals import CACHES, OUTPUT_CAPTURING
from flopwatch.torch_internals import FakeTensor, module_tables, own_buffers, own_modules, own_parameters

FEWEST_EQUAL = 6
"""In a smaller group of equal layers, all layers run. Four always run, so skipping the rest would save little."""
# Real tensors with more elements than this count as different, because tracing a layer is faster than comparing them.
_MOST_VALUES_COMPARED = 2**22
_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_PLAIN_TYPES = {type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size}
# PEFT's setting with an adapter's path in the model. It differs between layers, but is not read when the adapter runs.
_PATH_IN_PEFT = "target_name"
# Dicts in transformers' configs whose integer keys are class ids, not layer indices.
_NAMES_OF_CLASSES = {"id2label"}

_Position = tuple[str, ...]
_Facts = dict[_Position, Any]


@dataclass(eq=False)
class Kind:
    """A group of layers of equal structure.

    Attributes:
        index_positions: Where the layers keep their own index.
        evidence: A description of the first and the last layer, which shows whether the model has changed.
        obstacle: Why these layers cannot be replayed (counted without running); empty if no reason was found.
    """

    paths: tuple[str, ...]
    modules: list[nn.Module]
    index_positions: set[_Position]
    evidence: Any
    obstacle: str = ""


def equal_layers(replica: nn.Module) -> list[Kind]:
    """Return all groups of equal layers. Containers inside a container of repeated layers are not searched."""
    return [kind for path, container in _containers(replica, "", set()) for kind in _kinds(path, container)]


def found_again(replica: nn.Module, known: Iterable[Kind]) -> list[Kind] | None:
    """Return the groups of layers `known`, with the modules of the copy `replica`; None if the model has changed."""
    kinds = []
    for each in known:
        modules = [replica.get_submodule(path) for path in each.paths]
        if _evidence(modules) != each.evidence:
            return None
        kinds.append(Kind(each.paths, modules, each.index_positions, each.evidence))
    for kind in kinds:
        _watch_indices(kind)
    return kinds


def _evidence(modules: list[nn.Module]) -> Any:
    entries = _EntriesPerLayer(len(modules))
    return [(_Description(module).facts, entries.all_near(module)) for module in (modules[0], modules[-1])]


def _containers(module: nn.Module, path: str, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    if id(module) in seen:
        return
    seen.add(id(module))
    children = {name: child for name, child in own_modules(module).items() if child is not None}
    if isinstance(module, _CONTAINERS) and _may_repeat(list(children.values())):
        yield path, module
        return
    for name, child in children.items():
        yield from _containers(child, f"{path}.{name}".lstrip("."), seen)


def _may_repeat(children: list[nn.Module]) -> bool:
    """Return whether `FEWEST_EQUAL` or more children of one class have own children, and no child is listed twice."""
    # Replaying a module without children, which is a single op, would save nothing.
    classes = Counter(type(child) for child in children if own_modules(child))
    return len(set(map(id, children))) == len(children) and max(classes.values(), default=0) >= FEWEST_EQUAL


def _kinds(path: str, container: nn.Module) -> list[Kind]:
    layers = {name: child for name, child in own_modules(container).items() if child is not None}
    modules = list(layers.values())
    facts = [_Description(module).facts for module in modules]
    index_positions = _index_positions(facts)
    entries = _EntriesPerLayer(len(modules))
    members: dict[Any, list[int]] = {}
    for number, own in enumerate(facts):
        offsets = {own[position][1] - number for position in index_positions if position in own} | {0}
        per_layer = entries.of(modules[number], {number + offset for offset in offsets})
        rest = frozenset(item for item in own.items() if item[0] not in index_positions)
        members.setdefault((rest, per_layer), []).append(number)
    names = list(layers)
    kinds = []
    for (rest, _), numbers in members.items():
        if len(numbers) >= FEWEST_EQUAL and not any(value == "hook" for _, value in rest):
            paths = tuple(f"{path}.{names[number]}".lstrip(".") for number in numbers)
            members_found = [modules[number] for number in numbers]
            kinds.append(Kind(paths, members_found, index_positions, _evidence(members_found)))
    for kind in kinds:
        _watch_indices(kind)
    return kinds


class _Description:
    """Everything that decides what a layer computes (classes, tensors, settings, hooks), by position in the layer."""

    def __init__(self, layer: nn.Module) -> None:
        self.facts: _Facts = {}
        modules = dict(layer.named_modules())
        self._paths = {id(module): path for path, module in modules.items()}
        for path, module in modules.items():
            self._add(module, path)

    def _add(self, module: nn.Module, path: str) -> None:
        self.facts[path, "class"] = type(module)
        state = module_tables().state
        for name, child in own_modules(module).items():
            self.facts[path, "child", name] = None if child is None else self._paths[id(child)]
        for name, tensor in (*own_parameters(module).items(), *own_buffers(module).items()):
            self.facts[path, "tensor", name] = self._value(tensor)
        for name, value in module.__dict__.items():
            if name == "kwargs" and type(module).__module__.startswith("peft."):
                value = {key: item for key, item in value.items() if key != _PATH_IN_PEFT}
            if name not in state:
                self.facts[path, "setting", name] = self._value(value)
        if has_hooks([module]):
            self.facts[path, "hooks"] = "hook"

    def _value(self, value: Any) -> Any:
        """Return a value that is equal for equal settings; an object that cannot be compared only equals itself."""
        if type(value) in _PLAIN_TYPES or isinstance(value, Enum | type):
            return type(value), value
        if isinstance(value, torch.Tensor):
            return _tensor_facts(value)
        if isinstance(value, nn.Module):
            return "module", self._paths.get(id(value), id(value))
        if isinstance(value, MethodType):
            return "method", value.__func__, self._value(value.__self__)
        if isinstance(value, functools.partial):
            return "partial", self._value(value.func), self._value(value.args), self._value(value.keywords)
        if isinstance(value, FunctionType) and value.__closure__:
            return self._closure(value)
        if type(value) in (list, tuple, set, frozenset):
            items = [self._value(item) for item in value]
            return type(value), frozenset(items) if isinstance(value, set | frozenset) else tuple(items)
        if isinstance(value, dict):
            return type(value), tuple((self._value(key), self._value(item)) for key, item in value.items())
        return "object", id(value)

    def _closure(self, function: FunctionType) -> Any:
        try:
            cells = tuple(self._value(cell.cell_contents) for cell in function.__closure__ or ())
        except (ValueError, RecursionError):  # an empty cell, or a function that refers to itself
            return "object", id(function)
        return "function", function.__code__, cells, self._value(function.__defaults__)


def _tensor_facts(tensor: torch.Tensor) -> Any:
    facts = (tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad, type(tensor))
    if isinstance(tensor, FakeTensor):
        return facts
    if tensor.numel() > _MOST_VALUES_COMPARED:
        return *facts, id(tensor)
    return *facts, tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()


def has_hooks(modules: Iterable[nn.Module]) -> bool:
    """Return whether a call of one of these modules runs a hook."""
    names = (*module_tables().running_hooks, *module_tables().hook_options[:2])
    tables = (module.__dict__.get(name) for module in modules for name in names)
    return any(not _is_idle(hook) for table in tables if table for hook in table.values())


def _is_idle(hook: Any) -> bool:
    """Return whether this is transformers' hook for hidden states, which only acts if they are requested.

    `layer_calls.call_key` checks whether hidden states are requested.
    """
    return getattr(hook, "__module__", "") == OUTPUT_CAPTURING


def _index_positions(facts: list[_Facts]) -> set[_Position]:
    """Return the positions of settings that hold a layer's index in its container, or that index plus a constant."""
    numbers: dict[_Position, list[int | None]] = {}
    for place, own in enumerate(facts):
        for position, value in own.items():
            if position[1] == "setting":
                is_number = isinstance(value, tuple) and value[0] is int
                numbers.setdefault(position, []).append(value[1] - place if is_number else None)
    return {
        position
        for position, offsets in numbers.items()
        # At least three layers are required, because in two a setting may look like an index by coincidence.
        if len(offsets) >= 3 and offsets[0] is not None and len(set(offsets)) == 1
    }


class _EntriesPerLayer:
    """Finds lists with one entry per layer, such as `config.layer_types`, in the objects that a layer holds.

    Entries of different layers are compared, because `WatchedIndex` cannot notice its use as an index of a list.
    """

    def __init__(self, layer_count: int) -> None:
        self._layer_count = layer_count
        self._known: dict[int, list[Any]] = {}

    def of(self, layer: nn.Module, indices: set[int]) -> tuple[str, ...]:
        """Return the entries at `indices` of each list in `layer` that has one entry per layer."""
        return tuple(repr([_entry(entries, index) for index in sorted(indices)]) for entries in self._near(layer))

    def all_near(self, layer: nn.Module) -> str:
        """Return all lists in `layer` that have one entry per layer, as one string."""
        return repr(list(self._near(layer)))

    def _near(self, layer: nn.Module) -> Iterator[Any]:
        holders = {
            id(value): value
            for module in layer.modules()
            for value in module.__dict__.values()
            if type(value) not in _PLAIN_TYPES and not isinstance(value, nn.Module | torch.Tensor)
        }
        for holder in holders.values():
            yield from self._lists_in(holder)

    def _lists_in(self, holder: Any) -> list[Any]:
        if id(holder) not in self._known:
            named = getattr(holder, "__dict__", {})
            is_list = isinstance(holder, list | tuple | dict)
            candidates = [holder] if is_list else [named[name] for name in sorted(named.keys() - _NAMES_OF_CLASSES)]
            self._known[id(holder)] = [value for value in candidates if self._may_be_per_layer(value)]
        return self._known[id(holder)]

    def _may_be_per_layer(self, value: Any) -> bool:
        if isinstance(value, dict):
            return any(isinstance(key, int) for key in value)
        return isinstance(value, list | tuple) and len(value) >= self._layer_count


def _entry(entries: Any, index: int) -> Any:
    if isinstance(entries, dict):
        return entries.get(index)
    return entries[index] if 0 <= index < len(entries) else None


def _watch_indices(kind: Kind) -> None:
    def used() -> None:
        kind.obstacle = "the layer's code calculates with the layer's index"

    for layer in kind.modules:
        for path, _, name in kind.index_positions:
            try:
                settings = layer.get_submodule(path).__dict__
            except AttributeError:  # this layer has no module at this path
                continue
            if name in settings:
                settings[name] = index = WatchedIndex(settings[name])
                index.used = used


class WatchedIndex(int):
    """A layer's index that calls `used` when code calculates or decides with it."""

    used: Callable[[], None]


def _noticed(name: str) -> Callable[..., Any]:
    plain = getattr(int, name)

    def method(self: WatchedIndex, *args: Any) -> Any:
        if sys._getframe(1).f_globals.get("__name__") != CACHES:
            self.used()
        return plain(self, *args)

    return method


_NOTICED = (
    "eq ne lt le gt ge add radd sub rsub mul rmul mod rmod floordiv rfloordiv truediv rtruediv divmod rdivmod pow rpow "
    "and rand or ror xor rxor lshift rlshift rshift rrshift neg pos abs invert bool int float str repr format"
)
# Python looks operators up on the class, so each one needs a method there.
for _name in _NOTICED.split():
    setattr(WatchedIndex, f"__{_name}__", _noticed(f"__{_name}__"))
# A hash does not call `used`, because using an index as the key of a dict is a lookup and not a calculation.
WatchedIndex.__hash__ = int.__hash__  # type: ignore[method-assign]
