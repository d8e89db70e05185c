"""The loss of a model's output, for the batch and for each sample.

A model that returns logits for a batch with labels, but no loss, is trained with their cross-entropy.

DP trainers clip the gradient of every sample, so they need the loss of every sample. It is derived from the model's
own loss: of the usual ways to compare logits with labels, the one whose mean equals that loss.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  torch's usual alias
from torch.nn.parallel import DistributedDataParallel

from flopwatch.errors import UnsupportedError

PerSampleLosses = Callable[[Any, Mapping[str, Any]], torch.Tensor]
"""From the model's output and the batch to the loss of each sample, of shape (batch size,)."""

_IGNORED = -100  # the label that torch's cross-entropy ignores by default
_SAME = 1e-3  # above the error of logits rounded to bf16; a wrong shift of the labels differs by more
_ADVICE = "give the model a method per_sample_losses(output, batch) that returns one loss for each sample"


def own_loss(model: nn.Module, output: Any, batch: Mapping[str, Any]) -> torch.Tensor:
    """The loss the model itself returns; else the mean of its `per_sample_losses`, or of logits against labels."""
    loss: torch.Tensor | None = _part(output, "loss")
    if loss is None and isinstance(output, torch.Tensor) and output.dim() == 0:
        loss = output
    if loss is None and hasattr(model, "per_sample_losses"):
        loss = model.per_sample_losses(output, batch).mean()  # type: ignore[operator]
    if loss is None and _is_classified(output, batch):
        loss = label_losses(output, batch).mean()
    if loss is None:
        raise UnsupportedError(
            f"{type(model).__name__} returned {_described(output)} without a loss for a batch of "
            f"{', '.join(batch)}; let its forward take labels and return a dict with 'loss', or {_ADVICE}"
        )
    return loss


def takes_labels(model: nn.Module) -> bool:
    """Whether the model's forward takes the labels, as in transformers; most image models do not."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    parameters = inspect.signature(inner.forward).parameters.values()
    return any(one.name == "labels" or one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters)


def forward_inputs(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
    """The part of the batch that the model's forward takes."""
    return dict(batch) if takes_labels(model) else {name: batch[name] for name in batch if name != "labels"}


def model_inputs(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
    """The batch without labels, so that the model does not compute an unused loss.

    An encoder-decoder derives its decoder's input from the labels, so it keeps them.
    """
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return dict(batch)
    return {name: value for name, value in batch.items() if name != "labels"}


def find_per_sample_losses(model: nn.Module, batch: Mapping[str, Any]) -> PerSampleLosses:
    """The per-sample losses whose mean is the model's own loss, found on the first sample of the batch."""
    if hasattr(model, "per_sample_losses"):
        return model.per_sample_losses  # type: ignore[return-value]
    row = {name: value[:1] if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
    with torch.no_grad():
        output = model(**forward_inputs(model, row))
        logits, loss, labels = _logits(output), _part(output, "loss"), row.get("labels")
        if loss is None and _is_classified(output, row):
            return label_losses
        if logits is None or loss is None or labels is None:
            raise UnsupportedError(
                f"the loss of each sample is unknown: {type(model).__name__} returned {_listed(output)} for a "
                f"batch of {', '.join(batch)}, and flopwatch needs logits, loss and labels; {_ADVICE}"
            )
        fitting = [losses for losses in (next_token_losses, label_losses) if _fits(losses, logits, labels)]
        distances = {losses: abs(float(losses(output, row).mean() / loss) - 1) for losses in fitting}
    closest = min(distances, key=distances.__getitem__, default=None)
    if closest is None or not distances[closest] <= _SAME:
        raise UnsupportedError(
            f"the loss of {type(model).__name__} ({float(loss):.4g}) is not the mean cross-entropy of its logits "
            f"{tuple(logits.shape)} against labels {tuple(labels.shape)}, shifted or not, so the loss of each sample "
            f"is unknown; {_ADVICE}"
        )
    return closest


def next_token_losses(output: Any, batch: Mapping[str, Any]) -> torch.Tensor:
    """For causal language models: position i predicts label i + 1. The mean over the positions of each sample."""
    return _mean_cross_entropy(_logits(output)[:, :-1], batch["labels"][:, 1:])


def label_losses(output: Any, batch: Mapping[str, Any]) -> torch.Tensor:
    """For masked language models and classifiers: each position has its own label."""
    return _mean_cross_entropy(_logits(output), batch["labels"])


def _mean_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    # In at least fp32, as in transformers: with a large vocabulary bf16 is too coarse for the loss.
    wide = logits if logits.dtype == torch.float64 else logits.float()
    each = F.cross_entropy(wide.flatten(0, -2), labels.flatten(), ignore_index=_IGNORED, reduction="none")
    each, counted = each.view(len(labels), -1), (labels != _IGNORED).view(len(labels), -1)
    return each.sum(1) / counted.sum(1).clamp(min=1)


def _fits(losses: PerSampleLosses, logits: torch.Tensor, labels: torch.Tensor) -> bool:
    positions = logits.shape[:-1] == labels.shape and not labels.is_floating_point()
    return positions and (labels.dim() > 1 if losses is next_token_losses else True)


def _is_classified(output: Any, batch: Mapping[str, Any]) -> bool:
    logits, labels = _logits(output), batch.get("labels")
    if not isinstance(logits, torch.Tensor) or not isinstance(labels, torch.Tensor):
        return False
    return _fits(label_losses, logits, labels)


def _logits(output: Any) -> Any:
    return output if isinstance(output, torch.Tensor) and output.dim() > 1 else _part(output, "logits")


def _described(output: Any) -> str:
    shape = f" {tuple(output.shape)}" if isinstance(output, torch.Tensor) else ""
    return type(output).__name__ + shape


def _part(output: Any, name: str) -> Any:
    return output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)


def _listed(output: Any) -> str:
    return ", ".join(output) if isinstance(output, Mapping) else _described(output)
