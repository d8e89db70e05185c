"""Listens to the calls of compiled code, and keeps the graph of each compiled function.

Torch hands every graph that it has captured to a backend through one method, which is wrapped here. The compiled
function gets a listener, and is otherwise left alone.
"""

import itertools
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from flopwatch.flops.tracing.passes import AutocastState, current_autocast
from flopwatch.guard import Guard
from flopwatch.torch_internals.autograd import compiled_graphs, wrap_backend_calls
from flopwatch.torch_internals.ops import FakeTensor, OpOverload

Leave = Callable[[Any], None]
"""Is called with the result of a compiled function when that has returned, or with None when it has raised."""
Listener = Callable[["Region", tuple[Any, ...]], Leave | None]


@dataclass(frozen=True, slots=True)
class InputSpec:
    """What a graph takes in one place: a tensor of these sizes, or the size itself if it is a number.

    Sizes and strides are numbers, or expressions of sizes that differ from call to call; `kind` is a class not torch's.
    """

    sizes: tuple[Any, ...]
    strides: tuple[Any, ...] = ()
    dtype: torch.dtype | None = None
    device: torch.device | None = None
    needs_grad: bool = False
    is_weight: bool = False
    kind: str | None = None


class _Source(NamedTuple):
    """Where a call shows a size: as a number among its arguments, or as a dimension of a tensor among them."""

    symbol: Any
    argument: int
    dim: int | None


class Region:
    """A compiled function, and the graph it was compiled from.

    The graph is kept as it was before the backend could change it, with the autocast state in which it was captured.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        self.number = next(_numbers)
        by_number[self.number] = self
        self.module, self.graph = module, fx.Graph()
        self.graph.output(self.graph.graph_copy(module.graph, {}))
        self.inputs = [
            spec_of(node.meta.get("example_value")) for node in module.graph.nodes if node.op == "placeholder"
        ]
        self.autocast: AutocastState = current_autocast()
        self.counts: dict[Any, Any] = {}
        sources: dict[Any, _Source] = {}
        for argument, spec in enumerate(self.inputs):
            for dim, size in enumerate(() if spec is None else spec.sizes):
                if not isinstance(size, int) and size.is_symbol:
                    sources.setdefault(size, _Source(size, argument, None if spec and spec.dtype is None else dim))
        self.sources = tuple(sources.values())
        self._weight = next((place for place, spec in enumerate(self.inputs) if spec and spec.is_weight), None)

    def sizes(self, args: Sequence[Any]) -> tuple[int, ...]:
        return tuple(
            int(args[source.argument]) if source.dim is None else args[source.argument].shape[source.dim]
            for source in self.sources
        )

    def foreign_call(self) -> str | None:
        """The name of a function or module in the graph that is not torch's (`allow_in_graph`); None if all are."""
        inner = (part.graph for part in self.module.modules() if isinstance(part, fx.GraphModule))
        for node in (node for graph in (self.graph, *inner) for node in graph.nodes):
            called: Any = node.target if node.op == "call_function" else None
            if node.op == "call_module":
                called = type(self.module.get_submodule(str(node.target)))
            home = str(getattr(called, "__module__", None) or "torch").partition(".")[0]
            is_own = called is None or called is fx.GraphModule or isinstance(called, OpOverload) or home in _OWN_HOMES
            if not is_own:
                return f"{home}.{getattr(called, '__name__', called)}"
        return None

    def calls_transforms(self) -> bool:
        """Whether the graph uses `torch.func`: a compiler leaves out what these compute and do not use."""
        calls = (node.target for node in self.graph.nodes if node.op == "call_function")
        return any("_functorch" in str(getattr(each, "__module__", "")) for each in calls)

    def weight(self, args: Sequence[Any]) -> Any:
        """One of the model's parameters among the arguments of a call, which tells models apart; None without any."""
        return None if self._weight is None else args[self._weight]

    def values(self, sizes: Sequence[int]) -> dict[Any, int]:
        return {source.symbol: size for source, size in zip(self.sources, sizes, strict=True)}


_OWN_HOMES = ("torch", "_operator", "builtins", "math", "operator", "torchvision", "torchaudio")
"""The packages of functions that torch puts into graphs itself. What has no module is written in C."""
_numbers = itertools.count()
by_number: "weakref.WeakValueDictionary[int, Region]" = weakref.WeakValueDictionary()


def spec_of(value: Any) -> InputSpec | None:
    if isinstance(value, torch.SymInt):
        return InputSpec((_expression(value),))
    if not isinstance(value, torch.Tensor):
        return None
    is_weight = isinstance(value, nn.Parameter)
    is_own = type(value) in (FakeTensor, nn.Parameter, torch.Tensor) or is_weight
    sizes, strides = (tuple(map(_expression, each)) for each in (value.shape, value.stride()))
    kind = None if is_own and value.layout is torch.strided else type(value).__name__
    return InputSpec(sizes, strides, value.dtype, value.device, value.requires_grad, is_weight, kind)


def _expression(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else int(size)


def number(size: Any, values: Mapping[Any, int]) -> int:
    return size if isinstance(size, int) else int(size.subs(values))


@dataclass
class Listening:
    """Which listener there is, and why some compiled code is not listened to.

    Attributes:
        is_calling: Whether the listener is told of a call now.
        is_compiling: Whether a backend compiles a graph now; some run parts of it.
        users: Who wants to be told of calls. When the last one leaves, torch's method is put back.
        put_back: Puts it back; None while it is not replaced.
        graphs: How many graphs had been compiled when it was put back.
        missed: Why calls of compiled code may have been missed; None if all are seen.
    """

    listener: Listener | None = None
    is_installed: bool = False
    is_calling: bool = False
    is_compiling: bool = False
    users: "weakref.WeakSet[Any]" = field(default_factory=weakref.WeakSet)
    put_back: Callable[[], None] | None = None
    graphs: int = 0
    missed: str | None = None


state = Listening()
MISSED = "code was compiled before the monitor existed, and is not seen; make the monitor before the first step"
UNSEEN = "with this release of torch, compiled code is not counted as it runs"


def install(user: object) -> None:
    """Listen to what is compiled from now on; once the process compiles, and before it has called compiled code."""
    state.users.add(user)
    if state.is_installed or "torch._dynamo" not in sys.modules:
        return
    state.is_installed = True
    if compiled_graphs() > state.graphs:
        state.missed = MISSED
    state.put_back = wrap_backend_calls(_compiled)
    if state.put_back is None:
        state.missed = UNSEEN


def leave(user: object) -> None:
    """Put torch's method back if nobody else listens. What was compiled until now still tells who listens later."""
    state.users.discard(user)
    if state.users or not state.is_installed:
        return
    if state.put_back is not None:
        state.put_back()
    state.is_installed, state.put_back, state.graphs = False, None, compiled_graphs()


def listen(listener: Listener | None) -> Listener | None:
    before, state.listener = state.listener, listener
    return before


def _compiled(module: fx.GraphModule, compile_graph: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
    """Keep a graph before its backend may change it, and add a listener to the compiled function."""
    region: Region | None = None
    with Guard("a graph of another form"):
        region = Region(module)
    if region is None:
        state.missed = UNSEEN
    was_compiling, state.is_compiling = state.is_compiling, True
    try:
        compiled = compile_graph()
    finally:
        state.is_compiling = was_compiling
    return compiled if region is None else _listening(region, compiled)


def _listening(region: Region, compiled: Callable[..., Any]) -> Callable[..., Any]:
    def called(*args: Any) -> Any:
        listener, leave = state.listener, None
        if listener is not None:
            state.is_calling = True
            try:
                leave = listener(region, args)
            except Exception:  # noqa: BLE001 - nothing may reach the training, and a `Guard` would cost two more calls
                state.missed = UNSEEN
            state.is_calling = False
        if leave is None:
            return compiled(*args)
        out = None
        try:
            out = compiled(*args)
        finally:
            leave(out)
        return out

    return called
