"""Why a DP trainer cannot train a model, and what to do about it; and how Opacus handles each layer.

Opacus's own messages for these cases are missing or misleading.
"""

from collections.abc import Iterator
from typing import Literal

from torch import nn

from flopwatch.errors import UnsupportedError
from flopwatch.records.reading import first_line
from flopwatch.sweep.trainers.opacus_internals import MISSING_GRADIENT_SIGNS, has_ghost_norm, has_gradient_hook
from flopwatch.sweep.trainers.options import is_checkpointing
from flopwatch.torch_internals import AnyBatchNorm

_MOST_NAMED = 3


def check_supported(trainer: str, model: nn.Module) -> None:
    """Raise UnsupportedError if this DP trainer is known not to work with this model. Works on the meta device."""
    reason = obstacle(trainer, model)
    if reason:
        raise UnsupportedError(reason)


def obstacle(trainer: str, model: nn.Module) -> str | None:
    """A reason that is visible without running the model; None if there is none."""
    if is_checkpointing(model):
        return (
            "gradient checkpointing runs every layer a second time in the backward pass, and Opacus takes that for a "
            "second use of the layer; turn checkpointing off for DP trainers"
        )
    buffered = _with_buffers(model)
    if buffered:
        return buffered
    inside = _tied_inside(model)
    if inside:
        return (
            f"the weights {' and '.join(inside)} are tied within one layer that Opacus differentiates as a whole, "
            "which it cannot; untie them (tie_word_embeddings: false in the config)"
        )
    tied = tied_parameters(model) if trainer == "ghost" else []
    if tied:
        return (
            f"the weights {' and '.join(tied)} are tied, and ghost clipping finds the norm of each layer alone; "
            "untie them (tie_word_embeddings: false in the config) or use the trainer fast"
        )
    return None


def _with_buffers(model: nn.Module) -> str | None:
    trainable = (m for m in model.named_modules() if any(p.requires_grad for p in m[1].parameters(recurse=False)))
    found = [(name, module) for name, module in trainable if next(module.buffers(), None) is not None]
    if not found:
        return None
    batch_norms = [name for name, module in found if isinstance(module, AnyBatchNorm)]
    if batch_norms:
        return (
            f"BatchNorm ({_named(batch_norms)}) mixes the samples of a batch, so that no sample has a gradient of its "
            "own; use GroupNorm or LayerNorm (opacus.validators.ModuleValidator.fix replaces it)"
        )
    name, module = found[0]
    buffers = [buffer for buffer, _ in module.named_buffers()]
    return (
        f"the layer {name} ({type(module).__name__}) has parameters and buffers ({_named(buffers)}), and Opacus takes "
        "no such layer; make its buffers plain attributes, or freeze the layer"
    )


def _tied_inside(model: nn.Module) -> list[str]:
    """Two names of one parameter within a layer that Opacus handles with functorch, such as the head of BERT."""
    names = {id(module): name for name, module in model.named_modules()}
    for layer in handled_layers(model):
        owners: dict[int, list[str]] = {}
        if path_of("dpsgd", layer) == "functorch":
            for name, parameter in layer.named_parameters(remove_duplicate=False):
                owners.setdefault(id(parameter), []).append(f"{names[id(layer)]}.{name}".lstrip("."))
        for several in owners.values():
            if len(several) > 1:
                return several
    return []


def tied_parameters(model: nn.Module) -> list[str]:
    """The names of the first trainable parameter that several layers share, if one of these layers has a ghost norm.

    Opacus raises only if the second of the layers has one; in the other order it silently computes a wrong norm.
    """
    names: dict[int, list[str]] = {}
    ghost: set[int] = set()
    paths = {id(layer): path_of("ghost", layer) for layer in handled_layers(model)}
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad:
                names.setdefault(id(parameter), []).append(f"{module_name}.{name}".lstrip("."))
                if paths.get(id(module)) == "ghost":
                    ghost.add(id(parameter))
    return next((owners for key, owners in names.items() if len(owners) > 1 and key in ghost), [])


def explain_failure(trainer: str, idle: list[str], error: Exception) -> str:
    """The meaning of a step's exception where Opacus's message is misleading; otherwise the message.

    Args:
        trainer: The DP trainer that raised it.
        idle: Trainable parameters that get no gradient in a standard step.
        error: The exception.
    """
    message = first_line(error, 1000)
    if idle and any(sign in message for sign in MISSING_GRADIENT_SIGNS):
        return (
            f"{_named(idle)} got no gradient in the step, and Opacus needs one for every trainable parameter; freeze "
            "it (requires_grad = False), or leave it out of the model"
        )
    for sign, meaning in _MEANINGS.items():
        if sign in message:
            return meaning if sign == _MISLEADING else f"{meaning}; its message: {message}"
    return f"{trainer} raised {type(error).__name__}: {message}"


# Parts of messages of Opacus 1.6 and torch 2.13; a message that contains none of them is shown unchanged.
_MISLEADING = "Parameter tying is not supported"
_MEANINGS = {
    _MISLEADING: (
        "a layer runs more than once in a step (shared layers, or checkpointing in the model's own code), and ghost "
        "clipping finds the norm of each use alone; use the trainer fast or dpsgd"
    ),
    "required positional argument": (
        "a layer with parameters of its own takes more than one input (as the experts of a mixture do), and Opacus "
        "differentiates it with the first alone"
    ),
    "object has no attribute 'detach'": (
        "a layer with parameters of its own takes an argument that is no tensor, and Opacus takes tensors only"
    ),
    "stack expects each tensor to be equal size": (
        "a layer's input does not have the samples as its first dimension (one row for all samples, or all tokens in "
        "one list, as mixtures of experts have), and Opacus needs that"
    ),
}


def _named(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more


Path = Literal["ghost", "hook", "functorch"]
"""How Opacus handles a layer, which depends on its exact class: `ghost` computes the norm alone, `hook` per-sample
gradients by one product, and `functorch` runs the layer again and differentiates it under vmap.
"""


def layer_paths(trainer: str, model: nn.Module) -> dict[str, dict[str, float]]:
    """For each path, the classes of its layers and their share of the trainable parameters.

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
    if trainer == "ghost" and has_ghost_norm(layer):
        return "ghost"
    return "hook" if has_gradient_hook(layer) else "functorch"


def handled_layers(model: nn.Module) -> Iterator[nn.Module]:
    """The modules that Opacus hooks. A layer it handles with functorch includes its children."""
    if any(parameter.requires_grad for parameter in model.parameters(recurse=False)):
        yield model
        if path_of("dpsgd", model) == "functorch":
            return
    for child in model.children():
        yield from handled_layers(child)
