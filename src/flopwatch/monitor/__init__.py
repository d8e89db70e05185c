"""Monitors a training while it runs: measures time and FLOPs of each step, and logs a row every `log_every` steps."""

from typing import TYPE_CHECKING

from flopwatch.optional import lazy_exports

if TYPE_CHECKING:
    from flopwatch.monitor.config import MonitorConfig
    from flopwatch.monitor.training_monitor import Step, TrainingMonitor

__all__ = ["MonitorConfig", "Step", "TrainingMonitor"]

__getattr__ = lazy_exports(
    "flopwatch.monitor",
    {
        "MonitorConfig": "flopwatch.monitor.config",
        "Step": "flopwatch.monitor.training_monitor",
        "TrainingMonitor": "flopwatch.monitor.training_monitor",
    },
)
