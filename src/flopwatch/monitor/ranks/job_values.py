"""Computes the metrics of a whole job from the reports of its ranks, and finds a rank that slows down the others.

Ranks that share a batch (tensor, context or pipeline parallel) all report its tokens and model FLOPs. In the
metrics of the job these are counted once.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from typing import Literal

from flopwatch.monitor.measured_step import AMOUNTS, MeasuredStep, share_values
from flopwatch.monitor.ranks.reports import RATED, Amount, RankReport
from flopwatch.records.run import Number

Cause = Literal["input", "compute", "host"]
_LEAST_EXCESS = 0.05
"""A rank is reported only if its busy time exceeds the other ranks' mean by at least this share of the step time."""
_LEAST_SIGMAS = 4.0
_WINDOWS_KEPT = 5
_CHRONIC_WINDOWS = 3
"""A straggler is chronic if it was the slowest rank in 3 of the last 5 windows."""
_CAUSE_TEXTS: Mapping[Cause, str] = {
    "input": "waiting for its input",
    "compute": "computing",
    "host": "blocked outside its computation (disk, lock, sleep, no free core)",
}


@dataclass(frozen=True, slots=True)
class Straggler:
    """The rank that the other ranks wait for in a window.

    Attributes:
        excess_seconds: How much longer the rank is busy per step than the mean of the other ranks.
        excess_share: The excess as a share of the step time.
        shares: The excess by each cause that is known, as shares of the step time.
        chronic: Whether this rank was the straggler in most of the last windows.
    """

    rank: int
    excess_seconds: float
    excess_share: float
    shares: Mapping[Cause, float]
    chronic: bool = False

    @property
    def cause(self) -> Cause:
        """The main reason why this rank is busy longer than the others."""
        return max(self.shares, key=lambda cause: self.shares[cause])


def find_straggler(report: RankReport) -> Straggler | None:
    """Find a rank whose busy time exceeds the others' mean by 5 % of the step time and by 4 standard deviations.

    If only input waits are known, a rank is found by these.
    """
    others = report.profiled_ranks - 1
    if report.slowest is None or others < 1 or report.timed_steps == 0:
        return None
    rank, slowest = report.slowest
    step_seconds, total = report.seconds / report.timed_steps, report.profile
    if step_seconds <= 0 or (total.compute is None) != (slowest.compute is None):
        return None
    excesses = {
        cause: its - (getattr(total, cause) - its) / others
        for cause in _CAUSE_TEXTS
        if (its := getattr(slowest, cause)) is not None
    }
    excess, mean = sum(excesses.values()), slowest.busy - sum(excesses.values())
    between_ranks = max(0.0, (report.busy_squares - slowest.busy**2) / others - mean**2)
    between_steps = slowest.variance + (total.variance - slowest.variance) / others**2
    if excess < max(_LEAST_EXCESS * step_seconds, _LEAST_SIGMAS * sqrt(max(between_ranks, between_steps))):
        return None
    return Straggler(rank, excess, excess / step_seconds, {c: e / step_seconds for c, e in excesses.items()})


def explain_straggler(straggler: Straggler) -> str:
    return (
        f"rank {straggler.rank} slows down the other ranks: it needs {1e3 * straggler.excess_seconds:.3g} ms per step "
        f"({100 * straggler.excess_share:.1f} % of the step) longer than they do, most of it "
        f"{_CAUSE_TEXTS[straggler.cause]}"
    )


class StragglerHistory:
    """Keeps the stragglers of the last windows, to tell a temporary one from a chronic one."""

    def __init__(self) -> None:
        self._ranks: deque[int | None] = deque(maxlen=_WINDOWS_KEPT)

    def judge(self, report: RankReport) -> Straggler | None:
        found = find_straggler(report)
        before = self._ranks[-1] if self._ranks else None
        self._ranks.append(None if found is None else found.rank)
        # A rank must be the slowest twice in a row, because other processes can slow it down in a single window.
        if found is None or found.rank != before:
            return None
        return replace(found, chronic=self._ranks.count(found.rank) >= _CHRONIC_WINDOWS)


def counted_once(amount: Amount, data_parallel_size: int) -> int | None:
    """Sum an amount over all batches, each counted once; None if the number of ranks shows that some are missing.

    Of the ranks that share a batch, either all report its amount or only one does, such as a pipeline's first stage.

    >>> counted_once(Amount(4000, 4), 2), counted_once(Amount(2000, 2), 2), counted_once(Amount(3000, 3), 2)
    (2000, 2000, None)
    """
    if amount.ranks == 0 or amount.ranks % data_parallel_size:
        return None
    total, rest = divmod(amount.total, amount.ranks // data_parallel_size)
    return None if rest else total


def job_totals(report: RankReport, data_parallel_size: int) -> dict[str, int]:
    """Samples, tokens and FLOPs of the whole job in a window, by the names in `AMOUNTS`; unknown ones are left out."""
    totals = {name: counted_once(report.total(name), data_parallel_size) for name in AMOUNTS}
    return {name: total for name, total in totals.items() if total is not None}


def job_values(report: RankReport, data_parallel_size: int) -> dict[str, Number]:
    """Compute the metrics of a logging window over all ranks, by their keys in `flopwatch.records.metrics`.

    >>> from flopwatch.monitor.measured_step import MeasuredStep
    >>> from flopwatch.monitor.ranks.reports import merge, report_of
    >>> quick = [MeasuredStep(1, seconds=0.5, tokens=1000, model_flops=10**12)]
    >>> short = [MeasuredStep(1, seconds=0.5, tokens=600, model_flops=6 * 10**11)]
    >>> window = merge([report_of(r, s, peak_flops_per_s=4e12, profile=None) for r, s in enumerate((quick, short))])
    >>> values = job_values(window, data_parallel_size=2)
    >>> values["perf/tokens_per_second"], values["perf/mfu"]
    (3200.0, 0.4)
    """
    values: dict[str, Number] = {"ranks/reporting": report.ranks}
    if report.timed_steps and report.seconds > 0:
        values["perf/step_time"] = report.seconds / report.timed_steps
        values["perf/steps_per_second"] = report.timed_steps / report.seconds
        values |= _rates(report, data_parallel_size) | _utilisation(report, data_parallel_size)
        if report.input_wait.ranks == report.ranks:
            values["perf/input_wait_percent"] = 100 * report.input_wait.total / 1e9 / report.seconds
        values |= _spread(report)
    totals = job_totals(report, data_parallel_size)
    counted_steps = report.counted_steps if "model_flops" in totals else 0
    if report.counted_steps and counted_steps < report.batch_steps:
        values["perf/counted_steps_percent"] = 100 * counted_steps / report.batch_steps
    return values | share_values(totals)


def job_use_of_peak(report: RankReport, totals: Mapping[str, int], peak_flops_per_s: float | None) -> dict[str, float]:
    """How long the devices of all ranks would need for a window's FLOPs at their peak, in seconds, by use.

    `totals` come from `job_totals`; `peak_flops_per_s` is that of one device, mean over ranks, None if it is unknown.
    """
    if not report.ranks or "model_flops" not in totals:
        return {"unpriced": report.seconds / max(report.ranks, 1)}
    if not peak_flops_per_s:
        return {}
    uses = {name: totals[f"{name}_flops"] for name in ("model", "hardware", "recompute") if f"{name}_flops" in totals}
    return {f"{name}_at_peak": flops / peak_flops_per_s / report.ranks for name, flops in uses.items()}


def rank_losses(report: RankReport) -> dict[str, float]:
    """Seconds of a window that ranks lose to each other, mean over ranks.

    `straggler` is the time by which one rank makes every step longer, even in a single window, because all ranks have
    waited for it; `straggler_input` the part of it that is input wait of this rank and therefore in the mean input wait
    too; `ranks_wait` all other waiting.
    """
    waiting_percent = _spread(report).get("ranks/waiting_percent")
    straggler = find_straggler(report)
    if waiting_percent is None or not report.ranks:
        return {}
    seconds = report.seconds / report.ranks
    waiting = max(0.0, waiting_percent / 100 * seconds)
    if straggler is None:
        return {"ranks_wait": waiting}
    lost = straggler.excess_share * seconds
    of_input = max(0.0, straggler.shares["input"]) * seconds / report.ranks
    others = lost * (report.ranks - 1) / report.ranks
    return {"straggler": lost, "straggler_input": of_input, "ranks_wait": max(0.0, waiting - others)}


def with_job_wait(steps: Sequence[MeasuredStep], report: RankReport) -> list[MeasuredStep]:
    """Replace the input wait of one rank's steps by the mean of all ranks, for the run's totals.

    Warm-up steps and steps without a time keep their own input wait, because reports do not contain it.
    """
    if report.input_wait.ranks != report.ranks or not report.timed_steps:
        return list(steps)
    wait = report.input_wait.total / 1e9 / report.timed_steps
    return [
        step if step.seconds is None or step.is_warm_up else step._replace(input_wait_seconds=wait) for step in steps
    ]


def _rates(report: RankReport, data_parallel_size: int) -> dict[str, Number]:
    rates: dict[str, Number] = {}
    for name, known_seconds in zip(RATED, report.known_seconds, strict=True):
        amount = counted_once(report.timed_total(name), data_parallel_size)
        if amount is None or known_seconds <= 0:
            continue
        rate = amount / (known_seconds / report.timed_total(name).ranks)
        rates[f"perf/{name}_per_second"] = rate
        if name in ("tokens", "samples"):
            rates[f"perf/{name}_per_second_per_device"] = rate / report.ranks
    return rates


def _utilisation(report: RankReport, data_parallel_size: int) -> dict[str, Number]:
    """Compute MFU, HFU and FLOP/s. Rates are per device, because the report's seconds are summed over all devices."""
    values: dict[str, Number] = {}
    for name, share in (("model_flops", "mfu"), ("hardware_flops", "hfu")):
        flops = counted_once(report.timed_total(name), data_parallel_size)
        if flops is None or report.counted_seconds <= 0:
            continue
        values[f"perf/{name}_per_second_per_device"] = flops / report.counted_seconds
        if report.capacity_flops:
            values[f"perf/{share}"] = flops / report.capacity_flops
            values[f"perf/{share}_percent"] = 100 * flops / report.capacity_flops
    if report.capacity_flops and report.counted_seconds > 0:
        values["perf/peak_flops_per_second_per_device"] = report.capacity_flops / report.counted_seconds
    return values


def _spread(report: RankReport) -> dict[str, Number]:
    """Compute which ranks are busy longest and shortest, and how long ranks wait for each other."""
    values: dict[str, Number] = {}
    is_known = report.profiled_ranks == report.ranks and report.profile.compute is not None
    if report.slowest is not None and report.fastest is not None and is_known:
        mean = report.profile.busy / report.ranks
        values["ranks/own_seconds_mean"] = mean
        values["ranks/own_seconds_max"] = report.slowest[1].busy
        values["ranks/own_seconds_min"] = report.fastest.value
        values["ranks/slowest"] = report.slowest[0]
        values["ranks/fastest"] = report.fastest.rank
        values["ranks/waiting_percent"] = 100 * (1 - mean * report.timed_steps / report.seconds)
    if report.longest_wait is not None:
        values["ranks/longest_input_wait_percent"] = 100 * report.longest_wait.value
        values["ranks/longest_input_wait_rank"] = report.longest_wait.rank
    return values


def straggler_values(straggler: Straggler | None) -> dict[str, Number]:
    if straggler is None:
        return {}
    return {
        "ranks/straggler": straggler.rank,
        "ranks/straggler_excess_percent": 100 * straggler.excess_share,
        **{f"ranks/straggler_{cause}_percent": 100 * share for cause, share in straggler.shares.items()},
    }
