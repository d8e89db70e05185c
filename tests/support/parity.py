"""Compares the clipped gradients of the DP trainers with those of a loop over the samples."""

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn

from flopwatch.records.trial import PRIVATE
from flopwatch.sweep.trainers.batch import batch_rows
from flopwatch.sweep.trainers.builtin import find_per_sample_losses, model_inputs
from flopwatch.sweep.trainers.protocol import TrainerSettings, load_trainer

_ROUNDING = 1e-4
"""Differences are relative to the norm of a parameter's gradient, but at least to this share of the norm of all
gradients, because a gradient that would be zero in exact arithmetic (an attention key's bias) is only rounding error.
"""

Gradients = dict[str, torch.Tensor]


def parity(
    model: nn.Module, batch: Mapping[str, Any], *, trainers: Sequence[str] = PRIVATE, max_grad_norm: float | None = None
) -> dict[str, float]:
    """The difference between each DP trainer's clipped mean gradient and that of a loop over the samples.

    It is the largest relative difference of any parameter's gradient: about 1e-6 in fp32. Noise and dropout are off.
    The model is copied and not changed. The norm to clip to is by default the median, so that half are clipped.

    Example:
        >>> from flopwatch.models.load import load_model
        >>> from flopwatch.sweep.trainers.batch import trial_batch
        >>> model = load_model("tiny", device="cpu")
        >>> max(parity(model, trial_batch(model, 3, 8, 0, "cpu")).values()) < 1e-4
        True
    """
    plain = without_dropout(copy.deepcopy(model)).train()
    samples = sample_gradients(plain, batch)
    norms = [_norm(sample.values()) for sample in samples]
    limit = max_grad_norm or float(torch.stack(norms).median())
    # Opacus adds the same 1e-6 to avoid a division by zero.
    factors = [(limit / (norm + 1e-6)).clamp(max=1.0) for norm in norms]
    expected = {
        name: torch.stack([f * sample[name] for f, sample in zip(factors, samples, strict=True)]).mean(0)
        for name in samples[0]
    }
    return {
        trainer: _difference(trainer_gradients(trainer, copy.deepcopy(plain), batch, limit), expected)
        for trainer in trainers
    }


def sample_gradients(model: nn.Module, batch: Mapping[str, Any]) -> list[Gradients]:
    """The gradients of each sample, computed one sample at a time by autograd."""
    losses = find_per_sample_losses(model, batch)
    names, parameters = zip(*((n, p) for n, p in model.named_parameters() if p.requires_grad), strict=True)
    found = []
    for index in range(batch_rows(batch)):
        row = {k: v[index : index + 1] if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
        loss = losses(model(**model_inputs(model, row)), row).sum()
        gradients = torch.autograd.grad(loss, parameters, materialize_grads=True)
        found.append(dict(zip(names, gradients, strict=True)))
    return found


def trainer_gradients(trainer: str, model: nn.Module, batch: Mapping[str, Any], max_grad_norm: float) -> Gradients:
    """The clipped mean gradients that a built-in DP trainer gives to AdamW, without noise."""
    device = next(model.parameters()).device
    options = {"noise_multiplier": 0.0, "max_grad_norm": max_grad_norm}
    settings = TrainerSettings(batch_rows(batch), device, options=options)
    instance: Any = load_trainer(trainer)(model, settings)
    instance.backward(instance.forward(batch))
    instance.optimizer.pre_step()  # clips, adds noise and scales, without the step of the inner optimizer
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad and p.grad is not None}


def _difference(found: Gradients, expected: Gradients) -> float:
    floor = _ROUNDING * _norm(expected.values())
    worst = 0.0
    for name, gradient in expected.items():
        off = (found[name] - gradient).norm() if name in found else gradient.norm()
        worst = max(worst, float(off / torch.maximum(gradient.norm(), floor)))
    return worst


def _norm(gradients: Iterable[torch.Tensor]) -> torch.Tensor:
    norms = torch.stack([torch.linalg.vector_norm(gradient) for gradient in gradients])
    return cast("torch.Tensor", torch.linalg.vector_norm(norms))


def without_dropout(model: nn.Module) -> nn.Module:
    """Turn dropout off in this model, because it would draw other random numbers for one sample than for a batch."""
    for module in model.modules():
        if isinstance(module, nn.Dropout | nn.Dropout1d | nn.Dropout2d | nn.Dropout3d):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)
    return model
