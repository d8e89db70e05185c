"""Tells a gap between steps that was spent waiting for a batch from one that was spent on other work."""

import multiprocessing
import time
from collections import deque
from collections.abc import Callable, Iterable

_REMEMBERED = 32
_FEWEST = 4
"""A gap (time between two steps) can count as unusually long only after this many gaps were measured."""
_FACTOR = 5.0
SHORT_GAP_SECONDS = 0.05
"""A shorter gap between steps is never unusual, because a busy machine causes gaps of some tens of milliseconds."""
_IDLE_SHARE = 0.2
"""A thread that uses less than this share of a core counts as idle."""


def _has_worker_processes() -> bool:
    return bool(multiprocessing.active_children())


def _middle(values: Iterable[float]) -> float:
    """The median. `statistics.median` takes four times as long, and this runs on every step."""
    ordered = sorted(values)
    half = len(ordered) // 2
    return (ordered[half] + ordered[~half]) / 2


class UsualGaps:
    """Decides whether the gap between two steps was spent waiting for a batch, or on other work, such as an evaluation.

    A gap counts as other work if it is more than 5 times as long as the median of the last 32 gaps and longer than a
    typical step. It still counts as waiting if the loader has worker processes and the training's thread was idle,
    because a loader with several workers delivers several batches at once and then none for a while.
    """

    def __init__(
        self,
        cpu_seconds: Callable[[], float] = time.thread_time,
        has_worker_processes: Callable[[], bool] = _has_worker_processes,
    ) -> None:
        self._cpu_seconds = cpu_seconds
        self._has_worker_processes = has_worker_processes
        self._gaps: deque[float] = deque(maxlen=_REMEMBERED)
        self._gaps_seen = self._sorted_at = 0
        self._sorted: list[float] = []
        """Sorted copy of `_gaps`, made when `_gaps_seen` was `_sorted_at`."""
        self._works: deque[float] = deque(maxlen=_REMEMBERED)
        self._cpu_at_gap = self._cpu_at_phase = 0.0
        self._gaps_begun = 0
        self._has_workers = False

    def gap_begins(self, short: tuple[float, float] | None = None) -> None:
        """Begin a gap between steps. Processor time is read only if the loader has workers, because reading it is slow.

        Args:
            short: Seconds of the previous gap and of the step before it, if that gap was too short for `is_outside`.
        """
        if short is not None:
            self._gaps.append(short[0])
            self._gaps_seen += 1
            if short[1]:
                self._works.append(short[1])
        if self._gaps_begun % _REMEMBERED == 0:
            self._has_workers = self._has_worker_processes()
        self._gaps_begun += 1
        if self._has_workers:
            self._cpu_at_gap = self._cpu_seconds()

    def gap_begins_again(self) -> None:
        """Forget the processor time of the gap so far, because that part of it belongs to a phase."""
        if self._has_workers:
            self._cpu_at_gap = self._cpu_seconds()

    def leave_gap(self) -> None:
        """Begin a phase, such as an evaluation, between two steps. Its processor time does not count for the gap."""
        if self._has_workers:
            self._cpu_at_phase = self._cpu_seconds()

    def come_back_to_gap(self) -> None:
        if self._has_workers:
            self._cpu_at_gap += self._cpu_seconds() - self._cpu_at_phase

    def is_outside(self, gap_seconds: float, work_seconds: float, has_seen_other_work: bool) -> bool:
        """Whether the last gap between steps or micro-batches was other work (such as an evaluation), not input wait.

        `gap_seconds` is the length of this gap, `work_seconds` the time between it and the gap before.
        `has_seen_other_work` says whether the model was called without gradients in this gap.
        """
        is_outside = gap_seconds > SHORT_GAP_SECONDS and self._is_long(gap_seconds)
        if is_outside and not has_seen_other_work:
            is_outside = not self._waited_for_workers(gap_seconds)
        self._gaps.append(gap_seconds)
        self._gaps_seen += 1
        if work_seconds:
            self._works.append(work_seconds)
        return is_outside

    def _is_long(self, gap_seconds: float) -> bool:
        if len(self._gaps) < _FEWEST or not self._works:
            return False
        # Sorting takes 16 µs, too long for every step. Each new gap moves the median by at most one place in the sorted
        # list, so the value at `place` in the old list is a lower bound of the median.
        place = (len(self._sorted) - 1) // 2 - (self._gaps_seen - self._sorted_at)
        if place >= 0 and gap_seconds <= _FACTOR * self._sorted[place]:
            return False
        self._sorted, self._sorted_at = sorted(self._gaps), self._gaps_seen
        usual = _middle(self._gaps)
        return gap_seconds > _FACTOR * usual and gap_seconds > usual + _middle(self._works)

    def _waited_for_workers(self, gap_seconds: float) -> bool:
        if not self._has_workers:
            return False
        busy_seconds = self._cpu_seconds() - self._cpu_at_gap
        return busy_seconds < _IDLE_SHARE * gap_seconds and self._has_worker_processes()
