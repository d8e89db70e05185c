"""A batch made by a function of the user's, for models that flopwatch cannot make one for."""

import importlib
import inspect
import random
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from flopwatch.errors import InputError


def own_batch(function: str, model: nn.Module, batch_size: int, seq_len: int, seed: int) -> dict[str, Any]:
    """What `function(model, batch_size, seq_len)` makes, as keyword arguments of the model, with labels if it has any.

    Torch's and Python's random numbers begin at the seed in it, and go on outside of it as if it had not run.

    Args:
        function: `package.module:function`. It returns a mapping of keyword arguments, a tensor (the model's first
            argument), or a pair of it and the labels.
        model: May be on the meta device.
        batch_size: Samples to make.
        seq_len: The trial's length; a function that makes images need not look at it.
        seed: Of the trial.
    """
    make = _load(function)
    state = random.getstate()
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            random.seed(seed)
            made = make(model, batch_size, seq_len)
    finally:
        random.setstate(state)
    batch = _as_arguments(function, model, made)
    _check_rows(function, batch, batch_size)
    return batch


def _load(function: str) -> Any:
    module_name, colon, name = function.partition(":")
    if not colon or not module_name or not name:
        raise InputError(f"batch is 'package.module:function', got {function!r}")
    sys.path.insert(0, "")  # as `python -m` does: a user's file lies in the working directory
    try:
        found = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise InputError(f"cannot load the batch {function!r}: {error}") from error
    finally:
        sys.path.remove("")
    if not callable(found):
        raise InputError(f"batch {function!r} is a {type(found).__name__}, not a function")
    return found


def _as_arguments(function: str, model: nn.Module, made: Any) -> dict[str, Any]:
    if isinstance(made, Mapping):
        return dict(made)
    if isinstance(made, torch.Tensor):
        return {_first_argument(function, model): made}
    if isinstance(made, tuple | list) and len(made) == 2 and all(isinstance(part, torch.Tensor) for part in made):
        return {_first_argument(function, model): made[0], "labels": made[1]}
    raise InputError(
        f"{function!r} returned {type(made).__name__}; a batch is a mapping of the model's keyword arguments, a "
        "tensor, or a pair (inputs, labels) of tensors"
    )


def _first_argument(function: str, model: nn.Module) -> str:
    first = next(iter(inspect.signature(model.forward).parameters.values()), None)
    if first is None or first.kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD:
        raise InputError(
            f"the forward of {type(model).__name__} does not name its first argument; let {function!r} return a "
            "mapping of keyword arguments"
        )
    return first.name


def _check_rows(function: str, batch: Mapping[str, Any], batch_size: int) -> None:
    """Samples per second are counted by what was asked for, so that must be what was made."""
    rows = {name: len(value) for name, value in batch.items() if isinstance(value, torch.Tensor) and value.dim()}
    wrong = {name: length for name, length in rows.items() if length not in (1, batch_size)}
    if wrong or batch_size not in rows.values():
        told = ", ".join(f"{name} with {length}" for name, length in (wrong or rows).items()) or "no tensor"
        raise InputError(
            f"{function!r} was asked for {batch_size} samples and made {told}; the first dimension of each tensor is "
            "the samples"
        )
