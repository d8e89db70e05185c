"""Makes the batch of a trial, at random or by a user's function, and divides it into micro-batches."""

import inspect
import random
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from flopwatch.errors import InputError, UnsupportedError
from flopwatch.models.load import dummy_batch
from flopwatch.sweep.trainers.protocol import load_object


def trial_batch(
    model: nn.Module,
    batch_size: int,
    seq_len: int,
    seed: int,
    device: torch.device | str,
    function: str | None = None,
) -> dict[str, Any]:
    """A batch for the model on this device, by default random token ids or images with labels.

    Random batches are made on the CPU, so that a seed gives the same batch on every device. The model, which may be on
    the meta device, takes `input_ids` or `pixel_values`, or has a method `trial_batch(batch_size, seq_len)`, which then
    makes the batch. `function` is a user's `package.module:function` that makes it instead.
    """
    batch: dict[str, Any]
    if function is not None:
        batch = _own_batch(function, model, batch_size, seq_len, seed)
    elif hasattr(model, "trial_batch"):
        batch = model.trial_batch(batch_size, seq_len)  # type: ignore[operator]
    else:
        batch = dummy_batch(model, batch_size, seq_len)
        generator = torch.Generator().manual_seed(seed)
        if "input_ids" in batch:
            batch = _text(model, batch["input_ids"].shape, generator)
        else:
            batch["pixel_values"] = torch.randn(batch["pixel_values"].shape, generator=generator)
            if "labels" in batch:
                batch["labels"] = torch.randint(_classes(model), (batch_size,), generator=generator)
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}


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
    # Without these two inputs, GPT-2 and BERT look up one row of position embeddings for all samples, and Opacus cannot
    # compute gradients per sample. Models without such embeddings (rotary positions, for example) need neither input.
    if "position_ids" in takes and _has_embedding(model, "position", "wpe"):
        batch["position_ids"] = torch.arange(shape[1]).repeat(shape[0], 1)
    if "token_type_ids" in takes and _has_embedding(model, "token_type"):
        batch["token_type_ids"] = torch.zeros(shape, dtype=torch.long)
    return batch


def _token_ids(model: nn.Module, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """Random ids except the padding token, because Opacus 1.6 computes a gradient for its embedding; torch does not."""
    size = vocabulary(model)
    ids = torch.randint(size, shape, generator=generator)
    for module in model.modules():
        if isinstance(module, nn.Embedding) and module.padding_idx is not None and module.num_embeddings == size:
            ids = torch.where(ids == module.padding_idx, (module.padding_idx + 1) % size, ids)
    return ids


def vocabulary(model: nn.Module) -> int:
    config = getattr(model, "config", None)
    for settings in (config, getattr(config, "text_config", None)):
        size = getattr(settings, "vocab_size", None)
        if isinstance(size, int):
            return size
    embedding = next((module for module in model.modules() if isinstance(module, nn.Embedding)), None)
    if embedding is None:
        raise InputError(
            f"{type(model).__name__} takes input_ids, but has neither config.vocab_size nor an nn.Embedding; give the "
            "model a method trial_batch(batch_size, seq_len) that returns a batch"
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


def _own_batch(function: str, model: nn.Module, batch_size: int, seq_len: int, seed: int) -> dict[str, Any]:
    """The batch that `function(model, batch_size, seq_len)` returns, as keyword arguments of the model.

    The function may return a mapping of keyword arguments, a tensor (the model's first argument), or a pair of that
    tensor and the labels. The random number generators of torch and Python are seeded for the call and restored.
    """
    make = load_object("batch", function)
    if not callable(make):
        raise InputError(f"`batch` names {function!r}, which is a {type(make).__name__}; name a function instead")
    state = random.getstate()
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            random.seed(seed)
            made = make(model, batch_size, seq_len)
    finally:
        random.setstate(state)
    batch = _as_arguments(function, model, made)
    # Samples per second are computed from the requested size.
    rows = {name: len(value) for name, value in batch.items() if isinstance(value, torch.Tensor) and value.dim()}
    wrong = {name: length for name, length in rows.items() if length not in (1, batch_size)}
    if wrong or batch_size not in rows.values():
        shown = ", ".join(f"{name} with {length}" for name, length in (wrong or rows).items()) or "no tensor"
        raise InputError(
            f"{function!r} should return {batch_size} samples, but returned {shown}; the first dimension of each "
            "tensor must be the number of samples"
        )
    return batch


def _as_arguments(function: str, model: nn.Module, made: Any) -> dict[str, Any]:
    if isinstance(made, Mapping):
        return dict(made)
    is_pair = isinstance(made, tuple | list) and len(made) == 2
    parts = made if is_pair else [made]
    if not all(isinstance(part, torch.Tensor) for part in parts):
        raise InputError(
            f"{function!r} returned a {type(made).__name__}; let it return a mapping of the model's keyword arguments, "
            "a tensor, or a pair (inputs, labels) of tensors"
        )
    first = next(iter(inspect.signature(model.forward).parameters.values()), None)
    if first is None or first.kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD:
        raise InputError(
            f"the forward of {type(model).__name__} does not name its first argument; let {function!r} return a "
            "mapping of keyword arguments"
        )
    return dict(zip((first.name, "labels"), parts, strict=False))


# Micro-batches: parts of a batch that go through the model one after the other


def batch_rows(batch: Mapping[str, Any]) -> int:
    """The number of samples: the length of the first tensor with several rows, as samples may share a single row."""
    lengths = [len(value) for value in batch.values() if isinstance(value, torch.Tensor) and value.dim()]
    return next((length for length in lengths if length > 1), 1)


def micro_batches(batch: Mapping[str, Any], size: int | None) -> list[Mapping[str, Any]]:
    """Parts of at most `size` samples in order, the last one possibly smaller; None keeps the batch whole.

    >>> [len(part["x"]) for part in micro_batches({"x": torch.zeros(7, 2)}, 3)]
    [3, 3, 1]
    """
    rows = batch_rows(batch)
    if size is None or size >= rows:
        return [batch]
    with_rows = {
        name: value
        for name, value in batch.items()
        if isinstance(value, list | tuple) or (isinstance(value, torch.Tensor) and value.dim() and len(value) != 1)
    }
    for name, value in with_rows.items():
        if len(value) != rows:
            raise UnsupportedError(
                f"the batch cannot be split into micro-batches, because {name} has {len(value)} rows for {rows} "
                "samples; leave `micro_batch_size` out, or make a batch with one row for each sample"
            )
    # Values without rows, and tensors with one row for all samples, are the same in each part.
    return [
        {**batch, **{name: value[begin : begin + size] for name, value in with_rows.items()}}
        for begin in range(0, rows, size)
    ]
