"""The interface of a trainer, how a trainer is loaded by its name, and the parts of a trainer's step.

A trainer has three methods, so that time and memory of forward, backward and update can be measured separately.
"""

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from flopwatch.errors import InputError, UnsupportedError
from flopwatch.records.privacy import Privacy
from flopwatch.records.trial import COMMAND, LABELS, canonical_trainer

StepPart: TypeAlias = tuple[str, Callable[[], Any]]
"""A part of a step: `forward`, `backward` or `optimizer`, and the function that runs it."""

_Context: TypeAlias = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True, slots=True)
class TrainerSettings:
    """The settings that a trainer is built with.

    Attributes:
        batch_size: Samples per step, the same in every step, in one batch or in several micro-batches.
        device: The device of model and batch.
        dtype: `fp32`, `bf16` or `fp16`; the last two by autocast.
        options: The `options` of the trial, such as `lr`, `max_grad_norm`, `noise_multiplier`.
        micro_batch_size: Samples of each micro-batch, the last of which may have fewer; None is the whole batch.
    """

    batch_size: int
    device: torch.device
    dtype: str = "fp32"
    options: Mapping[str, Any] = field(default_factory=dict)
    micro_batch_size: int | None = None


class Trainer(Protocol):
    """A trainer makes the steps of a trial. A matrix names a trainer of your own as `package.module:Class`.

    If your trainer cannot train a model, raise `flopwatch.errors.UnsupportedError` with the reason in `__init__` or
    `forward`. For micro-batches (`micro_batch_size`) a trainer needs a fourth method, `accumulate()`, which is called
    after the backward pass of every micro-batch but the last. Scale the loss of each micro-batch by its share of
    `settings.batch_size`.

    A trainer that is differentially private says so with an attribute `privacy`, a `flopwatch.sweep.Privacy`. It then
    gets epsilon, and is compared with the other private trainers.

    The built-in trainers use two methods of a model, if it has them: `trial_batch(batch_size, seq_len)` returns its
    batch, and `per_sample_losses(output, batch)` the loss of each sample, if that is not the cross-entropy of logits.

    >>> class Plain:
    ...     def __init__(self, model, settings):
    ...         self.model, self.optimizer = model, torch.optim.SGD(model.parameters(), lr=0.1)
    ...     def forward(self, batch):
    ...         return self.model(**batch)["loss"]
    ...     def backward(self, loss):
    ...         loss.backward()
    ...     def update(self):
    ...         self.optimizer.step()
    ...         self.optimizer.zero_grad()
    """

    def __init__(self, model: nn.Module, settings: TrainerSettings) -> None: ...

    def forward(self, batch: Mapping[str, Any]) -> Any:
        """Run the model and return the loss."""

    def backward(self, loss: Any) -> None:
        """Compute the gradients."""

    def update(self) -> None:
        """Update the weights and clear the gradients."""


def load_trainer(name: str) -> type[Trainer]:
    """The class of a trainer: a built-in one, or `package.module:Class`, whose module may be in the working directory.

    >>> load_trainer("standard").__name__
    'StandardTrainer'
    """
    trainer, label = canonical_trainer(name)
    if trainer == COMMAND:
        raise InputError("`command` is not the name of a trainer; give a shell command with --command")
    if trainer in LABELS:
        return getattr(importlib.import_module("flopwatch.sweep.trainers.builtin"), label)  # type: ignore[no-any-return]
    found = load_object("trainer", trainer)
    if not isinstance(found, type):
        raise InputError(f"trainer {name!r} is a {type(found).__name__}; name a class instead")
    missing = [method for method in ("forward", "backward", "update") if not callable(getattr(found, method, None))]
    if missing:
        raise InputError(
            f"trainer {name!r} has no method {', '.join(missing)}; a trainer needs __init__(model, settings), "
            "forward(batch), which returns the loss, backward(loss) and update()"
        )
    return found


def load_object(kind: str, path: str) -> Any:
    """Import `package.module:name`, whose module may be in the working directory; `kind` is for the error message."""
    module_name, _, name = path.partition(":")
    sys.path.insert(0, "")  # search the working directory, as `python -m` does: a user's file may be there
    try:
        return getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise InputError(f"cannot load the {kind} {path!r}: {error}") from error
    finally:
        sys.path.remove("")


def declared_privacy(trainer: Trainer) -> Privacy | None:
    """What the trainer declares in its attribute `privacy`; None if it declares nothing."""
    declared = getattr(trainer, "privacy", None)
    if not isinstance(declared, Privacy):  # an attribute of this name may be something of the user's own
        return None
    if (problem := declared.why_broken()) is not None:
        raise InputError(f"{type(trainer).__name__}: {problem}")
    return declared


def step_parts(trainer: Trainer, batches: Sequence[Mapping[str, Any]]) -> list[StepPart]:
    """The parts of one step: forward and backward for every micro-batch, and one update."""
    accumulate = getattr(trainer, "accumulate", None)
    if len(batches) > 1 and accumulate is None:
        raise UnsupportedError(
            f"{type(trainer).__name__} cannot use micro-batches, because it has no method accumulate(); leave "
            "`micro_batch_size` out, or add that method, which is called after the backward pass of every micro-batch "
            "but the last"
        )
    # DDP replicas exchange gradients once per step, in the last micro-batch.
    model = getattr(trainer, "model", None)
    no_exchange: _Context = model.no_sync if isinstance(model, DistributedDataParallel) else nullcontext
    parts: list[StepPart] = []
    for batch in batches[:-1]:
        parts += [*_passes(trainer, batch, no_exchange), ("optimizer", accumulate or trainer.update)]
    return [*parts, *_passes(trainer, batches[-1], nullcontext), ("optimizer", trainer.update)]


def _passes(trainer: Trainer, batch: Mapping[str, Any], context: _Context) -> list[StepPart]:
    loss: list[Any] = []  # `backward` removes the loss, so that no reference to it keeps the autograd graph in memory

    def forward() -> None:
        with context():
            loss.append(trainer.forward(batch))

    def backward() -> None:
        with context():
            trainer.backward(loss.pop())

    return [("forward", forward), ("backward", backward)]


def run_step(parts: Sequence[StepPart]) -> None:
    for _, run in parts:
        run()
