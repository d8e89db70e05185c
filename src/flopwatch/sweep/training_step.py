"""One step of a trainer on its batch, part by part, so that each can be timed and its memory read."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

from torch.nn.parallel import DistributedDataParallel

from flopwatch.errors import UnsupportedError
from flopwatch.sweep.trainers.protocol import Trainer

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
