"""Reading a run's log: all of it, a few windows of it, from its end, or while it grows. Never loads torch.

>>> from flopwatch.run_log import find_log, read_log
>>> log = read_log(find_log("outputs"))  # doctest: +SKIP
>>> log.rows[-1].values["perf/mfu"]  # doctest: +SKIP
0.413
"""

from flopwatch.run_log.finding import DEFAULT_NAME, NoLogError, find_log
from flopwatch.run_log.following import LogFollower
from flopwatch.run_log.reading import RunLog, read_around, read_log, rows_from_end
from flopwatch.run_log.single_step import StepCells, provenance_at, step_cells

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
