"""Ordinary training: forward, backward, AdamW."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from flopwatch.sweep.trainers.batch import batch_rows
from flopwatch.sweep.trainers.losses import (
    PerSampleLosses,
    find_per_sample_losses,
    model_inputs,
    own_loss,
    takes_labels,
)
from flopwatch.sweep.trainers.opacus_internals import clip_and_keep, load_opacus
from flopwatch.sweep.trainers.options import autocast, make_optimizer, read_options
from flopwatch.sweep.trainers.protocol import TrainerSettings
from flopwatch.sweep.trainers.unsupported import check_supported


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


# DP-SGD as Opacus does it by default: every sample's gradient of every weight is made, kept, clipped and summed.


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


# DP-SGD in two backward passes: the first finds every sample's gradient norm, the second the sum of the clipped ones.
#
# No weight keeps the gradients of all samples, so memory hardly grows with the batch. The two trainers differ in how
# the norm is found: ghost clipping from products over positions (T x T for each sample) for linear layers and
# embeddings, fast gradient clipping from each layer's per-sample gradients, made and dropped layer by layer.


class _TwoPassTrainer:
    name: str

    def __init__(self, model: nn.Module, settings: TrainerSettings) -> None:
        check_supported(self.name, model)
        self._opacus, options = load_opacus(), read_options(settings.options)
        self.settings = settings
        self.plain_model = model.train()
        self.model = self._opacus.two_pass_module(
            model,
            loss_reduction="mean",
            max_grad_norm=options.max_grad_norm,
            use_ghost_clipping=self.name == "ghost",
        )
        self.optimizer = self._opacus.two_pass_optimizer(
            make_optimizer(model, options.lr),
            noise_multiplier=options.noise_multiplier,
            max_grad_norm=options.max_grad_norm,
            expected_batch_size=settings.batch_size,
        )
        self._losses: PerSampleLosses | None = None

    def forward(self, batch: Mapping[str, Any]) -> Any:
        with autocast(self.settings):
            self._losses = self._losses or find_per_sample_losses(self.plain_model, batch)
            losses = self._losses(self.model(**model_inputs(self.plain_model, batch)), batch)
        return self._opacus.two_pass_loss(self.model, self.optimizer, losses, "mean")

    def backward(self, loss: Any) -> None:
        loss.backward()  # both passes

    def accumulate(self) -> None:
        clip_and_keep(self.optimizer)

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


class DPGhostClippingTrainer(_TwoPassTrainer):
    """Norms without per-sample gradients; its cost grows with the square of the sequence length."""

    name = "ghost"


class DPFastGradientClippingTrainer(_TwoPassTrainer):
    """Norms from one layer's per-sample gradients at a time."""

    name = "fast"
