"""A monitor for training loops with Lightning Fabric."""

from pathlib import Path
from typing import Any

from torch import nn

from flopwatch.library_internals import without_fabric_wrapper
from flopwatch.monitor.training_monitor import TrainingMonitor


def autocast_dtype(precision: object) -> str | None:
    """The compute type that Lightning's `precision` sets for autocast; None if the type of the weights is used.

    >>> autocast_dtype("bf16-mixed"), autocast_dtype("16-mixed"), autocast_dtype("bf16-true")
    ('bf16', 'fp16', None)
    """
    return {"bf16-mixed": "bf16", "16-mixed": "fp16"}.get(str(precision))


def monitor_for(
    fabric: Any, model: nn.Module, output_dir: str | Path = "outputs", **monitor_options: Any
) -> TrainingMonitor:
    """Create a `TrainingMonitor` for a model of Lightning Fabric, with the precision of `fabric`.

    Use the monitor as in a plain loop. `fabric.log_dict(monitor.latest, step)` sends the newest values to Fabric's
    loggers. The monitor can be part of the state that `fabric.save` and `fabric.load` take.

    Args:
        fabric: The training's `Fabric`.
        model: The model, before or after `fabric.setup`.
        output_dir: The run's folder; only rank 0 writes to it.
        monitor_options: As for `flopwatch.TrainingMonitor`.

    Example:
        >>> import tempfile, torch
        >>> from lightning.fabric import Fabric
        >>> fabric = Fabric(accelerator="cpu", devices=1)
        >>> model = fabric.setup_module(torch.nn.Linear(8, 8))
        >>> with monitor_for(fabric, model, tempfile.mkdtemp()) as monitor:
        ...     batch = torch.randn(4, 8)
        ...     with monitor.step(batch) as step:
        ...         fabric.backward(model(batch).sum())
        >>> monitor.summary.values["total/model_flops"]  # 4 samples x 2 x 8 x 8, forward and weight gradient
        1024
    """
    precision = getattr(fabric.strategy.precision, "precision", None)
    own: dict[str, Any] = {"model": without_fabric_wrapper(model), "dtype": autocast_dtype(precision)}
    return TrainingMonitor(output_dir, **(own | monitor_options))
