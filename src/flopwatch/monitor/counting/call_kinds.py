"""Finds the kind of a module's call: all that its FLOPs depend on, without reading values of tensors.

`Evaluations` tells evaluations between two steps from calls that belong to the next step: calls without gradients of
modules in evaluation mode that come only now and then are an evaluation. Those that come with every step, such as a
teacher's, are part of it.
"""

import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter
from types import MemberDescriptorType
from typing import Any

import torch
from torch import Tensor, is_grad_enabled, nn

from flopwatch.flops.formulas.free_ops import is_inside_autocast
from flopwatch.flops.tracing.passes import current_autocast
from flopwatch.flops.tracing.regions import Region
from flopwatch.monitor.timing.hooks import plain_iterator
from flopwatch.torch_internals.modules import transform_level, whole_shape
from flopwatch.torch_internals.ops import stored_count

_MOST_KINDS, _MOST_ITEMS = 4096, 512
_DEEPEST = 4
COMPILED, BATCH = "compiled code", "batch"


@dataclass(frozen=True, eq=False, slots=True)
class CallKind:
    """A kind of call: all outermost calls of one module whose arguments have equal types and sizes.

    Attributes:
        family: What is equal for calls that differ in sizes only.
        sizes: All dimensions of all tensors among the arguments.
        module: A number for the module.
        name: The class of the module.
        has_grad: Whether autograd records the call.
        is_training: The module's `training` flag.
        has_parameters: Whether the module has parameters; a loss has none.
        numbers: Whole and floating numbers among the arguments.
    """

    family: Hashable
    sizes: tuple[int, ...]
    module: int
    name: str
    has_grad: bool
    is_training: bool
    has_parameters: bool = True
    numbers: tuple[float, ...] = ()


class CallKinds:
    """The kinds of the calls so far.

    Attributes:
        reads_numbers: Whether calls that differ in a number among their arguments are of different kinds. Most numbers
            (an index, a step) change nothing, so it is False until counts of equal calls differ.
    """

    def __init__(self) -> None:
        self.reads_numbers = False
        self._known: dict[Any, CallKind] = {}

    def of_call(
        self, place: "KindOfLast", module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> CallKind:
        """The kind of a call. Most calls of a module are of the kind of its last one, which is compared first."""
        numbers: list[float] = []
        shape_of = _shape if transform_level() is None else whole_shape
        facts: list[Any] = [is_grad_enabled(), module.training, current_autocast() if is_inside_autocast() else None]
        for value in args:
            if isinstance(value, Tensor) and not value.is_nested and value.layout is _STRIDED:
                # Not by `_add_facts`, because a function call would take longer.
                facts += shape_of(value), value.dtype, value.requires_grad
            else:
                _add_facts(value, facts, numbers, shape_of, _DEEPEST)
        if kwargs:
            for name, value in kwargs.items():
                facts.append(name)
                _add_facts(value, facts, numbers, shape_of, _DEEPEST)
        key = [*facts, *numbers] if numbers and self.reads_numbers else facts
        if place.kind is not None and key == place.key:
            return place.kind
        kind = self._known.get((place.number, *key))
        if kind is None:
            structure, sizes = _divided(facts)
            family = (place.number, *structure, *key[len(facts) :])
            name, has_parameters = type(module).__name__, next(nn.Module.parameters(module), None) is not None
            kind = CallKind(family, sizes, place.number, name, facts[0], facts[1], has_parameters, tuple(numbers))
            self._keep((place.number, *key), kind)
        place.key, place.kind = key, kind
        return kind

    def of_region(self, region: Region, args: tuple[Any, ...]) -> CallKind:
        sizes, has_grad, weight = region.sizes(args), is_grad_enabled(), region.weight(args)
        model = -1 - region.number if weight is None else id(weight)
        key = COMPILED, region.number, has_grad, model, sizes
        # The module's mode is not seen. A call without gradients may be an evaluation, so it counts as evaluation mode.
        return self._known.get(key) or self._keep(
            key, CallKind(key[:3], sizes, model, COMPILED, has_grad, has_grad, weight is not None)
        )

    def of_batch(self, batch: Any) -> CallKind:
        """The kind of a batch that was passed to the monitor, as if it were a call."""
        facts: list[Any] = []
        _add_facts(batch, facts, [], _shape, _DEEPEST)
        key = BATCH, *facts
        structure, sizes = _divided(facts)
        return self._known.get(key) or self._keep(
            key, CallKind((BATCH, *structure), sizes, -1, BATCH, has_grad=False, is_training=True, has_parameters=False)
        )

    def _keep(self, key: Any, kind: CallKind) -> CallKind:
        if len(self._known) >= _MOST_KINDS:
            self._known.clear()
        self._known[key] = kind
        return kind


class KindOfLast:
    """The kind of one module's last call; `number` identifies the module."""

    def __init__(self) -> None:
        self.number = next(_numbers)
        self.key: list[Any] = []
        self.kind: CallKind | None = None


_numbers = itertools.count()
_shape, _STRIDED = attrgetter("shape"), torch.strided


def _divided(facts: list[Any]) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """What stays equal when only sizes differ, and the sizes."""
    structure = tuple(len(fact) if isinstance(fact, torch.Size) else fact for fact in facts)
    return structure, tuple(size for fact in facts if isinstance(fact, torch.Size) for size in fact)


def _add_facts(  # noqa: C901 - one case for each kind of argument
    value: Any, facts: list[Any], numbers: list[float], shape_of: Callable[[Tensor], torch.Size], depth: int
) -> None:
    """Add what the cost of a call depends on in this argument; texts and the values of numbers are left out."""
    kind = type(value)
    if isinstance(value, Tensor):
        if value.is_nested or value.layout is not _STRIDED:
            facts += kind, value.dtype, str(value.layout), _stored(value)
        else:
            facts += shape_of(value), value.dtype, value.requires_grad
    elif value is None or kind is bool:
        facts.append(value)
    elif kind is int or kind is float:
        facts.append(kind)
        numbers.append(value)
    elif isinstance(value, str | bytes | type | nn.Module) or callable(value) or not depth:
        facts.append(kind)
    elif isinstance(value, dict | list | tuple):
        # A class of the user may compute items when they are asked for, so the methods of the plain classes are used.
        size = dict.__len__(value) if isinstance(value, dict) else len(list(plain_iterator(value)))
        facts += kind, size
        if isinstance(value, dict):
            facts += map(str, islice(dict.keys(value), _MOST_ITEMS))
        items = dict.values(value) if isinstance(value, dict) else plain_iterator(value)
        for item in islice(items, _MOST_ITEMS):
            _add_facts(item, facts, numbers, shape_of, depth - 1)
    elif kind.__module__ == "numpy":
        facts += kind, getattr(value, "shape", ())
    else:
        facts.append(kind)
        for item in islice(_held_by(value), _MOST_ITEMS):
            _add_facts(item, facts, numbers, shape_of, depth - 1)


def _held_by(value: Any) -> Iterator[Any]:
    """What an object holds in its attributes and slots, without calling code of its class."""
    yield from getattr(value, "__dict__", {}).values()
    for cls in type(value).__mro__:
        for member in vars(cls).values():
            if isinstance(member, MemberDescriptorType):
                with suppress(AttributeError):  # the slot is empty
                    yield member.__get__(value)


def _stored(value: Tensor) -> Any:
    """How many elements a sparse tensor stores, which decides the FLOPs of its products; of others, their number."""
    try:
        return tuple(value.shape), stored_count(value)
    except (AttributeError, RuntimeError, TypeError):  # a nested tensor has no shape
        return value.numel()


class Evaluations:
    """Remembers which modules are called before steps, and how often.

    Attributes:
        steps: Steps so far. A step with no call before it can be noted by adding 1.
        before: The calls before the step that the loop has opened, as `left_out` takes them.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.before: list[tuple[CallKind, int]] = []
        self._first: dict[int, int] = {}
        self._met: dict[int, int] = {}
        self._trained: set[int] = set()

    def has(self, kind: CallKind, before: Sequence[CallKind]) -> bool:
        """Whether a call is part of an evaluation; `before` are the calls since the last step."""
        if kind.has_grad or any(call.has_grad for call in before):
            return False
        if kind.is_training:  # a loss module stays in training mode, even in an evaluation
            return not kind.has_parameters and any(self._is_irregular(call) for call in before)
        return self._is_irregular(kind)

    def _is_irregular(self, call: CallKind) -> bool:
        return not call.is_training and not self._is_regular(call.module)

    def left_out(self, noted: Sequence[tuple[CallKind, int]]) -> tuple[list[CallKind], int, bool]:
        """Return the calls without evaluations, the operations of the calls left out, and whether any were left out.

        Args:
            noted: The calls since the last step, each with the number of operations that autograd has recorded in it.
        """
        calls = [call for call, _ in noted]
        trained_in_mode = {call.module for call in calls if call.has_grad and call.is_training}
        # If the step also calls a module in training mode, earlier calls of it are an evaluation, even with gradients.
        is_begin = [call.has_grad and (call.is_training or call.module not in trained_in_mode) for call in calls]
        first = is_begin.index(True) if True in is_begin else len(calls)
        before = {call.module for call in calls[:first] if not call.is_training}
        self._note_step(before, {call.module for call in calls[first:] if call.has_grad})
        irregular = {module for module in before if not self._is_regular(module)}
        if irregular:  # a loss module stays in training mode, even in an evaluation
            irregular |= {call.module for call in calls[:first] if not call.has_parameters}
        is_kept = [index >= first or call.module not in irregular for index, call in enumerate(calls)]
        nodes = sum(nodes for (_, nodes), keeps in zip(noted, is_kept, strict=True) if not keeps)
        return [call for call, keeps in zip(calls, is_kept, strict=True) if keeps], nodes, bool(irregular)

    def note_opened(self, calls: Sequence[CallKind]) -> None:
        """Note a step that the loop has opened, with its calls."""
        evaluated = {call.module for call, _ in self.before if not call.has_grad and not call.is_training}
        self._note_step(evaluated, {call.module for call in calls if call.has_grad})

    def _note_step(self, before: set[int], trained: set[int]) -> None:
        self.steps += 1
        self._trained |= trained
        for module in before:
            self._first.setdefault(module, self.steps)
            self._met[module] = self._met.get(module, 0) + 1

    def _is_regular(self, module: int) -> bool:
        first = self._first.get(module)
        if first is None:  # at the first step only, a module that is not trained is taken for a teacher
            return not self.steps and module not in self._trained
        steps = self.steps - first + 1
        if first == 1 and steps == 1:
            return module not in self._trained
        return steps > 1 and 2 * (self._met[module] - 1) >= steps - 1
