"""Rules of thumb for the FLOPs of a training step, as people use them."""

from types import SimpleNamespace
from typing import Any

import transformers
from torch import nn

from testbeds.architectures import Batch


class DoesNotApplyError(Exception):
    """The rule needs tokens and the model has none."""


def hf_trainer_flops(model: nn.Module, batch: Batch) -> int:
    """What the Trainer adds to `total_flos` for a batch.

    transformers 5.22.2 has the formula in `trainer.py:4194-4211`; the models' own `floating_point_ops` is gone. The
    method needs nothing of a trainer but its model, so the real one is called.
    """
    trainer: Any = SimpleNamespace(model=model)
    return int(transformers.Trainer.floating_point_ops(trainer, batch))


def six_n_flops(model: nn.Module, batch: Batch) -> int:
    return 6 * _all_parameters(model) * _tokens(model, batch)


def seven_and_a_half_n_flops(model: nn.Module, batch: Batch) -> int:
    """2.5 per parameter and token forward, twice that backward (REQUIREMENTS.md, R19)."""
    return round(3 * 2.5 * _all_parameters(model) * _tokens(model, batch))


def _all_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _tokens(model: nn.Module, batch: Batch) -> int:
    if "input_ids" in batch:
        return int(batch["input_ids"].numel())
    config: Any = model.config
    if config.model_type == "vit":
        batch_size, _, height, width = batch["pixel_values"].shape
        return int(batch_size * (height // config.patch_size) * (width // config.patch_size))
    if config.model_type == "whisper":
        batch_size, _, frames = batch["input_features"].shape
        return int(batch_size * frames)
    raise DoesNotApplyError("the model has no tokens")
