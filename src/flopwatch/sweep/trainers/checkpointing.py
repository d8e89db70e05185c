"""Gradient checkpointing, switched on and seen."""

from typing import TYPE_CHECKING

from flopwatch.errors import UnsupportedError

if TYPE_CHECKING:
    from torch import nn


def enable_checkpointing(model: "nn.Module") -> None:
    """Have the model run its blocks a second time in the backward pass instead of keeping what they computed."""
    enable = getattr(model, "gradient_checkpointing_enable", None)
    if enable is None:
        raise UnsupportedError(
            f"{type(model).__name__} has no gradient_checkpointing_enable(); leave checkpointing out, or give it one"
        )
    try:
        enable()
    except ValueError as error:  # transformers, for architectures without it
        raise UnsupportedError(f"{type(model).__name__} cannot do gradient checkpointing: {error}") from error


def is_checkpointing(model: "nn.Module") -> bool:
    """True where transformers, or the presets, have it switched on; a model's own code is not looked into."""
    return any(getattr(module, "gradient_checkpointing", False) is True for module in model.modules())
