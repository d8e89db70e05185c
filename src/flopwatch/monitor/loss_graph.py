"""The matrix products in a loss's autograd graph: what a step has really computed, without running anything."""

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


def products_in_graph(loss: Any) -> int | None:
    """A number that changes with the products of the graph, their shapes and types; None where there is no graph.

    A node outlives the backward pass, and so does the shape of what it has made. Takes about a microsecond per node, so
    it is asked once per logging window.
    """
    first = loss.grad_fn if isinstance(loss, torch.Tensor) else None
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
