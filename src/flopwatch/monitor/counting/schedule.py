"""Chooses in which steps FLOPs are counted (pure)."""

import sys
from collections.abc import Hashable
from dataclasses import dataclass
from random import Random

_FIRST = (0, 1, 2, 4, 7, 11, 17, 26, 36, 47)
"""The first counted steps. Later ones are drawn at random, so that no regular change can hide between them."""
_GROWTH = 0.1
"""Early in a run, the gap between two counts is about this share of the steps so far."""
_FREE_SECONDS = 2.0
SHARE_OF_TIME = 0.005
"""Counting may take two seconds and this share of the run's time; counts of the first steps are not limited."""
_EXTRA, _SHARE_EXTRA = 32, 0.002
"""Limit for counts of new steps: 32 and 0.2 % of all steps; with several ranks, 32 on each."""
_RATIO_OF_RANKS = 2.0
_MOST_EXPECTED = 64
_SHARE_FROM_THE_START = 0.25


@dataclass
class Schedule:
    """Decides which steps are counted.

    All ranks of a training count the same steps, because each rank waits for the slowest one. So they draw from random
    generators with the same seed and use no times. Only a step that is new to a rank is counted on that rank alone.

    Attributes:
        next_index: The next step that is counted whatever happens.
        every: Count at least every n-th step; 0 sets no such limit.
        stops: Whether only the first steps are counted.
        steps: Steps so far.
        futile: Counted steps in which nothing ran.
        wants_next: Whether the next step is new.
        extra: Counts of new steps so far.
        expected: Steps that are new because they are of a kind that comes every few steps and needs another count.
    """

    is_alone: bool = True
    every: int = 0
    next_index: int = 0
    stops: bool = False
    steps: int = 0
    futile: int = 0
    wants_next: bool = False
    extra: int = 0
    _ratio: float = _RATIO_OF_RANKS
    _typical_seconds: float | None = None
    _extra_seconds: float = 0.0

    def __post_init__(self) -> None:
        self._met: dict[Hashable, int] = {}
        """For each kind of steps that needs another count, when it was met the last time."""
        self.expected: set[int] = set()
        self._first = self.next_index
        self._chance = Random() if self.is_alone else Random(1)

    def is_due(self, index: int) -> bool:
        return index >= self.next_index

    def expect(self, kind: Hashable, index: int) -> None:
        """Note that a kind needs another count. If it comes every few steps, expect it after as many steps again."""
        if len(self._met) >= _MOST_EXPECTED:
            self._met, self.expected = {}, set()
        gap = index - self._met.get(kind, index)
        self._met[kind] = index
        if gap > 1:
            self.expected.add(index + gap)

    def may_add(self, steps: int) -> bool:
        most = _EXTRA + (_SHARE_EXTRA * steps if self.is_alone else 0)
        return steps >= self._first and self.extra < most

    def begins_early(self) -> bool:
        """Whether a count begins with the step and not with its first call, to see what runs before that."""
        return self._chance.random() < _SHARE_FROM_THE_START

    def note_step(self, seconds: float) -> None:
        """Learn the usual time of an uncounted step."""
        usual = self._typical_seconds
        self._typical_seconds = seconds if usual is None else min(usual * 1.05, 0.9 * usual + 0.1 * seconds)

    def note_count(self, index: int, seconds: float) -> None:
        """Plan the next count after the step `index`, which took `seconds` while it was counted."""
        if not self.is_alone and not self.is_due(index):  # only this rank has counted it, so the common plan stays
            return
        usual = self._typical_seconds
        if self.is_alone and usual:
            ratio = max(0.1, (seconds - usual) / usual)
            self._ratio = 0.7 * self._ratio + 0.3 * ratio
            self._extra_seconds += max(0.0, seconds - usual)
        self.next_index = index + self._gap(index, usual if self.is_alone else None)

    def _gap(self, index: int, usual_seconds: float | None) -> int:
        later = next((first for first in _FIRST if first > index), None)
        if later is not None:
            gap = later - index
        elif self.stops:
            return sys.maxsize
        else:
            mean = self._ratio / SHARE_OF_TIME
            if self._extra_seconds < _FREE_SECONDS + SHARE_OF_TIME * (usual_seconds or 0.0) * index:
                mean = min(_GROWTH * index, mean)
            gap = max(1, round(mean * self._chance.uniform(0.5, 1.2)))
        return min(gap, self.every) if self.every else gap
