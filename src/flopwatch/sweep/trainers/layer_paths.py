"""Which layers Opacus handles in which way, as shares of the trainable parameters.

Opacus decides by a layer's exact class and says so to a log that is switched off. The ways: `ghost` (the norm alone),
`hook` (per-sample gradients by one product), `functorch` (the layer run once more and differentiated under vmap).
"""

from collections.abc import Iterator
from typing import Literal

from torch import nn

from flopwatch.sweep.trainers.opacus_parts import load_opacus

Path = Literal["ghost", "hook", "functorch"]


def layer_paths(trainer: str, model: nn.Module) -> dict[str, dict[str, float]]:
    """For each way, the classes of layers that go it and their share of the trainable parameters.

    Works on the meta device.

    >>> layer_paths("ghost", nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5, bias=False)))
    {'ghost': {'Linear': 0.8333333333333334}, 'hook': {'LayerNorm': 0.16666666666666666}}
    """
    total = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    shares: dict[str, dict[str, float]] = {}
    seen: set[int] = set()
    for layer in handled_layers(model):
        path = path_of(trainer, layer)
        own = [p for p in layer.parameters(path == "functorch") if p.requires_grad and id(p) not in seen]
        seen.update(map(id, own))
        by_class = shares.setdefault(path, {})
        name = type(layer).__name__
        by_class[name] = by_class.get(name, 0.0) + sum(parameter.numel() for parameter in own) / total
    return shares


def path_of(trainer: str, layer: nn.Module) -> Path:
    module = load_opacus().two_pass_module
    if trainer == "ghost" and type(layer) in module.NORM_SAMPLERS:
        return "ghost"
    return "hook" if type(layer) in module.GRAD_SAMPLERS else "functorch"


def handled_layers(model: nn.Module) -> Iterator[nn.Module]:
    """The modules Opacus hooks: what lies inside a layer that goes by functorch is differentiated with it."""
    if any(parameter.requires_grad for parameter in model.parameters(recurse=False)):
        yield model
        if path_of("dpsgd", model) == "functorch":
            return
    for child in model.children():
        yield from handled_layers(child)
