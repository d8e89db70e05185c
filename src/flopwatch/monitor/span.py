"""Adds up the steps of several windows, for rates that are those of all of them together."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from flopwatch.monitor.measured_step import AMOUNTS, MeasuredStep, window_values
from flopwatch.monitor.ranks.job_values import job_values
from flopwatch.monitor.ranks.reports import RankReport, extend
from flopwatch.records.run import Number


class Span:
    """The sums of several windows.

    Attributes:
        rows: How many windows it has.
        is_whole: False if its first window has steps of the span before too.
        lacks_ranks: Whether a window has no report of all ranks.
        exact: Whether the FLOPs of all windows are exact; None without FLOPs.
    """

    def __init__(self, *, is_whole: bool = True) -> None:
        self._own = MeasuredSum()
        self._all_ranks: RankReport | None = None
        self.rows = 0
        self.is_whole, self.lacks_ranks = is_whole, False
        self.exact: bool | None = None

    def add(self, steps: Sequence[MeasuredStep], peak_flops_per_s: float | None, report: RankReport | None) -> None:
        self.rows += 1
        self._own.add(steps, peak_flops_per_s)
        if report is None:
            self.lacks_ranks = True
        else:
            self._all_ranks = report if self._all_ranks is None else extend(self._all_ranks, report)

    def values(self, device_count: int, data_parallel_size: int) -> dict[str, Number]:
        if self._all_ranks is not None:
            return job_values(self._all_ranks, data_parallel_size)
        return self._own.values(device_count)


class MeasuredSum:
    """Sums for a session's rates. Steps that lack a value are summed separately, because some rates skip them."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, ...], dict[str, Any]] = {}
        self._steps_of: Counter[tuple[str, ...]] = Counter()
        self._peak: float | None = None

    def add(self, steps: Sequence[MeasuredStep], peak_flops_per_s: float | None) -> None:
        self._peak = peak_flops_per_s
        timed = [step for step in steps if step.seconds is not None and not step.is_warm_up]
        for step in timed:
            known = tuple(name for name in _SUMMED if getattr(step, name) is not None)
            self._steps_of[known] += 1
            sums = self._sums.setdefault(known, dict.fromkeys(known, 0))
            for name in known:
                sums[name] += getattr(step, name)

    def values(self, device_count: int) -> dict[str, Number]:
        seconds, all_steps = sum(sums["seconds"] for sums in self._sums.values()), self._steps_of.total()
        if not seconds:
            return {}
        steps = [MeasuredStep(0, **sums) for sums in self._sums.values()]
        values = window_values(steps, peak_flops_per_s=self._peak, device_count=device_count)
        if "perf/counted_steps_percent" in values:
            counted = sum(steps for known, steps in self._steps_of.items() if "model_flops" in known)
            values["perf/counted_steps_percent"] = 100 * counted / all_steps
        values["perf/step_time"] = seconds / all_steps
        values["perf/steps_per_second"] = all_steps / seconds
        return values


_SUMMED = ("seconds", "input_wait_seconds", *AMOUNTS, "model_peak_seconds", "hardware_peak_seconds")
