"""Makes a row of each window of steps: adds the window to the totals, and computes metrics and per-step columns."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from flopwatch.language import Said
from flopwatch.monitor.config import MonitorConfig
from flopwatch.monitor.counters.values import ENERGY, OF_RANKS, POWER, energy_per_work, joined, values_of_ranks
from flopwatch.monitor.measured_step import AMOUNTS, MeasuredStep, effective_peak, find_warm_up, mean_of, window_values
from flopwatch.monitor.ranks.job_values import job_totals, job_values
from flopwatch.monitor.ranks.reports import RankReport, Window
from flopwatch.monitor.totals import RunTotals
from flopwatch.records.flops import Peak
from flopwatch.records.metrics import find_metric
from flopwatch.records.run import Number, PartialRow, Row

_STEPS_TO_SEE_WARM_UP = 6
_SECONDS_DIGITS = 9
"""Times are logged in whole nanoseconds."""
_MOST_REASONS = 5
_COLUMNS = ("step", "seconds", "input_wait_seconds", *AMOUNTS, "loss")


@dataclass(frozen=True, slots=True)
class JobLayout:
    """How many ranks a training has, and how many of them have different data.

    Attributes:
        data_parallel_size: Number of different batches per step; each is shared by world_size / data_parallel_size
            ranks (tensor, context or pipeline parallel).
    """

    world_size: int
    data_parallel_size: int

    @property
    def devices_per_batch(self) -> int:
        return max(1, self.world_size // self.data_parallel_size)


class RowExactness:
    """Judges whether the FLOPs of rows are exact.

    Attributes:
        exact: Whether all rows of this session are exact; None before the first row.
        notes: Reasons why `exact` is False.
        doubts: First and last uncounted steps that this rank does not call exact any longer, and the reason.
    """

    def __init__(self) -> None:
        self.exact: bool | None = None
        self.notes: tuple[str, ...] = ()
        self.doubts: list[tuple[int, int, str]] = []
        self._doubts_of_ranks: list[tuple[int, int, str]] = []

    def doubt(self, steps: Sequence[tuple[int, int]], reason: str, *, by_other_rank: bool = False) -> None:
        """Say why uncounted steps in these ranges are not exact after all, although their rows may be written.

        A doubt of another rank also holds for steps that this rank has counted.
        """
        doubts = self._doubts_of_ranks if by_other_rank else self.doubts
        doubts += [(first, last, reason) for first, last in steps]
        self._note(False, (reason,))

    def with_doubt(self, step: MeasuredStep) -> MeasuredStep:
        doubts = self._doubts_of_ranks if step.is_counted else [*self.doubts, *self._doubts_of_ranks]
        found = (reason for first, last, reason in doubts if first <= step.step <= last)
        return step._replace(reason=step.reason or next(found, None))

    def judge(self, window: Window, world_size: int) -> tuple[bool, tuple[str, ...]]:
        """Return whether the FLOPs of a window's steps are exact on all ranks, and the reasons if they are not."""
        reasons = dict.fromkeys(step.reason for step in map(self.with_doubt, window.steps) if step.reason)
        notes = tuple(reasons)[:_MOST_REASONS]
        if not notes and any(step.model_flops is None for step in window.steps):
            notes = (Said("the FLOPs of some steps are not known"),)
        if not notes and world_size > 1:
            report = window.report
            reported, exact = (0, 0) if report is None else (report.ranks, report.exact_ranks)
            if reported < world_size:
                notes = (
                    Said(
                        "only {reported} of {world_size} ranks have reported these steps",
                        reported=reported,
                        world_size=world_size,
                    ),
                )
            elif exact < world_size:
                notes = (
                    Said(
                        "the FLOPs are exact on only {exact} of {world_size} ranks", exact=exact, world_size=world_size
                    ),
                )
        self._note(not notes, notes)
        return not notes, notes

    def _note(self, exact: bool, notes: tuple[str, ...]) -> None:
        self.exact = exact and self.exact is not False
        self.notes = tuple(dict.fromkeys([*self.notes, *notes]))[:_MOST_REASONS]


@dataclass(frozen=True, slots=True)
class NewestRow:
    """The newest row, with what its record does not contain.

    Attributes:
        values: All its values; percentiles only if the row is detailed or was made on request.
        last_loss: The loss of the newest row that has one.
    """

    step: int | None = None
    values: dict[str, Number] = field(default_factory=dict)
    missing_ranks: int = 0
    last_loss: Number | None = None


class RowMaker:
    """Makes one row of each window of steps. The first windows are kept until it is known which steps are warm-up.

    Attributes:
        layout: Number of ranks, and how they share batches. It changes if the model is parallelised later.
    """

    def __init__(self, config: MonitorConfig, world_size: int, totals: RunTotals) -> None:
        self._config, self.totals = config, totals
        self.layout = JobLayout(world_size, config.data_parallel_size or world_size)
        self.exactness = RowExactness()
        self.newest = NewestRow()
        self._joules = self._joules_seconds = 0.0
        self._held: list[Window] = []
        self._steps_seen = 0
        self._next_detailed = 0

    def add(self, window: Window) -> None:
        self._held.append(window)

    def windows_past_warm_up(self, *, flush: bool) -> list[Window]:
        """Return the windows to log; none while warm-up steps are still unknown, unless `flush` is True."""
        steps = [step for window in self._held for step in window.steps]
        must_wait = self._config.warm_up_steps == "auto" and not self._steps_seen and not flush
        if must_wait and len(steps) < _STEPS_TO_SEE_WARM_UP:
            return []
        known = self._marked(steps)
        if self.exactness.doubts:
            known = [self.exactness.with_doubt(step) for step in known]
        rest = iter(known)
        windows = [replace(window, steps=tuple(islice(rest, len(window.steps)))) for window in self._held]
        self._held, self._steps_seen = [], self._steps_seen + len(steps)
        self.totals.announce(known)
        return windows

    def _marked(self, steps: Sequence[MeasuredStep]) -> list[MeasuredStep]:
        """Return the steps with `is_warm_up` set: by `warm_up_steps`, or by their times if that setting is `auto`."""
        wanted = self._config.warm_up_steps
        if wanted == "auto":
            wanted = 0 if self._steps_seen else find_warm_up([step.seconds for step in steps])
        count = wanted - self._steps_seen
        return [step._replace(is_warm_up=True) if index < count else step for index, step in enumerate(steps)]

    def so_far(self, read_early: Sequence[MeasuredStep]) -> PartialRow | None:
        """Make a partial row of all steps that are in no row yet, with the totals after them. Changes no state.

        The steps of ended windows come first, then those of the current window (`read_early`).
        """
        steps = self._marked([*(step for window in self._held for step in window.steps), *read_early])
        last_step = steps[-1].step if steps else self.newest.step
        if last_step is None:
            return None
        ledger = self.totals.up_to_now_with(steps).to_json()
        return PartialRow(last_step, time.time(), {}, steps=_columns(steps), ledger=ledger)

    def row(
        self,
        window: Window,
        peak: Peak | None,
        more: dict[str, Number],
        *,
        with_percentiles: bool = False,
        later_seconds: float = 0.0,
    ) -> Row:
        """Add a window to the totals and make its row, with the values in `more`.

        `with_percentiles` gives percentiles to the values of `newest`, even if the row is not detailed. The row's wall
        time must not include `later_seconds`, those of later steps.
        """
        steps, last, layout = window.steps, window.steps[-1], self.layout
        is_detailed = self._is_detailed(last.step)
        report = window.report if window.ranks == layout.world_size else None
        exact, notes = self.exactness.judge(window, layout.world_size)
        values = self._rates(window, peak, report)
        own_peak = peak_in_use(steps, peak)
        mean_peak = values.get("perf/peak_flops_per_second_per_device") or own_peak  # not in a row of warm-up steps
        of_all_ranks = {} if report is None else job_totals(report, layout.data_parallel_size)
        values |= self._of_counters(window, report, values)
        self.totals.add_window(steps, later_seconds, report, of_all_ranks, mean_peak)
        for name in dict.fromkeys(name for step in steps for name in step.more):
            mean = mean_of([step.more.get(name) for step in steps])
            values |= {} if mean is None else {name if "/" in name else f"training/{name}": mean}
        values |= self.totals.ledger.values() | more
        values |= self.totals.percentiles() if is_detailed or with_percentiles else {}
        known = {"training/lr": last.learning_rate, "training/epoch": last.epoch, "perf/exact": int(exact)}
        values |= {key: value for key, value in known.items() if value is not None}
        missing = 0 if window.report is None else layout.world_size - window.ranks
        loss = values.get("training/loss", self.newest.last_loss)
        self.newest = NewestRow(last.step, values, missing, loss)
        return Row(
            last.step,
            time.time(),
            {key: value for key, value in values.items() if is_detailed or find_metric(key).basic},
            is_detailed,
            _columns(steps),
            self.totals.ledger.to_json(),
            ("wandb",) if all(step.skip_wandb for step in steps) else (),
            of_all_ranks,
            exact,
            notes,
            None if peak is None else {"dtype": peak.dtype, "flops_per_s": own_peak},
            getattr(joined(window.counters), "source", None),
        )

    def _of_counters(self, window: Window, report: RankReport | None, rates: dict[str, Number]) -> dict[str, Number]:
        """Return the metrics of the window's counters, those of all ranks if there is a report; add its energy."""
        values = dict(window.counter_values)
        if report is not None:
            memory = {key: value for key, value in values.items() if key not in OF_RANKS}
            values = values_of_ranks(report.counters, self.layout.world_size) | memory
        watts, joules = values.get(POWER), values.get(ENERGY)
        if joules is not None:
            self.totals.ledger.add_energy(joules)
            self._joules += joules
            self._joules_seconds += joules / watts if watts else 0.0
        return values | energy_per_work(rates, watts)

    def _rates(self, window: Window, peak: Peak | None, report: RankReport | None) -> dict[str, Number]:
        """Return the rates of a window, those of all ranks if there is a report. Also add the window to the sums."""
        layout, flops_per_s = self.layout, None if peak is None else peak.flops_per_s
        self.totals.of_session.add(window, flops_per_s, layout.world_size)
        devices, ranks = layout.devices_per_batch, layout.world_size
        values = window_values(window.steps, peak_flops_per_s=flops_per_s, device_count=devices, world_size=ranks)
        if report is not None:
            own = {key: value for key, value in values.items() if not key.startswith("perf/")}
            return own | job_values(report, layout.data_parallel_size)
        return values if ranks == 1 else values | {"ranks/reporting": window.ranks}

    def session_values(self) -> dict[str, Number]:
        layout, session = self.layout, self.totals.of_session
        values = session.values(layout.devices_per_batch, layout.data_parallel_size)
        if layout.world_size > 1:
            values["ranks/reporting"] = session.fewest_ranks or layout.world_size
        if self.newest.last_loss is not None:
            values["training/loss"] = self.newest.last_loss
        if self.exactness.exact is not None:
            values["perf/exact"] = int(self.exactness.exact)
        if self._joules_seconds:
            values |= energy_per_work(values, self._joules / self._joules_seconds)
        return values | self.totals.up_to_now(are_last=True).values()

    def _is_detailed(self, step: int) -> bool:
        """Whether this row gets all metrics. The first row does, and then one row every `detailed_log_every` steps."""
        if self._config.reduced_logging or step < self._next_detailed:
            return False
        every = self._config.detailed_log_every
        self._next_detailed = (step + 1) // every * every + every - 1
        return True


def peak_in_use(steps: Sequence[MeasuredStep], peak: Peak | None) -> float | None:
    """Peak of one device, averaged over the data types in which the steps ran; None if unknown."""
    return effective_peak(steps) or (None if peak is None else peak.flops_per_s)


def _columns(steps: Sequence[MeasuredStep]) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = {name: [getattr(step, name) for step in steps] for name in _COLUMNS}
    for name in ("seconds", "input_wait_seconds"):
        columns[name] = [None if value is None else round(value, _SECONDS_DIGITS) for value in columns[name]]
    if any(step.is_warm_up for step in steps):
        columns["warm_up"] = [step.is_warm_up for step in steps]
    return {name: column for name, column in columns.items() if any(value is not None for value in column)}
