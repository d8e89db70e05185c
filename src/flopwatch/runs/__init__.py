"""Read the log that a training run wrote, explain its MFU, and compare two runs. Nothing here imports torch.

>>> from flopwatch.runs import find_log, read_log
>>> log = read_log(find_log("outputs"))  # doctest: +SKIP
>>> log.rows[-1].values["perf/mfu"]  # doctest: +SKIP
0.413
"""

from flopwatch.runs.log_file import DEFAULT_NAME, NoLogError, find_log
from flopwatch.runs.reading import (
    LogFollower,
    RunLog,
    StepCells,
    provenance_at,
    read_around,
    read_log,
    rows_from_end,
    step_cells,
)

__all__ = [
    "DEFAULT_NAME",
    "LogFollower",
    "NoLogError",
    "RunLog",
    "StepCells",
    "find_log",
    "provenance_at",
    "read_around",
    "read_log",
    "rows_from_end",
    "step_cells",
]
