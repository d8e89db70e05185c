"""Ordinary training: forward, backward, AdamW."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from flopwatch.sweep.trainers.losses import own_loss, takes_labels
from flopwatch.sweep.trainers.micro_batches import batch_rows
from flopwatch.sweep.trainers.options import autocast, make_optimizer, read_options
from flopwatch.sweep.trainers.protocol import TrainerSettings


class StandardTrainer:
    """What the others are compared with."""

    def __init__(self, model: nn.Module, settings: TrainerSettings) -> None:
        self.model = model.train()
        self.settings = settings
        self.optimizer = make_optimizer(model, read_options(settings.options).lr)

        self._takes_labels = takes_labels(model)

    def forward(self, batch: Mapping[str, Any]) -> torch.Tensor:
        inputs = batch if self._takes_labels else {name: batch[name] for name in batch if name != "labels"}
        with autocast(self.settings):
            loss = own_loss(self.model, self.model(**inputs), batch)
        if self.settings.micro_batch_size is None:
            return loss
        # The mean over the whole batch is made of the micro-batches' means by their shares.
        return loss * (batch_rows(batch) / self.settings.batch_size)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def accumulate(self) -> None:
        """Autograd adds the next micro-batch's gradients to these."""

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
