"""Turns the ops that torch's profiler has recorded into FLOPs, with the same formulas as a dispatch mode.

The profiler records every op with the ops inside it. An op with a formula is counted as a whole, as a dispatch mode
counts it, and so is an op that is known to be free. A composite op is counted by its parts. An op on nested tensors,
whose shapes the profiler does not record, is counted by its parts as well.
"""

import functools
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from flopwatch.errors import MeasurementError
from flopwatch.flops.formulas.free_ops import costs_nothing
from flopwatch.flops.formulas.registry import Formula, OpCall, OpFlops, find_formula, unbind
from flopwatch.flops.tracing.counter import Phase, Tally, flops_of_call
from flopwatch.flops.tracing.custom_functions import MAY_RUN_AGAIN
from flopwatch.records.flops import AttentionConvention
from flopwatch.torch_internals.ops import OpOverload, OpOverloadPacket, can_decompose, op_schema, python_body

PASS_WITH_GRAPH = (
    "a checkpointed part ran again in a backward pass with create_graph=True, where the profiler cannot distinguish "
    "recomputation from the backward pass, so it counts as needed"
)
MAY_BE_HIDDEN = (
    "a custom autograd function computes more in its backward pass than the gradients of its products need; "
    "what it may compute again counts as needed"
)
FUSED_GRADIENTS = (
    "which gradients of a fused recurrent layer were needed is not recorded, so all of them count as needed"
)
STOPPED_EARLY = (
    "whether the last product of each checkpointed part ran again is not recorded; it counts as not run, because "
    "torch stops there unless set_checkpoint_early_stop(False) is used"
)
_ENGINE = "autograd::engine::evaluate_function"
_SUBCLASS, _MODE = "PythonSubclass", "PythonDispatchMode"
"""Events inside an op that a tensor subclass, or a dispatch mode, runs in Python."""
BEGIN = "flopwatch: a recording begins"
TAKEN = "a profiler of the training started within the step, or the step ended in another thread than it began"
IN_OPTIMIZER = "products without gradients in an optimizer's step may be its own or its closure's; they are counted"
CLOSURE = "flopwatch: an optimizer step with a closure"
_OPTIMIZER = "Optimizer.step#"
UNKNOWN = object()
"""In place of a sparse tensor: how many elements it stores is not recorded."""
_SAVE_INPUTS = frozenset(
    (
        *("aten::_grouped_mm", "aten::addbmm", "aten::addmm", "aten::addmv", "aten::baddbmm", "aten::bmm"),
        *("aten::convolution", "aten::dot", "aten::mm", "aten::mv"),
    )
)
"""Ops that save only inputs for their backward pass, before they run. Checkpointing can stop them at this point."""
_BY_NEED = "aten::mkldnn_rnn_layer_backward"
"""An op whose needed FLOPs depend on which inputs of its forward op need a gradient."""


class _Tensor(NamedTuple):
    sizes: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class _Kind:
    overloads: tuple[Any, ...]
    formula: Formula | None
    is_free: bool
    is_composite: bool


@dataclass(frozen=True, slots=True)
class _Surroundings:
    """Where an event ran; `is_settled` says that it is inside an op or function, whose phase is that of its parts."""

    phase: Phase = "forward"
    is_settled: bool = False
    has_graph: bool = False
    """Whether the backward pass ran with create_graph=True, so that grad mode is on everywhere."""
    in_optimizer: bool = False
    has_closure: bool = False
    function: str = ""
    """The outermost custom autograd function that runs."""
    is_product_of_optimizer: bool = False


def _find_kind(name: str) -> _Kind | None:
    namespace, _, short = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), short, None) if short.isidentifier() else None
    if not isinstance(packet, OpOverloadPacket):
        return None
    overloads, is_composite = [], False
    for overload in (getattr(packet, name) for name in packet.overloads()):
        with suppress(RuntimeError):  # some exist only in TorchScript, and asking about them fails
            is_composite = can_decompose(overload) or python_body(overload) is not None or is_composite
            overloads.append(overload)
    if not overloads:
        return None
    return _Kind(tuple(overloads), find_formula(overloads[0]), any(map(costs_nothing, overloads)), is_composite)


class RecordedOps:
    def __init__(self, attention: AttentionConvention) -> None:
        self.tally = Tally()
        self.optimizer_flops = 0
        self.doubt: str | None = None
        self._attention: AttentionConvention = attention
        self._kind = functools.cache(_find_kind)  # anew for each step, as a formula may have been registered since
        self._prices: dict[tuple[Any, ...], OpFlops | None] = {}
        self._lists: dict[int, list[Any]] = {}
        self._have_parts: set[str] = set()
        self._lack_parts: set[str] = set()
        """Names of ops that were seen to call other ops when they run, and to call none."""
        self._by_function: Counter[tuple[str, Phase]] = Counter()
        self._factors: set[tuple[Any, ...]] = set()
        """The factors of products in the forward passes of custom functions."""
        self._last_again: set[int] = set()
        """The events after which checkpointing may have stopped to run the forward pass again."""

    def add_all(self, recordings: Iterable[Any]) -> None:
        """Count recordings: what a `torch.autograd.profiler.profile` has in `kineto_results` when it is over."""
        for results in recordings:
            self._add(results)
        needed = self._by_function
        functions = {function for function, _ in needed if function}
        # The two gradients of a product take twice as much as the product.
        if any(needed[each, "backward"] > 2 * needed[each, "forward"] for each in functions):
            self.doubt = self.doubt or MAY_BE_HIDDEN

    def _has_formula(self, name: str) -> bool:
        kind = self._kind(name)
        return kind is not None and kind.formula is not None

    def _add(self, results: Any) -> None:
        # The tree of events lacks arguments that are lists of numbers; the flat list of events has them.
        self._lists = {
            event.correlation_id(): event.concrete_inputs()
            for event in results.events()
            if self._has_formula(event.name())
        }
        roots = sorted(results.experimental_event_tree(), key=lambda event: event.start_time_ns)
        if not any(event.name == BEGIN for event in roots):
            raise MeasurementError(TAKEN)
        self._walk(roots, _Surroundings())

    def _walk(self, siblings: list[Any], place: _Surroundings) -> int:
        has_graph, products = None, 0
        for index, event in enumerate(siblings):
            if not event.name.startswith(_ENGINE):
                has_graph = None
                products += self._meet(event, place)
                continue
            if has_graph is None:  # a backward pass begins: its nodes follow each other without other ops
                has_graph = _has_graph(siblings[index:])
            products += self._walk(event.children, _Surroundings("backward", has_graph=has_graph))
        return products

    def _meet(self, event: Any, place: _Surroundings) -> int:
        fields = event.extra_fields
        scope = getattr(getattr(fields, "scope", None), "name", "")
        if scope == "BACKWARD_FUNCTION":
            return self._meet_node(event, place)
        if scope == "USER_SCOPE":
            if event.name.startswith(_OPTIMIZER):
                has_closure = place.has_closure or any(each.name == CLOSURE for each in event.children)
                place = replace(place, in_optimizer=True, has_closure=has_closure)
            return self._walk(event.children, place)
        kind = self._kind(event.name) if scope == "FUNCTION" else None
        if kind is not None and kind.is_free and kind.formula is None:
            return 0
        if not place.is_settled:
            place = _settled(place, fields.sequence_number >= 0 if scope else False)
        if kind is None:  # the forward pass of a custom function
            return self._walk(event.children, replace(place, function=place.function or event.name))
        return self._meet_op(event, kind, place)

    def _meet_node(self, event: Any, place: _Surroundings) -> int:
        if not event.name[-1].isdigit():  # a node that is written in Python
            return self._walk(event.children, replace(place, function=event.name.removesuffix("Backward")))
        if not place.has_graph:
            self._note_last_product(event.children)
        elif _detaches(event.children):  # inside torch's own nodes, only checkpointing does that
            self.doubt = PASS_WITH_GRAPH
        return self._walk(event.children, place)

    def _note_last_product(self, events: list[Any]) -> None:
        """Note the event at which what ran again in a node may have been stopped: the innermost last op."""
        events = [each for each in events if getattr(each.extra_fields, "sequence_number", -1) >= 0]
        while events and not self._has_formula(events[-1].name):
            events = events[-1].children
        self._last_again.update(each.correlation_id for each in events[-1:])

    def _meet_op(self, event: Any, kind: _Kind, place: _Surroundings) -> int:
        inside = next((each for each in event.children if each.name == _SUBCLASS), None)
        if inside is not None:  # a DTensor: the ops on this rank's part are counted
            # It also runs an op on fake tensors, to know the shape of its result.
            own = [each for each in inside.children if not any(part.name == _MODE for part in each.children)]
            return self._walk(own, place)
        if kind.formula is not None:
            if self._was_stopped(event, place):
                return 0
            if self._count(event, kind, place):
                return 1
        products = self._walk(event.children, place)
        if not kind.is_composite and not (products and event.name.startswith("aten::")):
            self.tally.add_uncounted(event.name.removeprefix("aten::"), "")
        return products

    def _was_stopped(self, event: Any, place: _Surroundings) -> bool:
        """Whether checkpointing stopped this op before it ran, because it had all tensors that it needs again.

        The op is recorded, but without the ops that it calls when it runs.
        """
        has_parts = any(each.name != "aten::detach" for each in event.children)
        if has_parts or place.phase == "forward":
            (self._have_parts if has_parts else self._lack_parts).add(event.name)
            return False
        if event.name not in _SAVE_INPUTS or not (place.phase == "recompute" or place.has_graph):
            return False
        if event.name in self._have_parts - self._lack_parts:
            return True
        if place.phase == "recompute" and event.correlation_id in self._last_again:
            self.doubt = self.doubt or STOPPED_EARLY
            return True
        return False

    def _count(self, event: Any, kind: _Kind, place: _Surroundings) -> bool:
        """Count an op as a whole; return False if its formula cannot tell the FLOPs from what is recorded."""
        lists = self._lists.get(event.correlation_id) or []
        inputs = event.extra_fields.inputs
        lists += [None] * (len(inputs) - len(lists))
        arguments = tuple(_frozen(each, other) for each, other in zip(inputs, lists, strict=False))
        key = (event.name, *arguments)
        if key not in self._prices:
            self._prices[key] = None if UNKNOWN in arguments else _price(kind, arguments, self._attention)
        flops = self._prices[key]
        if flops is None:
            return False
        if event.name == _BY_NEED:
            self.doubt = self.doubt or FUSED_GRADIENTS
        if place.is_product_of_optimizer and place.has_closure:
            self.doubt = self.doubt or IN_OPTIMIZER
        elif place.is_product_of_optimizer:
            self.optimizer_flops += flops.needed + flops.extra
            return True
        if place.phase == "recompute" or (place.function and self._runs_again(event, place)):
            flops = replace(flops, needed=0, extra=flops.needed + flops.extra)
        self._by_function[place.function, place.phase] += flops.needed
        self.tally.add(event.name.removeprefix("aten::"), "", place.phase, flops)
        return True

    def _runs_again(self, event: Any, place: _Surroundings) -> bool:
        """Whether a product in a custom function's backward pass is one of a forward pass, as far as addresses tell.

        If only one factor is the same tensor, the other one may have been computed again.
        """
        factors = [(each.storage_data_ptr, *map(tuple, (each.sizes, each.strides))) for each in _tensors(event)]
        sizes = tuple(each[1] for each in factors)
        keys = {(event.name, sizes, index, each) for index, each in enumerate(factors)}
        if place.phase != "backward":
            self._factors |= keys
            return False
        again = keys & self._factors
        if again and again != keys:
            self.doubt = self.doubt or MAY_RUN_AGAIN
        return bool(again)


def _frozen(value: Any, instead: Any) -> Any:
    if hasattr(value, "sizes"):
        return _Tensor(tuple(value.sizes), value.dtype) if value.layout is torch.strided else UNKNOWN
    if isinstance(value, list):
        return tuple(_frozen(each, None) for each in value)
    return value if value is not None else tuple(instead) if isinstance(instead, list) else instead


def _detaches(events: Iterable[Any]) -> bool:
    return any(each.name == "aten::detach" or _detaches(each.children) for each in events)


def _settled(place: _Surroundings, is_grad_on: bool) -> _Surroundings:
    """Return the place of what is inside an outermost op. An op has a sequence number only if grad mode is on.

    Grad mode is off in a backward pass without create_graph=True, so where it is on, a forward pass runs again.
    """
    if place.phase == "backward":
        return replace(place, is_settled=True, phase="recompute" if is_grad_on and not place.has_graph else "backward")
    is_optimizer = place.in_optimizer and not is_grad_on
    return replace(place, is_settled=True, is_product_of_optimizer=is_optimizer)


def _has_graph(events: list[Any]) -> bool:
    """Whether a backward pass runs with create_graph=True, which shows in its first node that runs an op.

    The last op of a node is its own in any case: what checkpointing runs again comes before it. Nodes that are written
    in Python are left out, because they may change grad mode.
    """
    for event in events:
        if not event.name.startswith(_ENGINE):
            return False
        for node in event.children:
            if node.name[-1].isdigit() and node.extra_fields.scope.name == "BACKWARD_FUNCTION":
                numbers = [each.extra_fields.sequence_number for each in node.children if _tensors(each)]
                if numbers:
                    return bool(numbers[-1] >= 0)
    return False


def _tensors(event: Any) -> list[Any]:
    return [each for each in getattr(event.extra_fields, "inputs", ()) if hasattr(each, "sizes")]


def _price(kind: _Kind, arguments: tuple[Any, ...], attention: AttentionConvention) -> OpFlops | None:
    values = [_stand_in(each) for each in arguments]
    func = next((op for op in kind.overloads if _fits(op, values)), None)
    formula = None if func is None else find_formula(func)
    if func is None or formula is None:
        return None
    named = dict(zip((each.name for each in op_schema(func).arguments), values, strict=True))
    call, out = OpCall(func, named, None), named.get("out")  # a result that is written into an argument is that one
    with suppress(Exception):  # no kernel for tensors without memory, or an argument is not recorded
        if "out" not in named:
            args, kwargs = unbind(call)
            with torch.no_grad():
                out = func(*args, **kwargs)
    with suppress(Exception):  # the formula needs values, or an argument that is not recorded
        return flops_of_call(replace(call, out=out, attention=attention), formula)
    return None


def _stand_in(value: Any) -> Any:
    if isinstance(value, _Tensor):
        return torch.empty(value.sizes, dtype=value.dtype, device="meta")
    return [_stand_in(each) for each in value] if isinstance(value, tuple) else value


def _fits(func: OpOverload, values: list[Any]) -> bool:
    """Whether values can be the arguments of this overload: the profiler records only the name that all share."""
    schema = op_schema(func).arguments
    return len(schema) == len(values) and all(
        value is None or isinstance(value, list) or isinstance(value, torch.Tensor) == ("Tensor" in str(argument.type))
        for argument, value in zip(schema, values, strict=True)
    )
