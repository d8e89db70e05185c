"""Which rank holds the others back, how much, and by what. Pure arithmetic on reports."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import sqrt
from typing import Literal

from flopwatch.monitor.ranks.reports import Profile, RankReport

Cause = Literal["input", "compute", "host"]
_LEAST_EXCESS = 0.05
"""Of the step time. Less is not worth a name."""
_LEAST_SIGMAS = 4.0
_REMEMBERED = 5
_CHRONIC = 3
"""Of the remembered windows."""


@dataclass(frozen=True, slots=True)
class Straggler:
    """The rank the others wait for in a window.

    Attributes:
        rank: Which one.
        excess_seconds: How much longer it is busy than the mean of the others, per step.
        excess_share: The same as a share of the step time.
        shares: The excess by cause, as shares of the step time.
        chronic: True when it was this rank in most of the last windows.
    """

    rank: int
    excess_seconds: float
    excess_share: float
    shares: Mapping[Cause, float]
    chronic: bool = False

    @property
    def cause(self) -> Cause:
        """Where most of it comes from."""
        return max(self.shares, key=lambda cause: self.shares[cause])


def find_straggler(report: RankReport) -> Straggler | None:
    """The rank that stands out, if one does: by 5 % of the step time and by 4 standard deviations of the others."""
    others = report.profiled_ranks - 1
    if report.slowest is None or others < 1 or report.timed_steps == 0:
        return None
    rank, slowest = report.slowest
    step_seconds = report.seconds / report.timed_steps
    mean = Profile(*((total - own) / others for total, own in zip(report.profile, slowest, strict=True)))
    excess = slowest.own - mean.own
    variance = max(0.0, (report.own_squares - slowest.own**2) / others - mean.own**2)
    if step_seconds <= 0 or excess < _LEAST_EXCESS * step_seconds or excess < _LEAST_SIGMAS * sqrt(variance):
        return None
    shares: dict[Cause, float] = {
        "input": (slowest.input - mean.input) / step_seconds,
        "compute": (slowest.compute - mean.compute) / step_seconds,
        "host": (slowest.host - mean.host) / step_seconds,
    }
    return Straggler(rank, excess, excess / step_seconds, shares)


_WORDS: Mapping[Cause, str] = {
    "input": "waiting for its input",
    "compute": "computing",
    "host": "standing still outside its computation (disk, lock, sleep, no free core)",
}


def explain_straggler(straggler: Straggler) -> str:
    return (
        f"rank {straggler.rank} holds the others back: it needs {1e3 * straggler.excess_seconds:.3g} ms per step "
        f"({100 * straggler.excess_share:.1f} % of the step) longer than they do, most of it {_WORDS[straggler.cause]}"
    )


class StragglerHistory:
    """Tells a passing straggler from a chronic one."""

    def __init__(self) -> None:
        self._ranks: deque[int | None] = deque(maxlen=_REMEMBERED)

    def judge(self, report: RankReport) -> Straggler | None:
        found = find_straggler(report)
        before = self._ranks[-1] if self._ranks else None
        self._ranks.append(None if found is None else found.rank)
        # Twice in a row: neighbours on the same machine make one window of a rank slow now and then.
        if found is None or found.rank != before:
            return None
        return replace(found, chronic=self._ranks.count(found.rank) >= _CHRONIC)
