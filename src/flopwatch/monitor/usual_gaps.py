"""How long the gaps between steps usually are, so that an evaluation among them is not taken for a slow loader."""

import multiprocessing
import time
from collections import deque
from collections.abc import Callable, Iterable

_REMEMBERED = 32
_FEWEST = 4
"""Gaps to have seen before one of them can be unusual."""
_FACTOR = 5.0
SHORT_GAP_SECONDS = 0.05
"""A gap that is no longer is never unusual: a busy machine alone makes gaps of some tens of milliseconds."""
_IDLE_SHARE = 0.2


def _has_worker_processes() -> bool:
    return bool(multiprocessing.active_children())


def _middle(values: Iterable[float]) -> float:
    """The median; `statistics.median` takes four times as long after a training step, and this is asked on each."""
    ordered = sorted(values)
    half = len(ordered) // 2
    return (ordered[half] + ordered[~half]) / 2


class UsualGaps:
    """Judges gaps by those before them.

    A gap is unusual when it is more than 5 times as long as the median of the last 32, and longer than a typical step.
    It is still taken for waiting when the process has workers and its thread stood idle: a loader with several workers
    delivers several batches at once, and then none for a while.
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
        """The gaps, in order, as they were when `_gaps_seen` was `_sorted_at`."""
        self._works: deque[float] = deque(maxlen=_REMEMBERED)
        self._cpu_at_gap = self._cpu_at_phase = 0.0
        self._gaps_begun = 0
        self._has_workers = False

    def gap_begins(self, short: tuple[float, float] | None = None) -> None:
        """Asks the processor's clock only where workers could matter: that is a call of the system on every step.

        Args:
            short: A gap before that was too short to be unusual, and what the loop worked before it.
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

    def leave_gap(self) -> None:
        """A phase begins; the processor time in it is not the gap's."""
        if self._has_workers:
            self._cpu_at_phase = self._cpu_seconds()

    def come_back_to_gap(self) -> None:
        if self._has_workers:
            self._cpu_at_gap += self._cpu_seconds() - self._cpu_at_phase

    def is_outside(self, gap_seconds: float, work_seconds: float, has_seen_other_work: bool) -> bool:
        """Whether the gap that has just ended was something else than waiting for a batch.

        Args:
            gap_seconds: How long it was.
            work_seconds: What the loop worked before it; 0 when it has not since the last gap.
            has_seen_other_work: Whether the model was called in it.
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
        # A new gap (and the oldest gone) moves the median by at most one place of the sorted list, so this is a bound
        # from below; it spares ordinary steps the sorting, 16 µs after a training step.
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
