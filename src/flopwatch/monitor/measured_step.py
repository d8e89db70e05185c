"""Computes rates from measured steps, without reading a clock, a device or a file.

A rate is a sum divided by a sum, such as all tokens of a window divided by its seconds. A mean of per-step rates would
give fast steps too much weight.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from statistics import fmean, median
from typing import NamedTuple

from flopwatch.records.run import Number

AMOUNTS = ("samples", "tokens", "real_tokens", "trainable_tokens", "model_flops", "hardware_flops", "recompute_flops")
"""Names of the fields of `MeasuredStep` that can be added up over steps and ranks."""

_WARM_UP_FACTOR = 1.5
"""First steps that take over 1.5 times the median of later steps are warm-up: they compile, autotune or fill caches."""


class MeasuredStep(NamedTuple):
    """All measurements of one optimizer step. None means that a value is unknown.

    Attributes:
        seconds: Time from the end of the step before to the end of this one, without pauses. None for the first step
            of a session, unless it was opened with `monitor.step()`.
        input_wait_seconds: The part of `seconds` spent waiting for batches.
        tokens: Positions of the batches, padding included.
        real_tokens: Positions that are not padding.
        trainable_tokens: Positions whose label is not -100.
        model_flops: FLOPs that the model's mathematics needs, without padding and recomputation.
        hardware_flops: FLOPs that are executed.
        recompute_flops: The part of `hardware_flops` that the backward pass computes again.
        is_warm_up: Whether the step is warm-up and therefore left out of all rates.
        model_peak_seconds: Time one device would need for `model_flops` at its peak for the data types in use.
        hardware_peak_seconds: Time one device would need for `hardware_flops` at that peak.
        reason: Why the FLOPs are not exact; None when they are exact or unknown.
        is_counted: Whether the FLOPs of this step were counted while it ran, which slows the step down.
        optimizer_seconds: The part of `seconds` in which optimizers changed the parameters.
        host_seconds: The part of `seconds` after the last optimizer, such as the user's own logging.
        passes_seconds: The part of `seconds` in forward and backward passes.
        backward_seconds: The part of `passes_seconds` in backward passes.
        more: The user's own metrics.
    """

    step: int
    seconds: float | None = None
    input_wait_seconds: float | None = None
    samples: int | None = None
    tokens: int | None = None
    real_tokens: int | None = None
    trainable_tokens: int | None = None
    model_flops: int | None = None
    hardware_flops: int | None = None
    recompute_flops: int | None = None
    loss: float | None = None
    grad_norm: float | None = None
    is_warm_up: bool = False
    model_peak_seconds: float | None = None
    hardware_peak_seconds: float | None = None
    reason: str | None = None
    is_counted: bool = False
    optimizer_seconds: float | None = None
    host_seconds: float | None = None
    passes_seconds: float | None = None
    backward_seconds: float | None = None
    epoch: float | None = None
    learning_rate: float | None = None
    more: Mapping[str, float] = {}
    skip_wandb: bool = False

    @property
    def work_seconds(self) -> float | None:
        """Seconds without the input wait; an unknown input wait is taken as 0."""
        return None if self.seconds is None else self.seconds - (self.input_wait_seconds or 0.0)


def seconds_of(steps: Iterable[MeasuredStep]) -> float:
    return sum(step.seconds or 0.0 for step in steps)


def window_values(
    steps: Sequence[MeasuredStep], *, peak_flops_per_s: float | None, device_count: int = 1, world_size: int = 1
) -> dict[str, Number]:
    """Compute the metrics of a window by key (see `flopwatch.records.metrics`). Unknown metrics are left out.

    Args:
        steps: The window's steps, as this process has measured them.
        peak_flops_per_s: Peak of one device.
        device_count: Devices that work on this process's batch.
        world_size: Number of processes. With more than one, metrics of the whole training are left out.

    >>> window_values([MeasuredStep(1, seconds=0.5, model_flops=10**12)], peak_flops_per_s=4e12)["perf/mfu"]
    0.5
    """
    values: dict[str, Number | None] = {
        "training/loss": mean_of([step.loss for step in steps]),
        "training/grad_norm": mean_of([step.grad_norm for step in steps]),
    }
    timed = [step for step in steps if step.seconds is not None and not step.is_warm_up]
    seconds = seconds_of(timed)
    if seconds > 0:
        values |= {"perf/step_time": seconds / len(timed), "perf/steps_per_second": len(timed) / seconds}
        values |= _rates(timed, device_count, world_size)
        values |= _utilisation(timed, peak_flops_per_s, device_count)
        share = input_wait_share(timed)
        values["perf/input_wait_percent"] = None if share is None else 100 * share
    values |= _shares(steps)
    return {key: value for key, value in values.items() if value is not None}


def _per_second(timed: Sequence[MeasuredStep], name: str) -> float | None:
    """The rate of an amount in the steps in which it is known; None if they do not know it, or took 0 s."""
    known = [step for step in timed if getattr(step, name) is not None]
    seconds = seconds_of(known)
    return sum(getattr(step, name) for step in known) / seconds if seconds > 0 else None


def _rates(timed: Sequence[MeasuredStep], device_count: int, world_size: int) -> dict[str, Number | None]:
    rates: dict[str, Number | None] = {}
    for name in ("tokens", "real_tokens", "trainable_tokens", "samples"):
        rate = _per_second(timed, name)
        if rate is None:
            continue
        if world_size == 1:
            rates[f"perf/{name}_per_second"] = rate
        if name in ("tokens", "samples"):
            rates[f"perf/{name}_per_second_per_device"] = rate / device_count
    return rates


def _utilisation(
    timed: Sequence[MeasuredStep], peak_flops_per_s: float | None, device_count: int
) -> dict[str, Number | None]:
    values: dict[str, Number | None] = {}
    for name, share in (("model_flops", "mfu"), ("hardware_flops", "hfu")):
        per_second, peak = _per_second(timed, name), effective_peak(timed, name) or peak_flops_per_s
        if per_second is None:
            continue
        rate = per_second / device_count
        values[f"perf/{name}_per_second_per_device"] = rate
        if peak is not None:
            values |= {f"perf/{share}": rate / peak, f"perf/{share}_percent": 100 * rate / peak}
    whole = effective_peak(timed) or peak_flops_per_s
    if whole is not None:
        values["perf/peak_flops_per_second_per_device"] = whole
    return values


def effective_peak(steps: Sequence[MeasuredStep], name: str = "model_flops") -> float | None:
    """Peak of a device in FLOP/s, averaged over the data types in which these steps ran; None where unknown.

    >>> effective_peak([MeasuredStep(1, model_flops=300, model_peak_seconds=1.0)])
    300.0
    """
    known = [step for step in steps if getattr(step, name) is not None]
    seconds = [getattr(step, name.replace("_flops", "_peak_seconds")) for step in known]
    if not known or None in seconds or not sum(seconds):
        return None
    return float(sum(getattr(step, name) for step in known) / sum(seconds))


def _shares(steps: Sequence[MeasuredStep]) -> dict[str, Number]:
    totals: dict[str, int] = {}
    for whole, part in (("tokens", "real_tokens"), ("hardware_flops", "recompute_flops")):
        known = [step for step in steps if getattr(step, whole) and getattr(step, part) is not None]
        totals |= {name: sum(getattr(step, name) for step in known) for name in (whole, part)}
    values, counted = share_values(totals), sum(step.model_flops is not None for step in steps)
    if counted not in (0, len(steps)):
        values["perf/counted_steps_percent"] = 100 * counted / len(steps)
    return values


def share_values(totals: Mapping[str, int]) -> dict[str, Number]:
    """Compute the percentages of padding and of recomputation from total tokens and FLOPs."""
    values: dict[str, Number] = {}
    if totals.get("tokens") and "real_tokens" in totals:
        values["perf/padding_percent"] = 100 * (totals["tokens"] - totals["real_tokens"]) / totals["tokens"]
    if totals.get("hardware_flops") and "recompute_flops" in totals:
        values["perf/recompute_percent"] = 100 * totals["recompute_flops"] / totals["hardware_flops"]
    return values


def input_wait_share(steps: Sequence[MeasuredStep]) -> float | None:
    """Share of step time spent waiting for batches, over steps whose wait is known.

    None if such steps are less than half of the step time, because they do not stand for the others then.

    >>> input_wait_share([MeasuredStep(1, seconds=2.0, input_wait_seconds=0.5), MeasuredStep(2, seconds=1.0)])
    0.25
    >>> input_wait_share([MeasuredStep(1, seconds=2.0, input_wait_seconds=0.5), MeasuredStep(2, seconds=9.0)])
    """
    known = [step for step in steps if step.input_wait_seconds is not None and step.seconds]
    seconds = seconds_of(known)
    if not known or seconds < 0.5 * seconds_of(steps):
        return None
    return sum(step.input_wait_seconds or 0.0 for step in known) / seconds


def find_warm_up(seconds: Sequence[float | None]) -> int:
    """Count the warm-up steps at the beginning: those much slower than the median of the second half of the steps.

    Steps without a time are skipped, because no rate uses them.

    >>> find_warm_up([9.0, 2.0, 1.0, 1.1, 1.0, 1.0])
    2
    >>> find_warm_up([1.0, 1.1, 1.0, 5.0, 1.0])
    0
    """
    timed = [(index, value) for index, value in enumerate(seconds) if value is not None]
    if len(timed) < 2:
        return 0
    least = _WARM_UP_FACTOR * median(value for _, value in timed[len(timed) // 2 :])
    slow = takewhile(lambda step: not step[1] <= least, timed)
    return max((index + 1 for index, _ in slow), default=0)


def mean_of(values: Sequence[float | None]) -> float | None:
    """The mean of the values that are known; NaN if a value is NaN, or if both +inf and -inf occur.

    >>> mean_of([1.7e308, 1.7e308, None]), mean_of([float("inf"), float("-inf")])
    (1.7e+308, nan)
    """
    known = [value for value in values if value is not None]
    try:
        return fmean(known) if known else None
    except (OverflowError, ValueError):  # the sum exceeds the largest float, or +inf and -inf both occur
        return sum(value / len(known) for value in known)
