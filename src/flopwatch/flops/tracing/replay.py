"""Counts the FLOPs of layers of equal structure without running each of them.

Of a group of equal layers (a `Kind`), the first two, one in the middle and the last run normally. The others are
replayed: they return fake outputs of the right shapes, through one autograd node, and the FLOPs of a layer that ran are
counted for them too, under their own path. At the end, the layers that ran must agree to the last FLOP. They must also
have done nothing but compute outputs from inputs: a layer must not write to a buffer or an attribute, draw random
numbers, pass tensors on without returning them, or calculate with its index. If a check fails, the model is traced
again, and every layer runs.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from flopwatch.errors import MeasurementError
from flopwatch.flops.tracing.fakes import Faker
from flopwatch.flops.tracing.layer_calls import Key, LayerOutput, call_key, in_backward, side_effects_watched
from flopwatch.flops.tracing.repeated import Kind, equal_layers, found_again, has_hooks
from flopwatch.flops.tracing.tally import Event, EventLog, Tally
from flopwatch.flops.tree import Structure, flatten, rebuild
from flopwatch.torch_internals import (
    FakeTensor,
    call_slot,
    current_autograd_node,
    recorded_operations,
    sequence_nr,
)

Execute = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
_MADE_IN = "_flopwatch_made_in"


def _next_node() -> int:
    return recorded_operations() or 0  # `count_by_trace` replays layers only if these numbers are known


class ReplayRefusedError(MeasurementError):
    """Layers of equal structure did not behave equally, so the model has to be traced with every layer run."""


class ReplayMemory:
    """Remembers which layers earlier traces of a model have proven equal, so that later traces run fewer layers."""

    def __init__(self) -> None:
        self.proven: set[tuple[str, ...]] = set()
        """The groups of layers that were proven equal. Each group is a tuple of the layers' paths."""
        self.is_refused = False
        self.proven_unchanged: set[tuple[str, ...]] = set()
        """The part of `proven` that was added in the current `unchanged` block; empty outside of such a block."""
        self._is_unchanged = False
        self._known: list[Kind] | None = None

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Inside this context, search for equal layers only once, so the caller must not change the model in it."""
        self._is_unchanged = True
        try:
            yield
        finally:
            self._is_unchanged, self._known = False, None
            self.proven_unchanged = set()

    def equal_layers(self, replica: nn.Module) -> list[Kind]:
        kinds = None if self._known is None else found_again(replica, self._known)
        if kinds is None:
            kinds = equal_layers(replica)
            self._known = [replace(kind, modules=[]) for kind in kinds] if self._is_unchanged else None
        return kinds

    def prove(self, kinds: set[tuple[str, ...]]) -> None:
        self.proven |= kinds
        if self._is_unchanged:
            self.proven_unchanged |= kinds


class _Layer:
    def __init__(self, kind: Kind, path: str, module: nn.Module, *, must_run: bool) -> None:
        self.kind = kind
        self.path = path
        self.must_run = must_run
        self.call: Any = module.__dict__[call_slot()]
        self.last: _Call | None = None
        """The layer's latest call in the forward pass. Recomputed ops are added to it."""
        self.modules = list(module.modules())


class _Call:
    """One call of one layer, run or replayed, with the recorded ops of its forward and backward pass."""

    def __init__(self, layer: _Layer, key: Key | None, leaves: list[Any]) -> None:
        self.layer = layer
        self.key = key
        # The key contains ids, which are only unique while their objects live.
        self.kept_alive = [leaf for leaf in leaves if not isinstance(leaf, FakeTensor)]
        self.output: LayerOutput | None = None
        self.forward: list[Event] = []
        self.backward: list[Event] = []
        self.outputs_with_gradient: set[int] = set()

    def events(self, part: list[Event]) -> list[Event]:
        """Return the events without the layer's path, so that calls of different layers can be compared."""
        return [event.moved(self.layer.path, "<layer>") for event in part]


class Replay:
    """One trace in which equal layers are replayed; `log` records its ops, and `tally` adds up their FLOPs.

    Args:
        faker: Makes the outputs of replayed layers.
        memory: Shared by all traces of the same model.
    """

    def __init__(self, faker: Faker, memory: ReplayMemory) -> None:
        self.log = EventLog(self._listen)
        self.is_attached = False
        self.replayed: list[_Call] = []
        self._faker = faker
        self._memory = memory
        self._ran: dict[tuple[int, Key], list[_Call]] = {}
        self._running: _Call | None = None
        self._calls_by_nodes: list[tuple[range, _Call]] = []
        self._kinds: list[Kind] = []

    def attach(self, replica: nn.Module) -> None:
        """Redirect the calls of all repeated layers to this object."""
        self._kinds = self._memory.equal_layers(replica)
        for kind in self._kinds:
            must_run = self._samples(kind)
            for number, (path, module) in enumerate(zip(kind.paths, kind.modules, strict=True)):
                layer = _Layer(kind, path, module, must_run=number in must_run)
                module.__dict__[call_slot()] = partial(self._called, layer)
        self.is_attached = True

    def _samples(self, kind: Kind) -> set[int]:
        count = len(kind.paths)
        # The first layer always runs, because its inputs may need no gradient, unlike those of later layers. The last
        # layer always runs, because the model may use more outputs of the last layer than of the others.
        return {0, count - 1} if kind.paths in self._memory.proven else {0, 1, count // 2, count - 1}

    def _called(self, layer: _Layer, *args: Any, **kwargs: Any) -> Any:
        if self._running is not None:
            return layer.call(*args, **kwargs)
        if in_backward():
            return self._run_again(layer, args, kwargs)
        leaves, structure = flatten((args, kwargs))
        key = call_key(leaves, structure)
        call = layer.last = _Call(layer, key, leaves)
        output = self._known_output(call)
        if output is not None:
            return self._replay(call, output, leaves)
        return self._run(call, args, kwargs, leaves, structure)

    def _known_output(self, call: _Call) -> LayerOutput | None:
        layer = call.layer
        # Hooks may have been added since the layers were compared.
        if layer.must_run or layer.kind.obstacle or call.key is None or has_hooks(layer.modules):
            return None
        ran = self._ran.get((id(layer.kind), call.key), [])
        if not ran or any(not _agree(ran[0], other) for other in ran):
            return None
        return ran[0].output

    def _run(
        self, call: _Call, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Any], structure: Structure
    ) -> Any:
        obstacles: list[str] = []
        first_node = _next_node()
        with side_effects_watched(call.layer.modules, (args, kwargs), leaves, structure, obstacles):
            output = self._within(call, args, kwargs)
        call.output = LayerOutput.of(output, leaves, first_node)
        if call.output is None:
            obstacles.append("the layer's output cannot be made without running the layer")
        else:
            self._hand_out(call, output)
        if obstacles:
            call.layer.kind.obstacle = obstacles[0]
        if call.key is not None:
            self._ran.setdefault((id(call.layer.kind), call.key), []).append(call)
        return output

    def _run_again(self, layer: _Layer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a layer again because checkpointing recomputes it, and add its events to the layer's forward call."""
        return layer.call(*args, **kwargs) if layer.last is None else self._within(layer.last, args, kwargs)

    def _within(self, call: _Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._running = call
        first_node = _next_node()
        try:
            return call.layer.call(*args, **kwargs)
        finally:
            self._running = None
            self._calls_by_nodes.append((range(first_node, _next_node()), call))

    def _hand_out(self, call: _Call, output: Any) -> None:
        """Allow the outputs to be used outside of the layer, and record which of them receive a gradient."""
        for number, leaf in enumerate(flatten(output)[0]):
            if isinstance(leaf, torch.Tensor):
                leaf.__dict__.pop(_MADE_IN, None)
                if call.output is not None and number in call.output.reach:
                    leaf.register_hook(partial(_note_gradient, call, number))

    def _replay(self, call: _Call, output: LayerOutput, leaves: list[Any]) -> Any:
        call.output = output
        self.replayed.append(call)
        self.log.add_later(lambda: self._events_for(call, "forward"))
        return rebuild(self._outputs(call, output, leaves), output.structure)

    def _outputs(self, call: _Call, output: LayerOutput, leaves: list[Any]) -> list[Any]:
        made: dict[int, torch.Tensor] = {n: self._faker.like(*facts) for n, facts in output.tensors.items()}
        differentiable = [number for number in made if number in output.reach]
        if differentiable:
            # Without an input that requires a gradient, autograd would not make a node.
            anchor = self._faker.like((1,), (1,), torch.float32).requires_grad_()
            inputs = [leaves[place] for place in output.reached]
            wanted = tuple(made[number] for number in differentiable)
            results = _Replayed.apply(self, call, differentiable, wanted, anchor, *inputs)  # type: ignore[no-untyped-call]
            made.update(zip(differentiable, results, strict=True))
        return output.filled(made, leaves)

    def gradient_came(self, call: _Call, outputs: set[int]) -> set[int]:
        """Record that gradients of `outputs` have reached a replayed call, and return the inputs to which they flow."""
        # The autograd node of a replayed layer cannot be differentiated again, so double backward needs real layers.
        if call.outputs_with_gradient or not outputs or torch.is_grad_enabled():
            raise ReplayRefusedError("a replayed layer was differentiated twice")
        call.outputs_with_gradient = outputs
        self.log.add_later(lambda: self._events_for(call, "backward"))
        assert call.output is not None
        return set().union(*(call.output.reach[number] for number in outputs))

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._faker.like(tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def _listen(self, event: Event) -> None:
        if not in_backward():
            if self._running is not None:
                self._running.forward.append(event)
            return
        call = self._running or self._call_of_node()
        if call is not None:
            call.backward.append(event)

    def _call_of_node(self) -> _Call | None:
        """Return the call whose forward pass made the running autograd node; None if no layer's call did."""
        node = current_autograd_node()
        if node is None:
            return None
        number = sequence_nr(node)
        return next((call for nodes, call in self._calls_by_nodes if number in nodes), None)

    def watch(self, execute: Execute) -> Execute:
        """Return `execute` with a check for tensors that leave a layer without being its output."""

        def watched(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            is_forward = self._kinds and not in_backward()
            if is_forward:
                self._look_at_inputs(args)
            out = execute(func, args, kwargs)
            if is_forward and self._running is not None:
                self._mark(out)
            return out

        return watched

    def _look_at_inputs(self, args: Any) -> None:
        for value in args:
            if isinstance(value, torch.Tensor):
                call = value.__dict__.get(_MADE_IN)
                if call is not None and call is not self._running:
                    call.layer.kind.obstacle = "a tensor that the layer makes, but does not return, is used outside"
            elif isinstance(value, list | tuple):
                self._look_at_inputs(value)

    def _mark(self, out: Any) -> None:
        if isinstance(out, torch.Tensor):
            out.__dict__[_MADE_IN] = self._running
        elif isinstance(out, list | tuple):
            for value in out:
                self._mark(value)

    def _events_for(self, call: _Call, part: str) -> list[Event]:
        source = self._source(call)
        events: list[Event] = getattr(source, part)
        return [event.moved(source.layer.path, call.layer.path) for event in events]

    def _source(self, call: _Call) -> _Call:
        """Return a call that ran with equal inputs, and in which the same outputs received a gradient."""
        assert call.key is not None
        ran = self._ran[id(call.layer.kind), call.key]
        return next(other for other in ran if other.outputs_with_gradient == call.outputs_with_gradient)

    def tally(self) -> Tally:
        """Return the tally of the whole step. Raises ReplayRefusedError if equal layers did not behave equally."""
        for call in self.replayed:
            self._prove(call)
        self._memory.prove({call.layer.kind.paths for call in self.replayed})
        return self.log.tally()

    def failed_like_the_model(self, error: Exception, *, in_backward: bool) -> bool:
        """Return whether a trace in which every layer runs would surely have raised this error too.

        This is sure if no layer was replayed (counted without running). For an error in the forward pass it is also
        sure if an earlier trace of the unchanged model has proven these layers equal, and those that ran now are equal.
        """
        if not self.is_attached or not self.replayed:
            return self.is_attached
        is_other_error = not isinstance(error, ReplayRefusedError) and not in_backward
        return is_other_error and all(self._is_sure(call) for call in self.replayed)

    def _is_sure(self, call: _Call) -> bool:
        kind = call.layer.kind
        assert call.key is not None
        ran = self._ran[id(kind), call.key]
        is_proven = kind.paths in self._memory.proven_unchanged and not kind.obstacle
        return is_proven and len(ran) > 1 and all(_agree(ran[0], other) for other in ran)

    def _prove(self, call: _Call) -> None:
        kind = call.layer.kind
        if kind.obstacle:
            raise ReplayRefusedError(f"{call.layer.path}: {kind.obstacle}")
        assert call.key is not None
        ran = self._ran[id(kind), call.key]
        alike = [other for other in ran if other.outputs_with_gradient == call.outputs_with_gradient]
        fewest = 1 if kind.paths in self._memory.proven else 2
        if len(ran) <= fewest or len(alike) < fewest or not all(_agree(ran[0], other) for other in ran):
            raise ReplayRefusedError(f"{call.layer.path}: too few equal layers ran")
        first = alike[0]
        if any(first.events(first.backward) != other.events(other.backward) for other in alike):
            raise ReplayRefusedError(f"{call.layer.path}: equal layers have different backward passes")


def _agree(one: _Call, other: _Call) -> bool:
    """Return whether two calls have equal outputs and equal FLOPs in the forward pass."""
    return one.output == other.output and one.events(one.forward) == other.events(other.forward)


def _note_gradient(call: _Call, number: int, gradient: torch.Tensor | None) -> None:
    if gradient is not None:
        call.outputs_with_gradient.add(number)


class _Replayed(torch.autograd.Function):
    """The autograd node of a replayed layer; `anchor` makes the outputs require a gradient even if no input does."""

    @staticmethod
    def forward(
        ctx: Any, replay: Replay, call: _Call, numbers: list[int], wanted: Any, anchor: Any, *inputs: Any
    ) -> Any:
        ctx.replay, ctx.call, ctx.numbers, ctx.inputs = replay, call, numbers, inputs
        ctx.set_materialize_grads(False)
        return wanted

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        outputs = {n for n, gradient in zip(ctx.numbers, gradients, strict=True) if gradient is not None}
        reached = ctx.replay.gradient_came(ctx.call, outputs)
        places = ctx.call.output.reached
        given = [
            ctx.replay.like(tensor) if place in reached else None
            for place, tensor in zip(places, ctx.inputs, strict=True)
        ]
        return None, None, None, None, None, *given
