"""Makes rows of settled windows: metrics, totals, percentiles, the columns for the log."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from flopwatch.metrics import find_metric
from flopwatch.monitor.config import MonitorConfig
from flopwatch.monitor.ledger import Ledger
from flopwatch.monitor.meter import MeasuredStep, find_warm_up, percentile, window_values
from flopwatch.monitor.window import SettledStep
from flopwatch.records import Peak
from flopwatch.run_records import Number, Row

_PERCENTILE_STEPS = 512
_STEPS_TO_SEE_WARM_UP = 6
_NANOSECONDS = 9
"""Digits that are enough, and make the log shorter."""
_COLUMNS = (
    "step",
    "seconds",
    "input_wait_seconds",
    "samples",
    "tokens",
    "real_tokens",
    "trainable_tokens",
    "model_flops",
    "hardware_flops",
    "loss",
)


class RowMaker:
    """Turns windows into rows, in order. The first ones of a session wait until warm-up can be told.

    Attributes:
        ledger: The run's totals.
        latest: All values of the newest row; percentiles only where they were asked for.
    """

    def __init__(self, config: MonitorConfig, world_size: int) -> None:
        self._config = config
        self._world_size = world_size
        self._held: list[list[SettledStep]] = []
        self._warm_up_is_told = False
        self._steps_seen = 0
        self._next_detailed = 0
        self._recent_seconds: deque[float] = deque(maxlen=_PERCENTILE_STEPS)
        self._session = MeasuredSum()
        self.ledger = Ledger()
        self.latest: dict[str, Number] = {}

    def add(self, window: list[SettledStep]) -> None:
        self._held.append(window)

    def ready(self, peak: Peak | None, more: Callable[[], dict[str, Number]], *, now: bool) -> list[Row]:
        """The rows that can be made; `now` does not wait for more steps."""
        must_wait = not self._warm_up_is_told and self._config.warm_up_steps == "auto" and not now
        if must_wait and sum(map(len, self._held)) < _STEPS_TO_SEE_WARM_UP:
            return []
        windows, self._held = self._held, []
        if windows and not self._warm_up_is_told:
            windows = self._with_warm_up(windows)
        return [self._row(steps, peak, more(), now=now) for steps in windows]

    def session_values(self) -> dict[str, Number]:
        """Totals of the run and rates of this session."""
        return {**self._session.values(), **self.ledger.values()}

    def _with_warm_up(self, windows: list[list[SettledStep]]) -> list[list[SettledStep]]:
        wanted = self._config.warm_up_steps
        steps = [step for window in windows for step in window]
        count = (
            find_warm_up([step.measured.seconds for step in steps]) if wanted == "auto" else wanted - self._steps_seen
        )
        self._steps_seen += len(steps)
        self._warm_up_is_told = wanted == "auto" or self._steps_seen >= wanted
        marked = [
            step._replace(measured=step.measured._replace(is_warm_up=True)) if index < count else step
            for index, step in enumerate(steps)
        ]
        rest = iter(marked)
        return [[next(rest) for _ in window] for window in windows]

    def _row(self, steps: list[SettledStep], peak: Peak | None, more: dict[str, Number], *, now: bool) -> Row:
        measured = [step.measured for step in steps]
        last = steps[-1]
        is_detailed = self._is_detailed(last.measured.step)
        self.ledger.add_steps(measured)
        self._recent_seconds.extend(s.seconds for s in measured if s.seconds is not None and not s.is_warm_up)
        flops_per_s = None if peak is None else peak.flops_per_s
        values = window_values(measured, peak_flops_per_s=flops_per_s, world_size=self._world_size)
        self._session.add(measured, flops_per_s)
        values |= _means(steps) | self.ledger.values() | more
        if is_detailed or now:
            values |= self._percentiles()
        for key, value in (("training/lr", last.learning_rate), ("training/epoch", last.epoch)):
            if value is not None:
                values[key] = value
        self.latest = values
        return Row(
            last.measured.step,
            time.time(),
            {key: value for key, value in values.items() if is_detailed or find_metric(key).basic},
            is_detailed,
            _columns(measured),
            self.ledger.to_json(),
            ("wandb",) if all(step.skip_wandb for step in steps) else (),
        )

    def _is_detailed(self, step: int) -> bool:
        """The first row, then every `detailed_log_every` steps."""
        if self._config.reduced_logging or step < self._next_detailed:
            return False
        every = self._config.detailed_log_every
        self._next_detailed = (step + 1) // every * every + every - 1
        return True

    def _percentiles(self) -> dict[str, Number]:
        if not self._recent_seconds:
            return {}
        ordered = sorted(self._recent_seconds)
        return {f"perf/step_time_p{percent}": percentile(ordered, percent) for percent in (50, 90, 99)}


class MeasuredSum:
    """Sums of a session's timed steps, enough for its rates."""

    def __init__(self) -> None:
        self._steps = 0
        self._sums: dict[str, Any] = {}
        self._peak: float | None = None

    def add(self, steps: Sequence[MeasuredStep], peak_flops_per_s: float | None) -> None:
        self._peak = peak_flops_per_s
        timed = [step for step in steps if step.seconds is not None and not step.is_warm_up]
        self._steps += len(timed)
        for name in _SUMMED:
            known = [amount for step in timed if (amount := getattr(step, name)) is not None]
            if known:
                self._sums[name] = self._sums.get(name, 0) + sum(known)

    def values(self) -> dict[str, Number]:
        if not self._sums.get("seconds"):
            return {}
        values = window_values([MeasuredStep(0, **self._sums)], peak_flops_per_s=self._peak)
        values["perf/step_time"] = self._sums["seconds"] / self._steps
        values["perf/steps_per_second"] = self._steps / self._sums["seconds"]
        return values


_SUMMED = (
    "seconds",
    "input_wait_seconds",
    "samples",
    "tokens",
    "real_tokens",
    "trainable_tokens",
    "model_flops",
    "hardware_flops",
    "recompute_flops",
)


def _means(steps: Sequence[SettledStep]) -> dict[str, Number]:
    """The user's own metrics, averaged over the steps that logged them."""
    names = dict.fromkeys(name for step in steps for name in step.more)
    means: dict[str, Number] = {}
    for name in names:
        known = [step.more[name] for step in steps if name in step.more]
        means[name if "/" in name else f"training/{name}"] = sum(known) / len(known)
    return means


def _columns(steps: Sequence[MeasuredStep]) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = {name: [getattr(step, name) for step in steps] for name in _COLUMNS}
    for name in ("seconds", "input_wait_seconds"):
        columns[name] = [None if value is None else round(value, _NANOSECONDS) for value in columns[name]]
    if any(step.is_warm_up for step in steps):
        columns["warm_up"] = [step.is_warm_up for step in steps]
    return {name: column for name, column in columns.items() if any(value is not None for value in column)}
