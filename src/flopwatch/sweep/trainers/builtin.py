"""The built-in trainers and the losses they train with: standard training, and three variants of DP-SGD by Opacus."""

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  torch's usual alias
from torch.nn.parallel import DistributedDataParallel

from flopwatch.errors import InputError, UnsupportedError
from flopwatch.records.privacy import Privacy
from flopwatch.sweep.trainers.batch import batch_rows
from flopwatch.sweep.trainers.opacus_internals import clip_and_accumulate, load_opacus
from flopwatch.sweep.trainers.options import read_options
from flopwatch.sweep.trainers.protocol import TrainerSettings
from flopwatch.sweep.trainers.unsupported import check_supported, explained_failures

# Losses. If a model returns logits but no loss, the loss is the cross-entropy of the logits and the batch's labels.
#
# DP trainers clip the gradient of every sample, so they need the loss of every sample, which most models do not return.
# `find_per_sample_losses` computes the usual cross-entropies of logits and labels, and takes the one whose mean equals
# the loss that the model returns.

PerSampleLosses = Callable[[Any, Mapping[str, Any]], torch.Tensor]
"""A function of the model's output and the batch that returns the loss of each sample, of shape (batch size,)."""

_IGNORED = -100  # the label that torch's cross-entropy ignores by default
_SAME = 1e-3  # losses count as equal below this relative difference; bf16 causes less, a wrong shift of labels more
_ADVICE = "give the model a method per_sample_losses(output, batch) that returns one loss for each sample"


def own_loss(model: nn.Module, output: Any, batch: Mapping[str, Any]) -> torch.Tensor:
    """The loss that the model returns; else the mean of its `per_sample_losses`, or of the logits' cross-entropy."""
    loss: torch.Tensor | None = _part(output, "loss")
    if loss is None and isinstance(output, torch.Tensor) and output.dim() == 0:
        loss = output
    if loss is None and hasattr(model, "per_sample_losses"):
        loss = model.per_sample_losses(output, batch).mean()  # type: ignore[operator]
    if loss is None and _fitting(output, batch):
        loss = label_losses(output, batch).mean()
    if loss is None:
        raise UnsupportedError(
            f"{type(model).__name__} returned no loss ({_described(output)}) for a batch of {', '.join(batch)}; let "
            f"its forward take labels and return a dict with 'loss', or {_ADVICE}"
        )
    return loss


def takes_labels(model: nn.Module) -> bool:
    """Whether the model's forward has an argument `labels`, as in transformers; most image models have none."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    parameters = inspect.signature(inner.forward).parameters.values()
    return any(one.name == "labels" or one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters)


def forward_inputs(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
    return dict(batch) if takes_labels(model) else _without_labels(batch)


def model_inputs(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
    """The batch without labels, so that the model does not compute a loss that is not used.

    Labels stay for an encoder-decoder, because it makes its decoder's input from them.
    """
    is_encoder_decoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    return dict(batch) if is_encoder_decoder else _without_labels(batch)


def _without_labels(batch: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in batch.items() if name != "labels"}


def find_per_sample_losses(model: nn.Module, batch: Mapping[str, Any]) -> PerSampleLosses:
    """A function that returns per-sample losses whose mean is the model's own loss, checked on the first sample."""
    if hasattr(model, "per_sample_losses"):
        return model.per_sample_losses  # type: ignore[return-value]
    row = {name: value[:1] if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
    with torch.no_grad():
        output = model(**forward_inputs(model, row))
        logits, loss, labels = _logits(output), _part(output, "loss"), row.get("labels")
        if loss is None and _fitting(output, row):
            return label_losses
        if logits is None or loss is None or labels is None:
            returned = ", ".join(output) if isinstance(output, Mapping) else _described(output)
            raise UnsupportedError(
                f"flopwatch needs logits, loss and labels to find the loss of each sample, but {type(model).__name__} "
                f"returned {returned} for a batch of {', '.join(batch)}; {_ADVICE}"
            )
        distances = {losses: abs(float(losses(output, row).mean() / loss) - 1) for losses in _fitting(output, row)}
    closest = min(distances, key=distances.__getitem__, default=None)
    if closest is None or not distances[closest] <= _SAME:
        raise UnsupportedError(
            f"the loss of each sample is unknown, because {type(model).__name__}'s loss ({float(loss):.4g}) is not the "
            f"mean cross-entropy of its logits {tuple(logits.shape)} and the labels {tuple(labels.shape)}, shifted "
            f"by one position or not; {_ADVICE}"
        )
    return closest


def next_token_losses(output: Any, batch: Mapping[str, Any]) -> torch.Tensor:
    """The mean loss of each sample of a causal language model, where position i predicts label i + 1."""
    return _mean_cross_entropy(_logits(output)[:, :-1], batch["labels"][:, 1:])


def label_losses(output: Any, batch: Mapping[str, Any]) -> torch.Tensor:
    """The mean loss of each sample of a masked language model or classifier, where position i predicts label i."""
    return _mean_cross_entropy(_logits(output), batch["labels"])


def _mean_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    # The loss is computed in fp32 or fp64, as in transformers, because bf16 is too coarse for a large vocabulary.
    wide = logits if logits.dtype == torch.float64 else logits.float()
    each = F.cross_entropy(wide.flatten(0, -2), labels.flatten(), ignore_index=_IGNORED, reduction="none")
    each, counted = each.view(len(labels), -1), (labels != _IGNORED).view(len(labels), -1)
    return each.sum(1) / counted.sum(1).clamp(min=1)


def _fitting(output: Any, batch: Mapping[str, Any]) -> list[PerSampleLosses]:
    """The cross-entropies that logits and labels have the right shapes for."""
    logits, labels = _logits(output), batch.get("labels")
    if not isinstance(logits, torch.Tensor) or not isinstance(labels, torch.Tensor):
        return []
    if logits.shape[:-1] != labels.shape or labels.is_floating_point():
        return []
    return [next_token_losses, label_losses] if labels.dim() > 1 else [label_losses]


def _logits(output: Any) -> Any:
    return output if isinstance(output, torch.Tensor) and output.dim() > 1 else _part(output, "logits")


def _described(output: Any) -> str:
    shape = f" {tuple(output.shape)}" if isinstance(output, torch.Tensor) else ""
    return type(output).__name__ + shape


def _part(output: Any, name: str) -> Any:
    return output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)


def make_optimizer(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """AdamW, because transformers are trained with it; every trainer uses it, so that their costs are comparable."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trainable:
        raise UnsupportedError(f"{type(model).__name__} has no parameter that requires a gradient; unfreeze one")
    return torch.optim.AdamW(trainable, lr=lr)


def autocast(settings: TrainerSettings) -> AbstractContextManager[Any]:
    if settings.dtype == "fp32":
        return nullcontext()
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(settings.dtype)
    if dtype is None:
        raise InputError(f"dtype must be fp32, bf16 or fp16, got {settings.dtype!r}")
    return torch.autocast(settings.device.type, dtype=dtype)


def enable_checkpointing(model: nn.Module) -> None:
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


class StandardTrainer:
    """Standard training with AdamW, without differential privacy."""

    def __init__(self, model: nn.Module, settings: TrainerSettings) -> None:
        self.model = model.train()
        self.settings = settings
        self.optimizer = make_optimizer(model, read_options(settings.options).lr)
        self._takes_labels = takes_labels(model)

    def forward(self, batch: Mapping[str, Any]) -> torch.Tensor:
        inputs = batch if self._takes_labels else _without_labels(batch)
        with autocast(self.settings):
            loss = own_loss(self.model, self.model(**inputs), batch)
        if self.settings.micro_batch_size is None:
            return loss
        # The mean loss of the batch is the sum of the micro-batches' means, weighted by their shares of the samples.
        return loss * (batch_rows(batch) / self.settings.batch_size)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def accumulate(self) -> None:
        """Does nothing, because autograd adds the gradients of the next micro-batch to the present ones."""

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


class _PrivateTrainer:
    """DP-SGD by Opacus: per-sample losses, clipped gradients, and an AdamW update with noise.

    Except for `dpsgd` it runs two backward passes: the first computes the gradient norm of every sample, the second
    the sum of the clipped gradients. No per-sample gradients are kept, so memory hardly grows with the batch.
    """

    name: str

    def __init__(self, model: nn.Module, settings: TrainerSettings) -> None:
        check_supported(self.name, model)
        opacus, options = load_opacus(), read_options(settings.options)
        noise, norm = options.noise_multiplier, options.max_grad_norm
        self.settings = settings
        self.privacy = Privacy(noise, norm)
        self.plain_model = model.train()
        self._two_pass_loss: Any = None
        if self.name == "dpsgd":
            self.model, optimizer = opacus.GradSampleModule(model, loss_reduction="mean"), opacus.DPOptimizer
        else:
            self.model = opacus.GradSampleModuleFastGradientClipping(
                model, loss_reduction="mean", max_grad_norm=norm, use_ghost_clipping=self.name == "ghost"
            )
            optimizer = opacus.DPOptimizerFastGradientClipping
            self._two_pass_loss = opacus.DPTensorFastGradientClipping
        self.optimizer = optimizer(
            make_optimizer(model, options.lr),
            noise_multiplier=noise,
            max_grad_norm=norm,
            expected_batch_size=settings.batch_size,
        )
        self._losses: PerSampleLosses | None = None

    def forward(self, batch: Mapping[str, Any]) -> Any:
        if self._losses is None:
            # In a region of its own: in torch 2.10 and earlier, autocast keeps weights that it has converted for the
            # rest of the region, and weights that were converted without gradients get none.
            with autocast(self.settings), explained_failures(self.plain_model):
                self._losses = find_per_sample_losses(self.plain_model, batch)
        with autocast(self.settings), explained_failures(self.plain_model):
            losses = self._losses(self.model(**model_inputs(self.plain_model, batch)), batch)
        if self._two_pass_loss is None:
            return losses.mean()
        return self._two_pass_loss(self.model, self.optimizer, losses, "mean")

    def backward(self, loss: Any) -> None:
        with explained_failures(self.plain_model):
            loss.backward()

    def accumulate(self) -> None:
        clip_and_accumulate(self.optimizer)

    def update(self) -> None:
        with explained_failures(self.plain_model):
            self.optimizer.step()
        self.optimizer.zero_grad()


class DPSGDTrainer(_PrivateTrainer):
    """DP-SGD as Opacus does it by default: hooks keep per-sample gradients, so memory grows with batch x parameters."""

    name = "dpsgd"


class DPGhostClippingTrainer(_PrivateTrainer):
    """Two-pass DP-SGD that computes the norms of linear layers and embeddings from products of all pairs of positions,
    without per-sample gradients, so that the cost grows with the square of the sequence length.
    """

    name = "ghost"


class DPFastGradientClippingTrainer(_PrivateTrainer):
    """Two-pass DP-SGD that computes norms from per-sample gradients, one layer at a time."""

    name = "fast"
