"""DP-SGD in two backward passes: the first finds every sample's gradient norm, the second the sum of the clipped ones.

No weight keeps the gradients of all samples, so memory hardly grows with the batch. The two trainers differ in how the
norm is found: ghost clipping from products over positions (T x T for each sample) for linear layers and embeddings,
fast gradient clipping from each layer's per-sample gradients, made and dropped layer by layer.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn

from flopwatch.sweep.trainers.losses import PerSampleLosses, find_per_sample_losses, model_inputs
from flopwatch.sweep.trainers.opacus_parts import clip_and_keep, load_opacus
from flopwatch.sweep.trainers.options import autocast, make_optimizer, read_options
from flopwatch.sweep.trainers.protocol import TrainerSettings
from flopwatch.sweep.trainers.unsupported import check_supported


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
