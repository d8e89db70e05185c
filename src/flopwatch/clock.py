"""The clock for durations, which code takes as an argument, so that tests can pass a fake one; cells of notebooks."""

import sys
import time
from collections.abc import Callable
from typing import Any

Clock = Callable[[], float]
"""A function that returns seconds that never decrease, such as `time.perf_counter`."""

monotonic_seconds: Clock = time.perf_counter

_cell_unix_time: float | None = None


def note_cells() -> None:
    """In a notebook, note when each cell begins; the one that runs now counts from here."""
    shell = _notebook()
    if shell is not None:
        if _cell_unix_time is None:
            shell.events.register("pre_run_cell", _note_cell)
        _note_cell()


def _note_cell(*_: object) -> None:
    global _cell_unix_time
    _cell_unix_time = time.time()


def cell_start_unix_time() -> float | None:
    """When the cell that runs now began, as far as that is known; None outside of a notebook."""
    if _notebook() is None:
        return None
    return time.time() if _cell_unix_time is None else _cell_unix_time


def _notebook() -> Any:
    """The shell of IPython; None in other programs."""
    module = sys.modules.get("IPython")
    return None if module is None else module.get_ipython()
