"""Finds out why a DP trainer cannot train a model and what to do about it.

Opacus itself gives no message or a misleading one for a model that it cannot train.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from torch import nn

from flopwatch.errors import UnsupportedError
from flopwatch.sweep.trainers.opacus_internals import (
    MISSING_GRADIENT_SIGNS,
    has_ghost_norm,
    has_gradient_hook,
    without_sample_gradients,
)
from flopwatch.text import first_line, listed
from flopwatch.torch_internals.modules import ANY_BATCH_NORM

_MOST_NAMED = 3


def check_supported(trainer: str, model: nn.Module) -> None:
    """Raise UnsupportedError if this DP trainer cannot train this model, which may be on the meta device."""
    # Set by transformers and flopwatch's presets; other ways of checkpointing are not recognised.
    if any(getattr(module, "gradient_checkpointing", False) is True for module in model.modules()):
        raise UnsupportedError(
            "gradient checkpointing runs every layer a second time in the backward pass, and Opacus then counts the "
            "layer twice; turn checkpointing off for DP trainers"
        )
    _check_buffers(model)
    if inside := _tied_inside(model):
        raise UnsupportedError(
            f"Opacus cannot differentiate a layer with tied weights ({' and '.join(inside)}); untie them "
            "(tie_word_embeddings: false in the config)"
        )
    if tied := tied_parameters(model) if trainer == "ghost" else []:
        raise UnsupportedError(
            f"the weights {' and '.join(tied)} are tied, but ghost clipping computes the norm of each layer by "
            "itself; untie them (tie_word_embeddings: false in the config) or use the trainer `fast`"
        )


def _check_buffers(model: nn.Module) -> None:
    trainable = (m for m in model.named_modules() if any(p.requires_grad for p in m[1].parameters(recurse=False)))
    found = [(name, module) for name, module in trainable if next(module.buffers(), None) is not None]
    if batch_norms := [name for name, module in found if isinstance(module, ANY_BATCH_NORM)]:
        raise UnsupportedError(
            f"BatchNorm ({listed(batch_norms, _MOST_NAMED)}) mixes the samples of a batch, so that gradients per "
            "sample do not exist; use GroupNorm or LayerNorm (opacus.validators.ModuleValidator.fix replaces BatchNorm)"
        )
    for name, module in found[:1]:
        buffers = [buffer for buffer, _ in module.named_buffers()]
        raise UnsupportedError(
            f"Opacus does not support a layer with both parameters and buffers, such as {name} "
            f"({type(module).__name__} with {listed(buffers, _MOST_NAMED)}); make its buffers plain attributes, or "
            "freeze the layer"
        )


def _tied_inside(model: nn.Module) -> list[str]:
    """Find a parameter with several names in one layer that Opacus runs with functorch. Return these names, or [].

    BERT's output head is a layer with such a parameter, its bias.
    """
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
    """All names of a trainable parameter that several layers share, one of them with ghost clipping; empty if none.

    If that layer runs second, Opacus raises an exception; otherwise Opacus silently computes a wrong gradient norm.
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


@contextmanager
def explained_failures(model: nn.Module) -> Iterator[None]:
    """Raise UnsupportedError with the true reason if Opacus fails with a message that is known to mislead."""
    try:
        yield
    except Exception as error:
        reason = _meaning(first_line(error, 1000), model)
        if reason is None:
            raise
        raise UnsupportedError(reason) from error


def _meaning(message: str, model: nn.Module) -> str | None:
    if any(sign in message for sign in MISSING_GRADIENT_SIGNS) and (idle := without_sample_gradients(model)):
        return (
            f"{listed(idle, _MOST_NAMED)} got no gradient in the step, but Opacus needs a gradient for every trainable "
            "parameter; freeze the parameter (requires_grad = False), or remove it from the model"
        )
    for sign, meaning in _MEANINGS.items():
        if sign in message:
            return meaning if sign == _MISLEADING else f"{meaning}; the message was: {message}"
    return None


# Parts of messages of Opacus 1.6 and torch 2.13, and what they mean. Other messages are shown unchanged.
_MISLEADING = "Parameter tying is not supported"
_MEANINGS = {
    _MISLEADING: (
        "a layer runs more than once in a step (a shared layer, or checkpointing in the model's own code), but ghost "
        "clipping computes the norm of each run separately; use the trainer `fast` or `dpsgd`"
    ),
    "required positional argument: 'labels'": (
        "private trainers call the model's forward without labels, because they compute the loss of each sample from "
        "its output; give the argument `labels` the default None, and return the logits without a loss then"
    ),
    "required positional argument": (
        "a layer with parameters takes more than one input (as in a mixture of experts), but Opacus passes only the "
        "first input when it differentiates the layer"
    ),
    "object has no attribute 'detach'": (
        "a layer with parameters takes an argument that is not a tensor, which Opacus does not support"
    ),
    "stack expects each tensor to be equal size": (
        "Opacus needs the samples as the first dimension of every layer's input, but a layer has another input (one "
        "row for all samples, or all tokens in one list, as in a mixture of experts)"
    ),
}


Path = Literal["ghost", "hook", "functorch"]
"""How Opacus handles a layer of a given class: `ghost` computes only gradient norms, `hook` computes per-sample
gradients by a formula, and `functorch` runs the layer again and differentiates it under vmap.
"""


def path_of(trainer: str, layer: nn.Module) -> Path:
    if trainer == "ghost" and has_ghost_norm(layer):
        return "ghost"
    return "hook" if has_gradient_hook(layer) else "functorch"


def handled_layers(model: nn.Module) -> Iterator[nn.Module]:
    """The modules to which Opacus adds hooks; it adds none inside a module that it handles with functorch."""
    if any(parameter.requires_grad for parameter in model.parameters(recurse=False)):
        yield model
        if path_of("dpsgd", model) == "functorch":
            return
    for child in model.children():
        yield from handled_layers(child)
