"""The numbers of a whole training, from its ranks' reports. Pure arithmetic.

Model FLOPs and tokens belong to the model and the global batch, not to the sharding: ranks that share a batch
(tensor, context or pipeline parallel) each report it, and it is counted once.
"""

from collections.abc import Sequence

from flopwatch.monitor.meter import MeasuredStep
from flopwatch.monitor.ranks.reports import AMOUNTS, RATED, Amount, RankReport
from flopwatch.monitor.ranks.stragglers import Straggler
from flopwatch.run_records import Number


def counted_once(amount: Amount, data_parallel_size: int) -> int | None:
    """The sum over different batches; None when ranks do not tell what they must.

    Of a group that shares its batch all ranks may tell of it, or one (a pipeline's first stage).

    >>> counted_once(Amount(4000, 4), 2), counted_once(Amount(2000, 2), 2), counted_once(Amount(3000, 3), 2)
    (2000, 2000, None)
    """
    if amount.ranks == 0 or amount.ranks % data_parallel_size:
        return None
    total, rest = divmod(amount.total, amount.ranks // data_parallel_size)
    return None if rest else total


def job_totals(report: RankReport, data_parallel_size: int) -> dict[str, int]:
    """What the training did in the window, by the names of `AMOUNTS`."""
    totals = {name: counted_once(report.total(name), data_parallel_size) for name in AMOUNTS}
    return {name: total for name, total in totals.items() if total is not None}


def job_values(report: RankReport, data_parallel_size: int) -> dict[str, Number]:
    """The metrics of a window of all ranks, under the keys of `flopwatch.metrics`.

    >>> from flopwatch.monitor.meter import MeasuredStep
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
        values |= _ranks_apart(report)
    totals = job_totals(report, data_parallel_size)
    counted_steps = report.counted_steps if "model_flops" in totals else 0
    if report.counted_steps and counted_steps < report.told_steps:
        values["perf/counted_steps_percent"] = 100 * counted_steps / report.told_steps
    return values | _shares(totals)


def with_job_wait(steps: Sequence[MeasuredStep], report: RankReport) -> list[MeasuredStep]:
    """One rank's steps, with the mean of all ranks as their wait for input: what the run's total is made of.

    The ranks tell of the steps that count for rates; of the others this rank's own wait is all there is.
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
    """MFU and HFU: seconds here are those of all devices together."""
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


def _shares(totals: dict[str, int]) -> dict[str, Number]:
    values: dict[str, Number] = {}
    if totals.get("tokens") and "real_tokens" in totals:
        values["perf/padding_percent"] = 100 * (totals["tokens"] - totals["real_tokens"]) / totals["tokens"]
    if totals.get("hardware_flops") and "recompute_flops" in totals:
        values["perf/recompute_percent"] = 100 * totals["recompute_flops"] / totals["hardware_flops"]
    return values


def _ranks_apart(report: RankReport) -> dict[str, Number]:
    """How far the ranks lie apart: who is busy longest and shortest, and how long all wait for each other."""
    values: dict[str, Number] = {}
    if report.slowest is not None and report.fastest is not None and report.profiled_ranks == report.ranks:
        mean = report.profile.own / report.ranks
        values["ranks/own_seconds_mean"] = mean
        values["ranks/own_seconds_max"] = report.slowest[1].own
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
