"""The built-in trainers: standard training, and DP-SGD by Opacus in three ways. All four use AdamW."""

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
from flopwatch.sweep.trainers.opacus_internals import clip_and_accumulate, load_opacus
from flopwatch.sweep.trainers.options import TrainerOptions, autocast, make_optimizer, read_options
from flopwatch.sweep.trainers.protocol import TrainerSettings
from flopwatch.sweep.trainers.unsupported import check_supported


class StandardTrainer:
    """Standard training, with which the private trainers are compared."""

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
        # The mean loss of the batch is the sum of the micro-batches' means, weighted by their shares of the samples.
        return loss * (batch_rows(batch) / self.settings.batch_size)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def accumulate(self) -> None:
        """Nothing to do: autograd adds the gradients of the next micro-batch to these."""

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


class _PrivateTrainer:
    """What the DP-SGD trainers share: per-sample losses in, a clipped and noised update out."""

    name: str

    def __init__(self, model: nn.Module, settings: TrainerSettings) -> None:
        check_supported(self.name, model)
        self._opacus, options = load_opacus(), read_options(settings.options)
        self.settings = settings
        self.plain_model = model.train()
        self.model = self._wrapped(model, options)
        self.optimizer = self._optimizer_class()(
            make_optimizer(model, options.lr),
            noise_multiplier=options.noise_multiplier,
            max_grad_norm=options.max_grad_norm,
            expected_batch_size=settings.batch_size,
        )
        self._losses: PerSampleLosses | None = None

    def _wrapped(self, model: nn.Module, options: TrainerOptions) -> Any:
        raise NotImplementedError

    def _optimizer_class(self) -> Any:
        raise NotImplementedError

    def _sample_losses(self, batch: Mapping[str, Any]) -> torch.Tensor:
        with autocast(self.settings):
            self._losses = self._losses or find_per_sample_losses(self.plain_model, batch)
            return self._losses(self.model(**model_inputs(self.plain_model, batch)), batch)

    def backward(self, loss: Any) -> None:
        loss.backward()

    def accumulate(self) -> None:
        clip_and_accumulate(self.optimizer)

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


class DPSGDTrainer(_PrivateTrainer):
    """Opacus's default: hooks store the gradient of every sample, so memory grows with batch size x parameters."""

    name = "dpsgd"

    def _wrapped(self, model: nn.Module, options: TrainerOptions) -> Any:
        return self._opacus.hooks_module(model, loss_reduction="mean")

    def _optimizer_class(self) -> Any:
        return self._opacus.hooks_optimizer

    def forward(self, batch: Mapping[str, Any]) -> torch.Tensor:
        return self._sample_losses(batch).mean()


class _TwoPassTrainer(_PrivateTrainer):
    """DP-SGD in two backward passes: the first computes the gradient norm of every sample, the second the sum of the
    clipped gradients. No weight stores the gradients of all samples, so memory hardly grows with the batch.
    """

    def _wrapped(self, model: nn.Module, options: TrainerOptions) -> Any:
        return self._opacus.two_pass_module(
            model,
            loss_reduction="mean",
            max_grad_norm=options.max_grad_norm,
            use_ghost_clipping=self.name == "ghost",
        )

    def _optimizer_class(self) -> Any:
        return self._opacus.two_pass_optimizer

    def forward(self, batch: Mapping[str, Any]) -> Any:
        losses = self._sample_losses(batch)
        return self._opacus.two_pass_loss(self.model, self.optimizer, losses, "mean")


class DPGhostClippingTrainer(_TwoPassTrainer):
    """Norms of linear layers and embeddings from products over positions (T x T for each sample), without per-sample
    gradients; the cost grows with the square of the sequence length.
    """

    name = "ghost"


class DPFastGradientClippingTrainer(_TwoPassTrainer):
    """Norms from per-sample gradients, which are computed and dropped one layer at a time."""

    name = "fast"
