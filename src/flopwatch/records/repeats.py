"""A trial that was run several times: the interval of its step time, and whether it must be run again.

The steps of one process are alike, but two processes that run the same trial differ (other memory addresses, other
neighbours on the machine). After the first run the interval is the bootstrap interval of its steps. With several runs
it is Student's interval of the logarithms of their medians, so that the difference between runs counts:
exp(mean ± t s / sqrt(n)). Stopping as soon as an interval is narrow makes it miss the truth more often than an interval
of a fixed number of runs; `benchmarks/sweeps/repeat_coverage.py` measures how often. Standard library only.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log, sqrt
from typing import Any

from flopwatch.decode import is_amount
from flopwatch.records.trial import UNSETTLED, Measured, TrialResult

UNSTABLE_WIDTH = 0.05
"""Step times are unstable if the interval of their median is wider than this share of the median."""

FEWEST_STEPS = 6
"""Fewer steps have no 95 % interval: the range of 5 steps contains the true median with a probability of only 94 %."""

FEWEST_RUNS = 3
"""Two runs that agree by chance would end the repeating too early: their interval rests on one difference."""

FAILED_REPEAT = "failed_repeat"
"""Key of an entry of `TrialResult.earlier_attempts`: this repeat failed, so the trial is not repeated any more."""

MOST_REPEATS = 30
# The 97.5 % quantiles of Student's distribution with 1, 2, ... 30 degrees of freedom.
_STUDENT = (
    *(12.7062, 4.30265, 3.18245, 2.77645, 2.57058, 2.44691, 2.36462, 2.30600, 2.26216, 2.22814),
    *(2.20099, 2.17881, 2.16037, 2.14479, 2.13145, 2.11991, 2.10982, 2.10092, 2.09302, 2.08596),
    *(2.07961, 2.07387, 2.06866, 2.06390, 2.05954, 2.05553, 2.05183, 2.04841, 2.04523, 2.04227),
)


def interval_of_runs(medians: Sequence[float]) -> tuple[float, float, float]:
    """The geometric mean of the runs' median step times, and the ends of its 95 % interval; needs two runs.

    >>> interval_of_runs([2.0, 2.0, 2.0])
    (2.0, 2.0, 2.0)
    """
    logs = [log(median) for median in medians]
    mean = sum(logs) / len(logs)
    variance = sum((one - mean) ** 2 for one in logs) / (len(logs) - 1)
    half = _STUDENT[min(len(logs) - 1, len(_STUDENT)) - 1] * sqrt(variance / len(logs))
    return exp(mean), exp(mean - half), exp(mean + half)


def with_repeats(measured: Measured, attempts: Sequence[Mapping[str, Any]]) -> Measured:
    """Combine the step times of a run with those of the earlier `ok` runs of its trial, which `attempts` lists."""
    earlier = [attempt["median_seconds"] for attempt in attempts if is_run(attempt)]
    if not earlier or measured.steps is None:
        return measured
    own = measured.steps.median
    median, low, high = interval_of_runs([*earlier, own])
    is_unstable = len(earlier) + 1 < FEWEST_RUNS or high - low > UNSTABLE_WIDTH * median
    cost, share = measured.cost, own / median
    return replace(
        measured,
        steps=replace(measured.steps, median=median, low=low, high=high, unstable=is_unstable),
        samples_per_s=_scaled(measured.samples_per_s, share),
        tokens_per_s=_scaled(measured.tokens_per_s, share),
        cost=cost and replace(cost, mfu=_scaled(cost.mfu, share), hfu=_scaled(cost.hfu, share)),
        run_medians=(*earlier, own),
    )


def _scaled(value: float | None, share: float) -> float | None:
    return None if value is None else value * share


def is_run(attempt: Mapping[str, Any]) -> bool:
    """Whether an earlier attempt ran to its end and has a median step time; the others were lost or failed."""
    median: Any = attempt.get("median_seconds")
    return attempt.get("outcome") == "ok" and is_amount(median) and median > 0


def run_median(measured: Measured) -> float | None:
    if measured.run_medians:
        return measured.run_medians[-1]
    return measured.steps.median if measured.steps is not None else None


def has_interval(measured: Measured) -> bool:
    """Whether there are enough steps, or enough runs, for a 95 % interval of the median."""
    if measured.steps is None:
        return False
    return len(measured.run_medians) >= FEWEST_RUNS if measured.run_medians else measured.steps.count >= FEWEST_STEPS


@dataclass(frozen=True, slots=True)
class RepeatPolicy:
    """Which trials are run again, because the interval of their step time is too wide.

    Attributes:
        until: The width that is narrow enough, as a share of the median; None repeats nothing.
        most: Maximum number of repeats of one trial, after its first run.
    """

    until: float | None = None
    most: int = 5

    def repeats(self, result: TrialResult) -> bool:
        """Whether to run the trial again. A trial without step times is not, because repeats could not change that."""
        measured, attempts = result.measured, result.earlier_attempts
        if self.until is None or result.outcome != "ok" or measured.steps is None:
            return False
        if repeats_of(result) >= self.most or any(attempt.get(FAILED_REPEAT) for attempt in attempts):
            return False
        steps = measured.steps
        return not has_interval(measured) or steps.high - steps.low > self.until * steps.median


def repeats_of(result: TrialResult) -> int:
    """How many runs this result has after its first one."""
    return max(len(result.measured.run_medians) - 1, 0)


def after_failed_repeat(before: TrialResult, attempt: Mapping[str, Any]) -> TrialResult:
    """The result of a trial whose repeat did not end `ok`: that of its runs before. A cancelled one may run again."""
    entry = {**attempt, FAILED_REPEAT: attempt.get("outcome") not in UNSETTLED}
    return replace(before, earlier_attempts=(*before.earlier_attempts, entry))
