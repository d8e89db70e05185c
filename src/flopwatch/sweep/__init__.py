"""Measures a matrix of trainers, batch sizes, sequence lengths and models; each trial runs in its own process.

`flopwatch.sweep.run(matrix, folder)` does from Python what the command `flopwatch sweep` does.
"""

from typing import TYPE_CHECKING

from flopwatch.optional import lazy_exports

if TYPE_CHECKING:
    from flopwatch.records.privacy import Privacy
    from flopwatch.records.trial import TrialResult, TrialSpec
    from flopwatch.sweep.engines.protocol import Engine
    from flopwatch.sweep.runner.observing import Observer
    from flopwatch.sweep.start import run
    from flopwatch.sweep.trainers.protocol import Trainer

__all__ = ["Engine", "Observer", "Privacy", "Trainer", "TrialResult", "TrialSpec", "run"]

# The process that supervises a trial imports this package too, and should start quickly.
__getattr__ = lazy_exports(
    "flopwatch.sweep",
    {
        "Engine": "flopwatch.sweep.engines.protocol",
        "Observer": "flopwatch.sweep.runner.observing",
        "Privacy": "flopwatch.records.privacy",
        "Trainer": "flopwatch.sweep.trainers.protocol",
        "TrialResult": "flopwatch.records.trial",
        "TrialSpec": "flopwatch.records.trial",
        "run": "flopwatch.sweep.start",
    },
)
