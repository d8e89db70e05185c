"""Tells a gap between steps that was spent waiting for a batch from one that was spent on other work."""

import multiprocessing
from collections import deque
from collections.abc import Callable
from statistics import median

_REMEMBERED = 32
_FEWEST = 4
"""A gap (time between two steps) can count as unusually long only after this many gaps were measured."""
_FACTOR = 5.0
_SHORT_GAP_SECONDS = 0.05
"""A shorter gap between steps is never unusual, because a busy machine causes gaps of some tens of milliseconds."""
_IDLE_SHARE = 0.2
"""A thread that uses less than this share of a core counts as idle."""


def _has_worker_processes() -> bool:
    return bool(multiprocessing.active_children())


class UsualGaps:
    """Decides whether the gap between two steps was spent waiting for a batch, or on other work, such as an evaluation.

    A gap counts as other work if it is more than 5 times as long as the median of the last 32 gaps and longer than a
    typical step. It still counts as waiting if the loader has worker processes and the training's thread was idle,
    because a loader with several workers delivers several batches at once and then none for a while.
    """

    def __init__(self, has_worker_processes: Callable[[], bool] = _has_worker_processes) -> None:
        self._has_worker_processes = has_worker_processes
        self._gaps: deque[float] = deque(maxlen=_REMEMBERED)
        self._works: deque[float] = deque(maxlen=_REMEMBERED)

    def is_outside(
        self, gap_seconds: float, work_seconds: float, has_seen_other_work: bool, cpu_seconds: float | None
    ) -> bool:
        """Whether the last gap between steps or micro-batches was other work (such as an evaluation), not input wait.

        `work_seconds` is the time between it and the gap before; `cpu_seconds` is None if it was not measured.
        """
        is_outside = gap_seconds > _SHORT_GAP_SECONDS and self._is_long(gap_seconds)
        if is_outside and not has_seen_other_work and cpu_seconds is not None:
            is_outside = cpu_seconds >= _IDLE_SHARE * gap_seconds or not self._has_worker_processes()
        self._gaps.append(gap_seconds)
        if work_seconds:
            self._works.append(work_seconds)
        return is_outside

    def _is_long(self, gap_seconds: float) -> bool:
        if len(self._gaps) < _FEWEST or not self._works:
            return False
        usual = median(self._gaps)
        return gap_seconds > _FACTOR * usual and gap_seconds > usual + median(self._works)
