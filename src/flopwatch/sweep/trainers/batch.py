"""A random batch for a model, with what the DP trainers need of it."""

import inspect
from typing import Any

import torch
from torch import nn

from flopwatch.errors import InputError
from flopwatch.models.dummy import dummy_batch
from flopwatch.sweep.trainers.own_batch import own_batch


def trial_batch(
    model: nn.Module,
    batch_size: int,
    seq_len: int,
    seed: int,
    device: torch.device | str,
    function: str | None = None,
) -> dict[str, Any]:
    """Random token ids or images, with labels, made on the CPU from the seed and moved to the device.

    The same numbers on every device. The model may be on the meta device.

    Args:
        model: Its `forward` takes `input_ids` or `pixel_values`. A model with a method
            `trial_batch(batch_size, seq_len)` makes its own.
        batch_size: Samples.
        seq_len: Positions of each; not used for images.
        seed: Of the numbers.
        device: Where the batch goes.
        function: `package.module:function` of the user's that makes the batch.
    """
    if function is not None:
        return _moved(own_batch(function, model, batch_size, seq_len, seed), device)
    if hasattr(model, "trial_batch"):
        made: dict[str, Any] = model.trial_batch(batch_size, seq_len)  # type: ignore[operator]
        return _moved(made, device)
    batch = dummy_batch(model, batch_size, seq_len)
    generator = torch.Generator().manual_seed(seed)
    if "input_ids" in batch:
        batch = _text(model, batch["input_ids"].shape, generator)
    else:
        batch["pixel_values"] = torch.randn(batch["pixel_values"].shape, generator=generator)
        if "labels" in batch:
            batch["labels"] = torch.randint(_classes(model), (batch_size,), generator=generator)
    return _moved(batch, device)


def _text(model: nn.Module, shape: torch.Size, generator: torch.Generator) -> dict[str, Any]:
    takes = inspect.signature(model.forward).parameters
    batch = {"input_ids": _token_ids(model, shape, generator)}
    if "labels" in takes:
        name = type(model).__name__
        if name.endswith("SequenceClassification"):
            batch["labels"] = torch.randint(_classes(model), shape[:1], generator=generator)
        elif name.endswith("TokenClassification"):
            batch["labels"] = torch.randint(_classes(model), shape, generator=generator)
        else:
            batch["labels"] = batch["input_ids"].clone()
    # GPT-2 and BERT make one row of these for all samples when they are not given; Opacus finds no samples in it. Only
    # embeddings have that trouble, so rotary models keep the inputs they are usually trained with.
    if "position_ids" in takes and _has_embedding(model, "position", "wpe"):
        batch["position_ids"] = torch.arange(shape[1]).repeat(shape[0], 1)
    if "token_type_ids" in takes and _has_embedding(model, "token_type"):
        batch["token_type_ids"] = torch.zeros(shape, dtype=torch.long)
    return batch


def _token_ids(model: nn.Module, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """Any but the padding token: torch gives its embedding no gradient and Opacus does (1.6), so the two differ."""
    size = vocabulary(model)
    ids = torch.randint(size, shape, generator=generator)
    for module in model.modules():
        if isinstance(module, nn.Embedding) and module.padding_idx is not None and module.num_embeddings == size:
            ids = torch.where(ids == module.padding_idx, (module.padding_idx + 1) % size, ids)
    return ids


def vocabulary(model: nn.Module) -> int:
    """How many token ids the model knows: by its config, else by its first embedding."""
    config = getattr(model, "config", None)
    for settings in (config, getattr(config, "text_config", None)):
        size = getattr(settings, "vocab_size", None)
        if isinstance(size, int):
            return size
    embedding = next((module for module in model.modules() if isinstance(module, nn.Embedding)), None)
    if embedding is None:
        raise InputError(
            f"{type(model).__name__} takes input_ids and has neither config.vocab_size nor an nn.Embedding; give it "
            "a method trial_batch(batch_size, seq_len) that returns a batch"
        )
    return embedding.num_embeddings


def _classes(model: nn.Module) -> int:
    labels = getattr(getattr(model, "config", None), "num_labels", None)
    return labels if isinstance(labels, int) else 2


def _has_embedding(model: nn.Module, *words: str) -> bool:
    return any(
        isinstance(module, nn.Embedding) and any(word in name.rpartition(".")[2] for word in words)
        for name, module in model.named_modules()
    )


def _moved(batch: dict[str, Any], device: torch.device | str) -> dict[str, Any]:
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
