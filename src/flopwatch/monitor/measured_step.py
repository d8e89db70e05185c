"""Computes rates and totals from measured steps, without reading a clock, a device or a file.

A rate is a sum divided by a sum, such as all tokens of a window divided by its seconds. A mean of per-step rates would
give fast steps too much weight.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any, NamedTuple

from flopwatch.records.metrics import APART, goodput_of, loss_in_step
from flopwatch.records.run import Number

AMOUNTS = (
    "samples",
    "tokens",
    "real_tokens",
    "trainable_tokens",
    "model_flops",
    "hardware_flops",
    "recompute_flops",
)
"""Names of the fields of `MeasuredStep` that can be added up over steps and ranks."""

_WARM_UP_FACTOR = 1.5
"""First steps that take over 1.5 times the median of later steps are warm-up: they compile, autotune or fill caches."""
_ENOUGH_COUNTED = 3
"""Of so many counted steps, the first can be compared with the others."""


class MeasuredStep(NamedTuple):
    """All measurements of one optimizer step. None means that a value is unknown.

    Attributes:
        step: The step's number.
        seconds: Time from the end of the step before to the end of this one, without pauses. None for the first step
            of a session, unless it was opened with `monitor.step()`.
        input_wait_seconds: The part of `seconds` spent waiting for batches.
        samples: Rows of the batches.
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
        more: The user's own metrics.
        skip_wandb: Whether the user wants this step not to be sent to W&B.
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
    epoch: float | None = None
    learning_rate: float | None = None
    more: Mapping[str, float] = {}
    skip_wandb: bool = False

    @property
    def work_seconds(self) -> float | None:
        """Seconds without the input wait; an unknown input wait is taken as 0."""
        return None if self.seconds is None else self.seconds - (self.input_wait_seconds or 0.0)


def window_values(
    steps: Sequence[MeasuredStep], *, peak_flops_per_s: float | None, device_count: int = 1, world_size: int = 1
) -> dict[str, Number]:
    """Compute the metrics of a window by key (see `flopwatch.records.metrics`). Unknown metrics are left out.

    Args:
        steps: The window's steps, as this process has measured them.
        peak_flops_per_s: Peak of one device.
        device_count: Devices that work on this process's batch.
        world_size: Number of processes. With more than one, metrics of the whole training are left out, because
            these steps show only the rates of this process.

    Example:
        >>> steps = [MeasuredStep(1, seconds=0.5, tokens=1000, model_flops=10**12)]
        >>> window_values(steps, peak_flops_per_s=4e12)["perf/mfu"]
        0.5
    """
    values: dict[str, Number | None] = {
        "training/loss": _mean(step.loss for step in steps),
        "training/grad_norm": _mean(step.grad_norm for step in steps),
    }
    timed = [step for step in steps if step.seconds is not None and not step.is_warm_up]
    seconds = sum(step.seconds or 0.0 for step in timed)
    if seconds > 0:
        values["perf/step_time"] = seconds / len(timed)
        values["perf/steps_per_second"] = len(timed) / seconds
        values |= _rates(timed, device_count, world_size)
        values |= _utilisation(timed, peak_flops_per_s, device_count)
        share = input_wait_share(timed)
        values["perf/input_wait_percent"] = None if share is None else 100 * share
    values |= _shares(steps)
    return {key: value for key, value in values.items() if value is not None}


def _rates(timed: Sequence[MeasuredStep], device_count: int, world_size: int) -> dict[str, Number | None]:
    rates: dict[str, Number | None] = {}
    for name in ("tokens", "real_tokens", "trainable_tokens", "samples"):
        known = [step for step in timed if getattr(step, name) is not None]
        if not known:
            continue
        rate = sum(getattr(step, name) for step in known) / sum(step.seconds or 0.0 for step in known)
        if world_size == 1:
            rates[f"perf/{name}_per_second"] = rate
        if name in ("tokens", "samples"):
            rates[f"perf/{name}_per_second_per_device"] = rate / device_count
    return rates


def _utilisation(
    timed: Sequence[MeasuredStep], peak_flops_per_s: float | None, device_count: int
) -> dict[str, Number | None]:
    """Compute MFU and HFU from the steps whose FLOPs are known."""
    values: dict[str, Number | None] = {}
    for name, share in (("model_flops", "mfu"), ("hardware_flops", "hfu")):
        known = [step for step in timed if getattr(step, name) is not None]
        if not known:
            continue
        flops = sum(getattr(step, name) for step in known)
        rate = flops / sum(step.seconds or 0.0 for step in known) / device_count
        values[f"perf/{name}_per_second_per_device"] = rate
        peak = effective_peak(known, name) or peak_flops_per_s
        if peak is not None:
            values[f"perf/{share}"] = rate / peak
            values[f"perf/{share}_percent"] = 100 * rate / peak
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
    padded = [step for step in steps if step.real_tokens is not None]
    executed = [step for step in steps if step.recompute_flops is not None]
    values = share_values(
        {
            "tokens": sum(step.tokens or 0 for step in padded),
            "real_tokens": sum(step.real_tokens or 0 for step in padded if step.tokens),
            "hardware_flops": sum(step.hardware_flops or 0 for step in executed),
            "recompute_flops": sum(step.recompute_flops or 0 for step in executed if step.hardware_flops),
        }
    )
    counted = sum(step.model_flops is not None for step in steps)
    return (
        values if counted in (0, len(steps)) else {**values, "perf/counted_steps_percent": 100 * counted / len(steps)}
    )


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
    seconds = sum(step.seconds or 0.0 for step in known)
    if not known or seconds < 0.5 * sum(step.seconds or 0.0 for step in steps):
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
    typical = median(value for _, value in timed[len(timed) // 2 :])
    leading = 0
    for index, value in timed:
        if value <= _WARM_UP_FACTOR * typical:
            break
        leading = index + 1
    return leading


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return mean_of(known) if known else None


def mean_of(known: Sequence[float]) -> float:
    """The mean; NaN if a value is NaN, or if both +inf and -inf occur.

    >>> mean_of([1.7e308, 1.7e308]), mean_of([float("inf"), float("-inf")])
    (1.7e+308, nan)
    """
    try:
        return fmean(known)
    except (OverflowError, ValueError):  # the sum exceeds the largest float, or +inf and -inf both occur
        return sum(value / len(known) for value in known)


def use_of_peak(step: MeasuredStep) -> dict[str, float]:
    """How long the devices would need for the step's FLOPs at their peak, in seconds; empty if that is unknown.

    `unpriced` is the time of a step whose FLOPs are unknown.

    >>> use_of_peak(MeasuredStep(1, 2.0, model_flops=6, hardware_flops=8, recompute_flops=2,
    ...                          model_peak_seconds=0.75, hardware_peak_seconds=1.0))
    {'model_at_peak': 0.75, 'hardware_at_peak': 1.0, 'recompute_at_peak': 0.25}
    """
    if step.seconds is None:
        return {}
    if step.model_flops is None:
        return {} if step.is_warm_up else {"unpriced": step.work_seconds or 0.0}
    if step.model_peak_seconds is None:
        return {}
    uses = {"model_at_peak": step.model_peak_seconds}
    uses["hardware_at_peak"] = executed = max(step.hardware_peak_seconds or 0.0, step.model_peak_seconds)
    if step.hardware_flops and step.recompute_flops is not None:
        uses["recompute_at_peak"] = executed * step.recompute_flops / step.hardware_flops
    return uses


def _flops_of_timed(step: MeasuredStep) -> dict[str, int]:
    """The FLOPs that `use_of_peak` divides by the peak; empty if the step has no time or no FLOPs."""
    if step.seconds is None or step.model_flops is None:
        return {}
    executed = max(step.hardware_flops or 0, step.model_flops)
    flops = {"model": step.model_flops, "hardware": executed}
    if step.hardware_flops and step.recompute_flops is not None:
        flops["recompute"] = executed * step.recompute_flops // step.hardware_flops
    return flops


_TOTALS = AMOUNTS[:-1]


@dataclass
class Ledger:
    """The run's totals over all steps and phases.

    Attributes:
        steps: Number of optimizer steps; repeated steps count once.
        totals: Samples, tokens and FLOPs of the steps; amounts that were never known are missing.
        seconds: Time by use, such as `train` and `eval`; `wall` is the time from the run's start to its newest row.
        first_start_unix_time: When the run's first process started; None if the log does not contain it.
        timed_flops: FLOPs of the timed steps, by use as in `use_of_peak`. With them, a reader of the log can compute
            what the run would have logged with another peak.
    """

    steps: int = 0
    totals: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    first_start_unix_time: float | None = None
    timed_flops: dict[str, int] = field(default_factory=dict)
    _not_compared: list[float] = field(default_factory=list, repr=False)
    """`work_seconds` of warm-up steps, kept until the typical time is known; what exceeds it is then lost time."""
    _counted: list[float] = field(default_factory=list, repr=False)
    """`work_seconds` of the first counted steps, kept until it is known what is typical of them."""
    _typical_counted: float | None = field(default=None, repr=False)

    def add_steps(
        self,
        steps: Iterable[MeasuredStep],
        typical_seconds: float | None = None,
        at_peak: Mapping[str, float] | None = None,
    ) -> None:
        """Add steps. If a warm-up or stalled step took longer than `typical_seconds`, the excess is lost time.

        Args:
            steps: The steps.
            typical_seconds: Median time of recent steps, without input wait; None if it is unknown.
            at_peak: What the steps used of the devices' peak, if the steps of one rank do not show it.
        """
        for step in steps:
            for name, seconds in (use_of_peak(step) if at_peak is None else {}).items():
                self.spend(name, seconds)
            self.add_timed_flops(_flops_of_timed(step))
            self.steps += 1
            self.add_amounts({name: amount for name in _TOTALS if (amount := getattr(step, name)) is not None})
            if step.seconds is not None and step.work_seconds is not None:
                self._add_time(step.seconds, step.work_seconds, typical_seconds, step)
            if step.input_wait_seconds is not None:
                self.spend("input_wait", step.input_wait_seconds)
            elif step.seconds is not None:
                self.spend("wait_unknown", step.seconds)
        if self._typical_counted is not None or len(self._counted) >= _ENOUGH_COUNTED:
            self.divide_counted(typical_seconds)
        for name, seconds in (at_peak or {}).items():
            self.spend(name, seconds)

    def _add_time(self, seconds: float, work_seconds: float, typical: float | None, step: MeasuredStep) -> None:
        self.spend("train", seconds)
        if step.is_counted:
            self._counted.append(work_seconds)
        else:
            if step.is_warm_up:
                self.spend("warm_up", seconds)
            self._look_for_loss(work_seconds, typical, step)

    @property
    def undivided_steps(self) -> int:
        return len(self._counted)

    def divide_counted(self, typical: float | None) -> None:
        """Divide the time of counted steps into that of a typical step, of counting its FLOPs, and what was lost.

        Nothing is divided while the typical time is unknown. What the first counted steps took longer than the others
        is not counting: they compile or fill caches. If only one step was counted, both are taken for counting.
        """
        if typical is None or not self._counted:
            return
        works, self._counted = self._counted, []
        first = 0
        if self._typical_counted is None:
            first = find_warm_up(works)
            self._typical_counted = median(works[first:])
        for index, work_seconds in enumerate(works):
            loss = loss_in_step(work_seconds, max(self._typical_counted, typical), is_warm_up=index < first)
            lost = 0.0 if loss is None else loss[1]
            if loss is not None:
                self.spend(*loss)
            counting = max(0.0, work_seconds - lost - typical)
            if index < first:
                self.spend("warm_up", work_seconds - counting)
            self.spend("train", -counting)
            self.spend("count", counting)

    def add_amounts(self, amounts: Mapping[str, int]) -> None:
        """Add samples, tokens and FLOPs, such as those of a whole window."""
        for name in _TOTALS:
            if name in amounts:
                self.totals[name] = self.totals.get(name, 0) + amounts[name]

    def add_timed_flops(self, flops: Mapping[str, int]) -> None:
        for name, more in flops.items():
            self.timed_flops[name] = self.timed_flops.get(name, 0) + more

    def _look_for_loss(self, work_seconds: float, typical: float | None, step: MeasuredStep) -> None:
        if step.is_warm_up:
            self._not_compared.append(work_seconds)
        elif (loss := loss_in_step(work_seconds, typical, is_warm_up=False)) is not None:
            self.spend(*loss)
        elif step.optimizer_seconds is not None:
            self.spend("divided", work_seconds)
            self.spend("optimizer", step.optimizer_seconds)
            self.spend("host", step.host_seconds or 0.0)
            if step.passes_seconds is not None:
                named = step.optimizer_seconds + (step.host_seconds or 0.0) + step.passes_seconds
                self.spend("passes_timed", work_seconds)
                self.spend("outside_passes", max(work_seconds - named, 0.0))
        if typical is not None and self._not_compared:
            for waiting in self._not_compared:
                if (loss := loss_in_step(waiting, typical, is_warm_up=True)) is not None:
                    self.spend(*loss)
            self._not_compared.clear()

    def add_seconds(self, phase: str, seconds: float) -> None:
        """Add time outside steps. A phase without a metric of its own is added to `pause`."""
        self.spend(phase if phase in APART else "pause", seconds)

    def spend(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def set_wall(self, unix_time: float) -> None:
        """Set the wall time: from the start of the run's first process to `unix_time`."""
        if self.first_start_unix_time is not None:
            self.seconds["wall"] = unix_time - self.first_start_unix_time

    def values(self) -> dict[str, Number]:
        """The totals as metrics; the keys are those of `flopwatch.records.metrics`."""
        values: dict[str, Number] = {
            "total/steps": self.steps,
            **{f"total/{name}": total for name, total in self.totals.items()},
            **{f"time/{name}_seconds": seconds for name, seconds in self.seconds.items()},
        }
        goodput = goodput_of(self.seconds)
        if goodput is not None:
            values["perf/goodput"] = goodput.share
            values["perf/goodput_percent"] = 100 * goodput.share
            values["time/productive_seconds"] = goodput.productive_seconds
            values["time/other_seconds"] = goodput.lost_seconds["other"]
            if "between" in goodput.lost_seconds:
                values["time/between_seconds"] = goodput.lost_seconds["between"]
        return values

    def to_json(self) -> dict[str, Any]:
        state = {"steps": self.steps, "totals": dict(self.totals), "seconds": dict(self.seconds)}
        flops = dict(self.timed_flops)
        return state | {"first_start_unix_time": self.first_start_unix_time, "timed_flops": flops}

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> "Ledger":
        first_start, flops = state.get("first_start_unix_time"), dict(state.get("timed_flops", {}))
        return cls(int(state["steps"]), dict(state["totals"]), dict(state["seconds"]), first_start, flops)
