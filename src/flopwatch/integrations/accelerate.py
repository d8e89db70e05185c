"""A monitor for training loops with Hugging Face Accelerate."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flopwatch.integrations.callback_parts import harmless
from flopwatch.monitor.training_monitor import Step, TrainingMonitor


class AccelerateMonitor(TrainingMonitor):
    """A `TrainingMonitor` that takes precision and gradient accumulation from an `Accelerator`.

    Put `monitor.step(batch)` around each micro-batch, beside `accelerator.accumulate`; the optimizer step is logged
    with its last micro-batch. `monitor.latest` holds the newest values for `accelerator.log`. With
    `accelerator.register_for_checkpointing(monitor)` a resumed run continues its totals.

    Args:
        accelerator: The training's `Accelerator`.
        model: The model, before or after `accelerator.prepare`.
        output_dir: The run's folder; only the main process writes to it.
        monitor_options: As for `flopwatch.TrainingMonitor`.

    Example:
        >>> import tempfile, torch
        >>> from accelerate import Accelerator
        >>> accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
        >>> model = accelerator.prepare(torch.nn.Linear(8, 8))
        >>> with AccelerateMonitor(accelerator, model, tempfile.mkdtemp()) as monitor:
        ...     for batch in torch.randn(6, 4, 8):
        ...         with accelerator.accumulate(model), monitor.step(batch) as step:
        ...             loss = model(batch).sum()
        ...             accelerator.backward(loss)
        ...             step.log(loss=loss)
        >>> monitor.summary.values["total/steps"], monitor.summary.values["total/samples"]
        (3, 24)
    """

    def __init__(
        self, accelerator: Any, model: nn.Module, output_dir: str | Path = "outputs", **monitor_options: Any
    ) -> None:
        # With precision "no" the dtype of the weights is used. With "fp8" the user must pass dtype=, because the fp8
        # recipe decides which matmuls run in fp8.
        precision = accelerator.mixed_precision
        own: dict[str, Any] = {"model": model, "dtype": precision if precision in ("bf16", "fp16") else None}
        super().__init__(output_dir, **(own | monitor_options))
        self.strict = self.config.strict  # read by `harmless`
        self._accelerator = accelerator
        self._losses: list[Any] = []

    def step(
        self,
        batch: Any = None,
        *,
        step: int | None = None,
        epoch: float | None = None,
        lengths: Sequence[int] | None = None,
    ) -> Step:
        """Measure one micro-batch. Arguments as for `TrainingMonitor.step`; values are logged per optimizer step."""
        plain = super().step(batch, step=step, epoch=epoch, lengths=lengths)
        return _MicroStep(self, plain.number, epoch, batch, lengths)

    @harmless
    def _end_micro_batch(self, number: int, values: dict[str, Any]) -> None:
        loss = values.pop("loss", None)
        if not self._accelerator.sync_gradients:
            # Adding 0 copies the loss, because a CUDA graph writes the next loss into the same tensor.
            self._losses += [] if loss is None else [_detached(loss) + 0]
            self.end_micro_batch()
            return
        earlier, self._losses = self._losses, []
        if earlier and loss is not None:
            loss = sum(earlier, _detached(loss)) / (len(earlier) + 1)
        self.log_step(number, loss=loss, **values)


class _MicroStep(Step):
    __slots__ = ()
    _monitor: AccelerateMonitor

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            return
        if self._batch is not None:
            self._monitor.micro_batch(self._batch, self._lengths)
        self._monitor._end_micro_batch(self.number, self._values())


def _detached(loss: Any) -> Any:
    return loss.detach() if isinstance(loss, torch.Tensor) else loss
