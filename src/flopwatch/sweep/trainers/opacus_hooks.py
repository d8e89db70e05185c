"""DP-SGD as Opacus does it by default: every sample's gradient of every weight is made, kept, clipped and summed."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from flopwatch.sweep.trainers.losses import PerSampleLosses, find_per_sample_losses, model_inputs
from flopwatch.sweep.trainers.opacus_parts import clip_and_keep, load_opacus
from flopwatch.sweep.trainers.options import autocast, make_optimizer, read_options
from flopwatch.sweep.trainers.protocol import TrainerSettings
from flopwatch.sweep.trainers.unsupported import check_supported


class DPSGDTrainer:
    """Per-sample gradients by hooks; memory grows with batch size x parameters."""

    def __init__(self, model: nn.Module, settings: TrainerSettings) -> None:
        check_supported("dpsgd", model)
        opacus, options = load_opacus(), read_options(settings.options)
        self.settings = settings
        self.plain_model = model.train()
        self.model = opacus.hooks_module(model, loss_reduction="mean")
        self.optimizer = opacus.hooks_optimizer(
            make_optimizer(model, options.lr),
            noise_multiplier=options.noise_multiplier,
            max_grad_norm=options.max_grad_norm,
            expected_batch_size=settings.batch_size,
        )
        self._losses: PerSampleLosses | None = None

    def forward(self, batch: Mapping[str, Any]) -> torch.Tensor:
        with autocast(self.settings):
            self._losses = self._losses or find_per_sample_losses(self.plain_model, batch)
            return self._losses(self.model(**model_inputs(self.plain_model, batch)), batch).mean()

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def accumulate(self) -> None:
        clip_and_keep(self.optimizer)

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
