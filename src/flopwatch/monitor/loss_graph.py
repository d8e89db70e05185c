"""The matrix products in a loss's autograd graph: what a step has really computed, without running anything."""

from collections.abc import Sequence
from typing import Any

import torch

_PRODUCTS = (
    "MmBackward",
    "AddmmBackward",
    "BmmBackward",
    "BaddbmmBackward",
    "ConvolutionBackward",
    "ScaledDotProduct",
    "LinearBackward",
    "MvBackward",
    "DotBackward",
)
_MOST_NODES = 50_000
_MOST_OUTSIDE = 256
"""Nodes looked at on every step of a loop with products outside the model."""


def _last_node(loss: Any) -> Any:
    """The node that made the loss; None without a graph, and for a tensor class that refuses to say."""
    try:
        return loss.grad_fn if isinstance(loss, torch.Tensor) else None
    except Exception:
        return None


def products_in_graph(loss: Any) -> int | None:
    """A number that changes with the products of the graph, their shapes and types; None where there is no graph.

    A node outlives the backward pass, and so does the shape of what it has made. Takes about a microsecond per node, so
    it is asked once per logging window.
    """
    first = _last_node(loss)
    if first is None:
        return None
    found: list[tuple[Any, ...]] = []
    seen, waiting = {first}, [first]
    while waiting:
        node = waiting.pop()
        name = node.name()
        if name.startswith(_PRODUCTS):
            made = [(tuple(part.shape), part.dtype) for part in getattr(node, "_input_metadata", ())]
            found.append((name, *made))
        for parent, _ in node.next_functions:
            if parent is not None and parent not in seen:
                seen.add(parent)
                waiting.append(parent)
        if len(seen) > _MOST_NODES:
            return None
    return hash(tuple(sorted(map(str, found))))


def products_outside(loss: Any, own: Sequence[tuple[int, int]]) -> int:
    """A number that changes with the sizes of the products between the model and its loss; 0 where there are none.

    Args:
        loss: With its graph, or without.
        own: Autograd's sequence numbers that the model's calls took. The walk ends at their nodes.
    """
    first = _last_node(loss)
    if first is None or not own:
        return 0
    found: list[str] = []
    seen, waiting = {first}, [first]
    while waiting and len(seen) <= _MOST_OUTSIDE:
        node = waiting.pop()
        number = node._sequence_nr()
        if any(start <= number < end for start, end in own):
            continue
        name = node.name()
        parents = [(parent, index) for parent, index in node.next_functions if parent is not None]
        if name.startswith(_PRODUCTS) or (parents and not name[-1].isdigit()):  # the others are written in Python
            made = [tuple(part.shape) for part in node._input_metadata]
            found.append(f"{name} {made} {[tuple(parent._input_metadata[index].shape) for parent, index in parents]}")
        for parent, _ in parents:
            if parent not in seen:
                seen.add(parent)
                waiting.append(parent)
    return hash(tuple(sorted(found))) if found else 0
