"""Finds the rank that slows down the others, from traces of the same steps on several ranks.

A rank that is early waits inside of a collective, whose kernel runs until the last rank has come. In its trace this is
exposed communication. So the slow rank is the one with the longest time besides exposed communication: computation,
copies, and idle time, in which it waits for its input or its host. This holds however the model is parallelised.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev

from flopwatch.runs.traces.split import TraceSplit

_LEAST_EXCESS = 0.05
"""A rank is named only if its time exceeds the other ranks' mean by at least this share of the step."""
_LEAST_SIGMAS = 4.0


@dataclass(frozen=True, slots=True)
class SlowRank:
    """The rank that the other ranks waited for in the traced steps: how much longer per step than their mean it is busy
    or idle, also as a share of the step time, and whether most of that is idle time.
    """

    rank: int
    excess_seconds: float
    excess_share: float
    is_idle: bool


def can_compare(splits: Sequence[TraceSplit]) -> bool:
    """Whether these are traces of several ranks, of the same steps on accelerators of one kind.

    On a CPU that other processes use too, a rank often computes 10 % longer than another one in some few steps.
    """
    ranks = {split.rank for split in splits}
    taken = {(split.device, split.steps, split.file.partition("_")[0]) for split in splits}  # step120_rank0.pt.trace...
    return len(ranks) == len(splits) > 1 and len(taken) == 1 and splits[0].device != "cpu"


def slow_rank(splits: Sequence[TraceSplit]) -> SlowRank | None:
    """The slow rank of traces that `can_compare`; None if none exceeds the others by 5 % and 4 standard deviations."""
    slowest = max(splits, key=_own_seconds)
    others = [split for split in splits if split is not slowest]
    own = [_own_seconds(split) for split in others]
    step_seconds = slowest.seconds / slowest.steps
    excess = _own_seconds(slowest) - fmean(own)
    if step_seconds <= 0 or excess < max(_LEAST_EXCESS * step_seconds, _LEAST_SIGMAS * pstdev(own)):
        return None
    idle = (slowest.idle_seconds - fmean(split.idle_seconds for split in others)) / slowest.steps
    return SlowRank(slowest.rank, excess, excess / step_seconds, idle > excess / 2)


def _own_seconds(split: TraceSplit) -> float:
    return (split.seconds - split.exposed_communication_seconds) / split.steps
