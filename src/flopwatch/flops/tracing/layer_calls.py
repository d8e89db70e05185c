"""Describes a layer's inputs, outputs and side effects, to decide if another layer has the same FLOPs."""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from flopwatch.flops.tree import Structure, flatten
from flopwatch.library_internals import is_cache, outputs_are_captured
from flopwatch.torch_internals import (
    ANY_BATCH_NORM,
    FakeTensor,
    current_graph_task_id,
    own_buffers,
    own_parameters,
    saves_through_hooks,
    sequence_nr,
    tensor_version,
)

Key = tuple[Any, ...]
"""Calls with equal keys cost the same FLOPs in layers of equal structure."""
_Facts = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
_PLAIN = (type(None), bool, int, float, str, bytes, torch.dtype, torch.device, torch.Size, Enum)


def in_backward() -> bool:
    return bool(current_graph_task_id() != -1)


def call_key(leaves: list[Any], structure: Structure) -> Key | None:
    """Return a key of a call's inputs; None if they contain an unknown object, which the layer might change."""
    if outputs_are_captured():
        return None
    places: dict[int, int] = {}
    parts: list[Any] = []
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, FakeTensor):
            # A call with the same tensor twice is different from a call with two tensors of equal shape.
            same = places.setdefault(id(leaf), place)
            parts.append((same, tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.requires_grad))
        elif isinstance(leaf, torch.Tensor):
            # FLOPs may depend on a real tensor's values, so the key has its id and version counter.
            parts.append((id(leaf), tensor_version(leaf)))
        elif isinstance(leaf, _PLAIN):
            parts.append((type(leaf), leaf))
        elif isinstance(leaf, FunctionType) or _is_only_looked_up(leaf):
            parts.append(id(leaf))
        else:
            return None
    return structure, tuple(parts), _settings()


def _is_only_looked_up(value: Any) -> bool:
    """Return whether `value` is a KV cache, which training never reads, or a block mask, which no layer changes."""
    if is_cache(value):
        return True
    flex = sys.modules.get("torch.nn.attention.flex_attention")
    return flex is not None and isinstance(value, flex.BlockMask)


def _settings() -> tuple[Any, ...]:
    # The model's code may change the autocast state of cuda, which a trace copies to the CPU.
    autocast = tuple(
        (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in ("cpu", "cuda")
    )
    kernels = (
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
    )
    return torch.is_grad_enabled(), autocast, saves_through_hooks(), kernels


@dataclass
class LayerOutput:
    """The outputs of a layer: new tensors, inputs that are passed through, plain values; and how gradients flow back.

    The keys of all dicts are positions in the flattened output.
    """

    structure: Structure
    tensors: dict[int, _Facts] = field(default_factory=dict)
    inputs: dict[int, int] = field(default_factory=dict)
    others: dict[int, Any] = field(default_factory=dict)
    reach: dict[int, frozenset[int]] = field(default_factory=dict)
    """For each differentiable output, the inputs that its gradient reaches."""

    @classmethod
    def of(cls, output: Any, leaves: list[Any], first_node: int) -> "LayerOutput | None":
        """Describe an output; None if it contains something that cannot be made without running the layer."""
        results, structure = flatten(output)
        described = cls(structure)
        places = {id(leaf): place for place, leaf in reversed(list(enumerate(leaves))) if not isinstance(leaf, _PLAIN)}
        edges = _edges(leaves)
        for number, result in enumerate(results):
            if id(result) in places:
                described.inputs[number] = places[id(result)]
            elif isinstance(result, _PLAIN):
                described.others[number] = result
            elif isinstance(result, FakeTensor) and not (result.requires_grad and result.grad_fn is None):
                described.tensors[number] = (tuple(result.shape), result.stride(), result.dtype)
                if result.grad_fn is not None:
                    described.reach[number] = _reached(result.grad_fn, edges, first_node)
            else:
                return None
            if isinstance(result, torch.Tensor):
                places.setdefault(id(result), -1)  # -1: a new tensor; if the output has it twice, it cannot be replayed
        return None if -1 in described.inputs.values() else described

    @property
    def reached(self) -> list[int]:
        """The positions of all inputs that a gradient reaches."""
        return sorted(frozenset().union(*self.reach.values()))

    def filled(self, made: dict[int, torch.Tensor], leaves: list[Any]) -> list[Any]:
        """Return the leaves of the output: the tensors `made`, plain values, and inputs (`leaves`) passed through."""
        results = {**made, **self.others, **{number: leaves[place] for number, place in self.inputs.items()}}
        return [results[number] for number in range(len(results))]


def _edges(leaves: list[Any]) -> dict[tuple[Any, int], int]:
    edges: dict[tuple[Any, int], int] = {}
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            edge = get_gradient_edge(leaf)
            edges.setdefault((edge.node, edge.output_nr), place)
    return edges


def _reached(grad_fn: Any, edges: dict[tuple[Any, int], int], first_node: int) -> frozenset[int]:
    """Return the inputs that are found by walking the autograd graph from an output back to the layer's first node."""
    reached: set[int] = set()
    seen = {grad_fn}
    waiting = [grad_fn]
    while waiting:
        for edge in waiting.pop().next_functions:
            node = edge[0]
            if edge in edges:
                reached.add(edges[edge])
            elif node is not None and node not in seen and first_node <= sequence_nr(node):
                seen.add(node)
                waiting.append(node)
    return frozenset(reached)


@contextmanager
def side_effects_watched(
    modules: list[nn.Module], arguments: Any, leaves: list[Any], structure: Structure, found: list[str]
) -> Iterator[None]:
    """Add the side effects of the block to `found`, as sentences about the layer."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    for module in modules:
        tensors += [tensor for tensor in own_parameters(module).values() if tensor is not None]
        if not isinstance(module, ANY_BATCH_NORM):  # running statistics do not change the FLOPs
            tensors += [tensor for tensor in own_buffers(module).values() if tensor is not None]
    versions = [tensor_version(tensor) for tensor in tensors]
    held = [*modules, *_objects_held(modules)]
    attributes = [_attributes(holder) for holder in held]
    torch_random, python_random = torch.get_rng_state(), random.getstate()
    yield
    if versions != [tensor_version(tensor) for tensor in tensors]:
        found.append("the layer writes to an input, a parameter or a buffer")
    if any(before != _attributes(holder) for before, holder in zip(attributes, held, strict=True)):
        found.append("the layer changes its attributes or those of an object that it holds")
    if not torch.equal(torch_random, torch.get_rng_state()) or python_random != random.getstate():
        found.append("the layer draws random numbers")
    leaves_after, structure_after = flatten(arguments)
    if structure_after != structure or any(a is not b for a, b in zip(leaves, leaves_after, strict=True)):
        found.append("the layer changes a list or dict that is an input")


def _objects_held(modules: list[nn.Module]) -> list[Any]:
    """Return the objects with attributes that the modules hold, such as a config or a state that layers share."""
    objects = {id(value): value for module in modules for value in module.__dict__.values()}
    return [
        value
        for value in objects.values()
        if hasattr(value, "__dict__") and not isinstance(value, nn.Module | torch.Tensor | FunctionType | type)
    ]


def _attributes(holder: Any) -> list[Any]:
    """Return the ids of everything that a module or an object holds, one level deep."""
    identities: list[Any] = []
    for name, value in vars(holder).items():
        identities.append((name, id(value)))
        if isinstance(value, dict):
            identities.append([(key, id(item)) for key, item in value.items()])
        elif isinstance(value, list | tuple | set):
            identities.append([id(item) for item in value])
    return identities
