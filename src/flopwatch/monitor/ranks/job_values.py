"""Computes the metrics of a whole job from the reports of its ranks.

Ranks that share a batch (tensor, context or pipeline parallel) all report its tokens and model FLOPs. In the
metrics of the job these are counted once.
"""

from collections.abc import Mapping, Sequence

from flopwatch.monitor.measured_step import AMOUNTS, MeasuredStep, share_values
from flopwatch.monitor.ranks.reports import RATED, Amount, RankReport
from flopwatch.records.run import Number


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
    >>> window = merge([report_of(r, s, peak_flops_per_s=4e12) for r, s in enumerate((quick, short))])
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
        values |= _extremes(report)
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


def _extremes(report: RankReport) -> dict[str, Number]:
    """Which rank waits longest for input, and which has the longest step of its own."""
    values: dict[str, Number] = {}
    if report.longest_wait is not None:
        values["ranks/longest_input_wait_percent"] = 100 * report.longest_wait.value
        values["ranks/longest_input_wait_rank"] = report.longest_wait.rank
    if report.longest_own is not None and report.shortest_own is not None:
        values["ranks/longest_own_step_seconds"] = report.longest_own.value
        values["ranks/longest_own_step_rank"] = report.longest_own.rank
        values["ranks/shortest_own_step_seconds"] = report.shortest_own.value
    return values
