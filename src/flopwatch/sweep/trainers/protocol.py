"""What a trainer is: built with a model, then three methods per step, so that each can be timed and its memory read."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class TrainerSettings:
    """What a trainer is told besides the model.

    Attributes:
        batch_size: Samples per step; every step has as many, in one batch or in several micro-batches.
        device: Where model and batch are.
        dtype: `fp32`, or `bf16` and `fp16` by autocast.
        options: The `options` of the trial, such as `lr`, `max_grad_norm`, `noise_multiplier`.
        micro_batch_size: Samples of each micro-batch, the last of which may have fewer; None is the whole batch.
    """

    batch_size: int
    device: torch.device
    dtype: str = "fp32"
    options: Mapping[str, Any] = field(default_factory=dict)
    micro_batch_size: int | None = None


class Trainer(Protocol):
    """A way to train. Yours is `package.module:Class`.

    Raise `flopwatch.errors.UnsupportedError` in `__init__` or `forward` for a model it cannot train, with the reason.
    A model may help the built-in trainers: `trial_batch(batch_size, seq_len)` makes its batch, and
    `per_sample_losses(output, batch)` tells the loss of each sample where it is no cross-entropy of logits.
    For batches in parts (`micro_batch_size`) a trainer has a fourth method, `accumulate()`: it is called after the
    backward pass of every part but the last, and the loss of a part counts by its share of `settings.batch_size`.

    >>> class Plain:
    ...     def __init__(self, model, settings):
    ...         self.model, self.optimizer = model, torch.optim.SGD(model.parameters(), lr=0.1)
    ...     def forward(self, batch):
    ...         return self.model(**batch)["loss"]
    ...     def backward(self, loss):
    ...         loss.backward()
    ...     def update(self):
    ...         self.optimizer.step()
    ...         self.optimizer.zero_grad()
    """

    def __init__(self, model: nn.Module, settings: TrainerSettings) -> None: ...

    def forward(self, batch: Mapping[str, Any]) -> Any:
        """Run the model; return the loss."""

    def backward(self, loss: Any) -> None:
        """Make the gradients."""

    def update(self) -> None:
        """Change the weights and forget the gradients."""
