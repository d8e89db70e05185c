"""What a trainer is: built with a model, then three methods per step, so that each can be timed and its memory read."""

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
from flopwatch.records.trainer_names import COMMAND, LABELS, canonical_trainer


@dataclass(frozen=True, slots=True)
class TrainerSettings:
    """What a trainer is told besides the model.

    Attributes:
        batch_size: Samples per step; every step has as many, in one batch or in several micro-batches.
        device: Where model and batch are.
        dtype: `fp32`, or `bf16` and `fp16` by autocast.
        options: The `options` of the trial, such as `lr`, `max_grad_norm`, `noise_multiplier`.
        micro_batch_size: Samples of each micro-batch, the last of which may have fewer; None is the whole batch.
    """

    batch_size: int
    device: torch.device
    dtype: str = "fp32"
    options: Mapping[str, Any] = field(default_factory=dict)
    micro_batch_size: int | None = None


class Trainer(Protocol):
    """A way to train. Yours is `package.module:Class`.

    Raise `flopwatch.errors.UnsupportedError` in `__init__` or `forward` for a model it cannot train, with the reason.
    A model may help the built-in trainers: `trial_batch(batch_size, seq_len)` makes its batch, and
    `per_sample_losses(output, batch)` tells the loss of each sample where it is no cross-entropy of logits.
    For batches in parts (`micro_batch_size`) a trainer has a fourth method, `accumulate()`: it is called after the
    backward pass of every part but the last, and the loss of a part counts by its share of `settings.batch_size`.

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
        """Run the model; return the loss."""

    def backward(self, loss: Any) -> None:
        """Make the gradients."""

    def update(self) -> None:
        """Change the weights and forget the gradients."""


# One step of a trainer on its batch, part by part, so that each can be timed and its memory read.


StepPart: TypeAlias = tuple[str, Callable[[], Any]]
"""`forward`, `backward` or `optimizer`, and what runs it."""


_Surroundings: TypeAlias = Callable[[], AbstractContextManager[Any]]
_alone: _Surroundings = nullcontext


def step_parts(trainer: Trainer, batches: Sequence[Mapping[str, Any]]) -> list[StepPart]:
    """Forward and backward for every micro-batch, and one update.

    Raises:
        UnsupportedError: There are several micro-batches, and the trainer cannot keep their gradients.
    """
    accumulate = getattr(trainer, "accumulate", None)
    if len(batches) > 1 and accumulate is None:
        raise UnsupportedError(
            f"{type(trainer).__name__} has no method accumulate(), so it cannot take a batch in micro-batches; leave "
            "micro_batch_size out, or give it that method: it is called after the backward pass of every part but "
            "the last"
        )
    parts: list[StepPart] = []
    for place, batch in enumerate(batches):
        is_last = place == len(batches) - 1
        parts += _passes(trainer, batch, _alone if is_last else _without_exchange(trainer))
        parts.append(("optimizer", trainer.update if is_last or accumulate is None else accumulate))
    return parts


def _passes(trainer: Trainer, batch: Mapping[str, Any], around: _Surroundings) -> list[StepPart]:
    loss: list[Any] = []  # so that nothing holds the graph once the backward pass has it

    def forward() -> None:
        with around():
            loss.append(trainer.forward(batch))

    def backward() -> None:
        with around():
            trainer.backward(loss.pop())

    return [("forward", forward), ("backward", backward)]


def _without_exchange(trainer: Trainer) -> _Surroundings:
    """Replicas exchange gradients once for each step, with the last micro-batch, as everybody's loop does it."""
    model = getattr(trainer, "model", None)
    return model.no_sync if isinstance(model, DistributedDataParallel) else _alone


def run_step(parts: Sequence[StepPart]) -> None:
    for _, run in parts:
        run()


# From a trainer's name to its class.


_HOMES = {
    "standard": "flopwatch.sweep.trainers.builtin",
    "dpsgd": "flopwatch.sweep.trainers.builtin",
    "ghost": "flopwatch.sweep.trainers.builtin",
    "fast": "flopwatch.sweep.trainers.builtin",
}
_METHODS = ("forward", "backward", "update")


def load_trainer(name: str) -> type[Trainer]:
    """The class behind a name: a built-in trainer, or `package.module:Class`, in the working directory too.

    >>> load_trainer("standard").__name__
    'StandardTrainer'
    """
    trainer, label = canonical_trainer(name)
    if trainer == COMMAND:
        raise InputError("a command is run by the shell and has no trainer class; give it as --command")
    module_name = _HOMES.get(trainer) or trainer.partition(":")[0]
    sys.path.insert(0, "")  # as `python -m` does: a user's file lies in the working directory
    try:
        found = getattr(importlib.import_module(module_name), label)
    except (ImportError, AttributeError) as error:
        raise InputError(f"cannot load the trainer {name!r}: {error}") from error
    finally:
        sys.path.remove("")
    if trainer not in LABELS:
        _check(name, found)
    return found  # type: ignore[no-any-return]


def _check(name: str, found: object) -> None:
    if not isinstance(found, type):
        raise InputError(f"trainer {name!r} is a {type(found).__name__}, not a class")
    missing = [method for method in _METHODS if not callable(getattr(found, method, None))]
    if missing:
        raise InputError(
            f"trainer {name!r} has no method {', '.join(missing)}; a trainer has forward(batch), which returns the "
            "loss, backward(loss) and update(), and is built with (model, settings)"
        )
