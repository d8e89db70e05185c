"""Which of a model's outputs a training minimises."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from flopwatch.errors import InputError

LossFn = Callable[[Any], torch.Tensor]


def step_loss(output: Any, loss_fn: LossFn | None) -> tuple[torch.Tensor, str | None]:
    """The loss of a step as a scalar, and what a reader must know of how it was chosen."""
    parts = {"loss_fn": loss_fn(output)} if loss_fn else _losses_among(output)
    for loss in parts.values():
        if not isinstance(loss, torch.Tensor):
            given = type(loss).__name__
            raise InputError(f"the loss must be a tensor, got {given}; let loss_fn return a scalar tensor")
    # Any differentiable loss sends a gradient of the output's shape; which one does not change the count.
    scalars = [loss if loss.dim() == 0 else loss.sum() for loss in parts.values()]
    total = scalars[0]
    for loss in scalars[1:]:
        total = total + loss.to(total.dtype)
    return total, _told(list(parts)) if len(parts) > 1 else None


def _told(names: list[str]) -> str:
    return (
        f"the loss is taken to be the sum of what the model returns as {', '.join(names)}; "
        "pass loss_fn=lambda output: ... if your training minimises something else"
    )


def _losses_among(output: Any) -> dict[str, Any]:
    """The scalars that can be trained on, without those that another of them is made of."""
    if isinstance(output, torch.Tensor):
        return {"output": output}
    items = dict(_items(output))
    named = items.get("loss")
    scalars = {name: value for name, value in items.items() if _is_trainable(value) and value.dim() == 0}
    if _is_trainable(named):
        scalars["loss"] = named
    if scalars:
        return _outermost(scalars)
    first = items.get("output[0]")
    if named is None and isinstance(first, torch.Tensor) and first.numel() == 1:
        named = first
    trainable = {name: value for name, value in items.items() if _is_trainable(value)}
    if named is None and trainable:
        return trainable  # the training makes a loss of them itself
    if named is None:
        raise InputError(
            f"the model returned {type(output).__name__} without a loss; put labels into the batch, "
            "or pass loss_fn=lambda output: ... that returns the scalar your training minimises"
        )
    return {"loss": named}


def _items(output: Any) -> Iterator[tuple[str, Any]]:
    """What lies at the top of an output, by name."""
    if isinstance(output, Mapping):
        yield from ((str(name), value) for name, value in output.items())
    elif isinstance(output, tuple | list):
        yield from ((f"output[{index}]", value) for index, value in enumerate(output))
    elif is_dataclass(output):
        yield from ((field.name, getattr(output, field.name, None)) for field in fields(output))
    else:
        yield "loss", getattr(output, "loss", None)


def _is_trainable(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _outermost(losses: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Leave out parts of a sum: a loss that another one depends on runs backward with it anyway."""
    if len(losses) == 1:
        return losses
    seen: set[Any] = {None}  # a parameter of one number has no graph
    for loss in losses.values():
        seen |= _nodes_below(loss.grad_fn)
    kept: dict[str, torch.Tensor] = {}
    for name, loss in losses.items():
        if loss.grad_fn not in seen:
            kept[name] = loss
            seen.add(loss.grad_fn)
    return kept or losses


def _nodes_below(node: Any) -> set[Any]:
    """All nodes of the graph that a node leads to, without itself."""
    found: set[Any] = set()
    waiting = [node]
    while waiting:
        current = waiting.pop()
        nodes = (following for following, _ in getattr(current, "next_functions", ()))
        new = [following for following in nodes if following is not None and following not in found]
        found.update(new)
        waiting += new
    return found
