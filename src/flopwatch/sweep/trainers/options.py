"""The options of the built-in trainers, their optimizer, autocast and gradient checkpointing.

Functions import torch when they are called, because a matrix is checked in a process that must not load torch.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from difflib import get_close_matches
from math import isfinite
from typing import TYPE_CHECKING, Any

from flopwatch.errors import InputError, UnsupportedError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from flopwatch.sweep.trainers.protocol import TrainerSettings


_AUTOCAST = {"bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True, slots=True)
class TrainerOptions:
    """The `options` of a trial with a built-in trainer.

    Attributes:
        lr: Learning rate.
        max_grad_norm: The norm that the gradient of every sample is clipped to; the standard trainer does not clip.
        noise_multiplier: Standard deviation of the noise divided by `max_grad_norm`; the standard trainer adds none.
    """

    lr: float = 1e-3
    max_grad_norm: float = 1.0
    noise_multiplier: float = 1.0


def read_options(options: Mapping[str, Any]) -> TrainerOptions:
    """Check the options. Each built-in trainer accepts all of them, because a sweep gives every trainer the same ones.

    >>> read_options({"max_grad_norm": 0.1}).max_grad_norm
    0.1
    """
    known = [field.name for field in fields(TrainerOptions)]
    for name, value in options.items():
        if name not in known:
            raise InputError(
                f"the built-in trainers have no option {name!r}; they have {', '.join(known)}{_meant(name, known)}"
            )
        if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value) or value < 0:
            raise InputError(f"option {name} must be a number of at least 0, got {value!r}")
    if options.get("max_grad_norm") == 0:
        raise InputError("option max_grad_norm must be above 0, because 0 would clip every gradient to zero")
    return TrainerOptions(**options)


def _meant(name: str, known: list[str]) -> str:
    near = get_close_matches(name, known, n=1)
    return f". Did you mean {near[0]!r}?" if near else ""


def make_optimizer(model: "nn.Module", lr: float) -> "torch.optim.Optimizer":
    """AdamW, because transformers are trained with it; every trainer uses it, so that their costs are comparable."""
    import torch

    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trainable:
        raise UnsupportedError(f"{type(model).__name__} has no parameter that requires a gradient; unfreeze one")
    return torch.optim.AdamW(trainable, lr=lr)


def autocast(settings: "TrainerSettings") -> AbstractContextManager[Any]:
    """The autocast context of the forward pass."""
    if settings.dtype == "fp32":
        return nullcontext()
    if settings.dtype not in _AUTOCAST:
        raise InputError(f"dtype must be fp32, bf16 or fp16, got {settings.dtype!r}")
    import torch

    return torch.autocast(settings.device.type, dtype=getattr(torch, _AUTOCAST[settings.dtype]))


def enable_checkpointing(model: "nn.Module") -> None:
    """Let the model recompute its blocks in the backward pass instead of storing their activations."""
    enable = getattr(model, "gradient_checkpointing_enable", None)
    if enable is None:
        raise UnsupportedError(
            f"{type(model).__name__} has no gradient_checkpointing_enable(); add it, or leave `checkpointing` out"
        )
    try:
        enable()
    except ValueError as error:  # transformers raises it for architectures without checkpointing
        raise UnsupportedError(f"{type(model).__name__} cannot do gradient checkpointing: {error}") from error


def is_checkpointing(model: "nn.Module") -> bool:
    """Whether checkpointing is enabled in a transformers model or a flopwatch preset; other ways are not recognised."""
    return any(getattr(module, "gradient_checkpointing", False) is True for module in model.modules())
