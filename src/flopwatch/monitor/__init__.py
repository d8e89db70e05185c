"""The monitor of a live training: measures every step, adds its FLOPs, and writes a row of metrics per window."""

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
