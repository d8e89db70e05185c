"""Ordinary training: forward, backward, AdamW."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from flopwatch.sweep.trainers.losses import own_loss
from flopwatch.sweep.trainers.options import autocast, make_optimizer, read_options
from flopwatch.sweep.trainers.protocol import TrainerSettings


class StandardTrainer:
    """What the others are compared with."""

    def __init__(self, model: nn.Module, settings: TrainerSettings) -> None:
        self.model = model.train()
        self.settings = settings
        self.optimizer = make_optimizer(model, read_options(settings.options).lr)

    def forward(self, batch: Mapping[str, Any]) -> torch.Tensor:
        with autocast(self.settings):
            return own_loss(self.model, self.model(**batch), batch)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
