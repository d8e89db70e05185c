"""Adds each window of steps to the run's totals and makes a row of it: metrics, percentiles and per-step columns."""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flopwatch.monitor.config import MonitorConfig
from flopwatch.monitor.measured_step import (
    AMOUNTS,
    MeasuredStep,
    effective_peak,
    find_warm_up,
    mean_of,
    window_values,
)
from flopwatch.monitor.ranks.job_values import (
    Straggler,
    StragglerHistory,
    job_totals,
    job_use_of_peak,
    job_values,
    rank_losses,
    straggler_values,
    with_job_wait,
)
from flopwatch.monitor.ranks.reports import RankReport, Window
from flopwatch.monitor.session import Session, Totals
from flopwatch.monitor.span import Span
from flopwatch.records.flops import Peak
from flopwatch.records.metrics import find_metric
from flopwatch.records.run import Number, PartialRow, Row
from flopwatch.stats import percentile

_PERCENTILE_STEPS = 512
_STEPS_TO_SEE_WARM_UP = 6
_SECONDS_DIGITS = 9
"""Times are logged in whole nanoseconds."""
_MOST_REASONS = 5
_COLUMNS = ("step", "seconds", "input_wait_seconds", *AMOUNTS, "loss")


@dataclass(frozen=True, slots=True)
class JobLayout:
    """How many ranks a training has, and how many of them have different data.

    Attributes:
        world_size: Number of all ranks.
        data_parallel_size: Number of different batches per step; each is shared by world_size / data_parallel_size
            ranks (tensor, context or pipeline parallel).
    """

    world_size: int
    data_parallel_size: int

    @property
    def devices_per_batch(self) -> int:
        """Number of ranks that share a batch."""
        return max(1, self.world_size // self.data_parallel_size)


class RowMaker:
    """Makes one row of each window of steps. The first windows are kept until it is known which steps are warm-up.

    Attributes:
        layout: Number of ranks, and how they share batches. It changes if the model is parallelised later.
        last_step: The last step of the newest row. The totals end with the same step.
        latest: All values of the newest row; percentiles only if the row is detailed or was made on request.
        straggler: The rank that the other ranks waited for in the newest row; None if there was none.
        missing_ranks: How many ranks did not report in the newest row.
        exact: Whether the FLOPs of all rows of this session are exact; None before the first row with FLOPs.
        notes: Reasons why `exact` is False.
    """

    def __init__(self, config: MonitorConfig, world_size: int, session: Session) -> None:
        self._config = config
        self._session = session
        self.layout = JobLayout(world_size, config.data_parallel_size or world_size)
        self._held: list[Window] = []
        self._doubted: list[tuple[int, int, str]] = []
        self._doubted_by_ranks: list[tuple[int, int, str]] = []
        """Doubts of other ranks, which hold for steps that were counted on this rank too."""
        self._stragglers = StragglerHistory()
        self.straggler: Straggler | None = None
        self.missing_ranks = 0
        self._fewest_ranks = world_size
        self._is_warm_up_known = False
        self._steps_seen = 0
        self._next_detailed = 0
        self._recent_seconds: deque[float] = deque(maxlen=_PERCENTILE_STEPS)
        self._of_session, self._of_asked = Span(), Span()
        self._asked: list[int] = []
        """Last steps of windows whose values a framework has asked for, and which are in no row yet."""
        self._answers: list[tuple[int, dict[str, Number]]] = []
        self.exact: bool | None = None
        self.notes: tuple[str, ...] = ()
        self.latest: dict[str, Number] = {}
        self.last_step: int | None = None
        self._last_loss: Number | None = None

    def add(self, window: Window) -> None:
        self._held.append(window)

    def doubt(self, steps: Sequence[tuple[int, int]], reason: str, *, by_other_rank: bool = False) -> None:
        """Say why uncounted steps in these ranges are not exact after all, although their rows may be written."""
        doubted = self._doubted_by_ranks if by_other_rank else self._doubted
        doubted += [(first, last, reason) for first, last in steps]
        self.exact = False
        self.notes = tuple(dict.fromkeys([*self.notes, reason]))[:_MOST_REASONS]

    def windows_past_warm_up(self, *, flush: bool) -> list[Window]:
        """Return the windows to log; none while warm-up steps are still unknown, unless `flush` is True."""
        must_wait = not self._is_warm_up_known and self._config.warm_up_steps == "auto" and not flush
        if must_wait and sum(len(window.steps) for window in self._held) < _STEPS_TO_SEE_WARM_UP:
            return []
        windows, self._held = self._held, []
        if windows and not self._is_warm_up_known:
            windows = self._with_warm_up(windows)
        if self._doubted:
            windows = [replace(window, steps=tuple(map(self._with_doubt, window.steps))) for window in windows]
        self._session.expect([step for window in windows for step in window.steps])
        return windows

    def session_values(self) -> dict[str, Number]:
        """Return the run's totals, the rates of this session, and its last logged loss."""
        values = self._of_session.values(self.layout.devices_per_batch, self.layout.data_parallel_size)
        if self.layout.world_size > 1:
            values["ranks/reporting"] = self._fewest_ranks
        if self._last_loss is not None:
            values["training/loss"] = self._last_loss
        if self.exact is not None:
            values["perf/exact"] = int(self.exact)
        return {**values, **self._session.totals(are_last=True).values}

    def _with_warm_up(self, windows: list[Window]) -> list[Window]:
        wanted = self._config.warm_up_steps
        steps = [step for window in windows for step in window.steps]
        rest = iter(self._marked(steps))
        self._steps_seen += len(steps)
        self._is_warm_up_known = wanted == "auto" or self._steps_seen >= wanted
        return [replace(window, steps=tuple(next(rest) for _ in window.steps)) for window in windows]

    def _marked(self, steps: Sequence[MeasuredStep]) -> list[MeasuredStep]:
        """Return the steps with `is_warm_up` set: by `warm_up_steps`, or by their times if that setting is `auto`."""
        wanted = self._config.warm_up_steps
        count = find_warm_up([step.seconds for step in steps]) if wanted == "auto" else wanted - self._steps_seen
        return [step._replace(is_warm_up=True) if index < count else step for index, step in enumerate(steps)]

    def so_far(self, begun: Sequence[MeasuredStep]) -> PartialRow | None:
        """Make a partial row of all steps that are in no row yet, with the totals after them. Changes no state.

        Args:
            begun: Steps of the current window. In the row, they follow the steps of ended windows that have no row yet.
        """
        steps = [*(step for window in self._held for step in window.steps), *begun]
        if not self._is_warm_up_known:
            steps = self._marked(steps)
        last_step = steps[-1].step if steps else self.last_step
        if last_step is None:
            return None
        ledger = self._session.totals_with(steps).ledger
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
        """Add a window to the totals and make its row.

        Args:
            window: This rank's steps, and the merged report of all ranks.
            peak: Peak of this rank's device.
            more: Further values for the row.
            with_percentiles: Whether the attribute `latest` gets percentiles even if the row is not detailed.
            later_seconds: Seconds of the steps after this window, which the row's wall time must not include.
        """
        steps, world_size = window.steps, self.layout.world_size
        report = window.report if window.report is not None and window.report.ranks == world_size else None
        last = steps[-1]
        is_detailed = self._is_detailed(last.step)
        values = self._rates(steps, peak, report) | self._of_all_ranks(window.report, report)
        totals = self._booked(steps, report, later_seconds, self._peak_of_devices(steps, values, peak))
        values |= _means(steps) | totals.values | more
        if is_detailed or with_percentiles:
            values |= self._percentiles()
        for key, value in (("training/lr", last.learning_rate), ("training/epoch", last.epoch)):
            if value is not None:
                values[key] = value
        exact, notes = self._judged(steps, window.report)
        if exact is not None:
            values["perf/exact"] = int(exact)
        self._last_loss = values.get("training/loss", self._last_loss)
        self.latest = values
        self.last_step = last.step
        self._answer()
        return Row(
            last.step,
            time.time(),
            {key: value for key, value in values.items() if is_detailed or find_metric(key).basic},
            is_detailed,
            _columns(steps),
            totals.ledger,
            ("wandb",) if all(step.skip_wandb for step in steps) else (),
            {} if report is None else job_totals(report, self.layout.data_parallel_size),
            exact,
            notes,
            _denominator(steps, peak),
        )

    def ask(self, last_step: int) -> None:
        """Ask for the values of all steps since the last time up to this one, in as many rows as they are."""
        self._asked.append(last_step)
        self._answer()

    def take_answers(self) -> list[tuple[int, dict[str, Number]]]:
        """Last step and values of the windows that were asked for and are complete; none if a row has two in part."""
        answers, self._answers = self._answers, []
        return answers

    def _answer(self) -> None:
        last = -1 if self.last_step is None else self.last_step
        due = [step for step in self._asked if step <= last]
        if not due:
            return
        span, layout = self._of_asked, self.layout
        is_known = span.rows == 1 or not (span.lacks_ranks and layout.world_size > 1)
        if due == [last] and span.is_whole and is_known:
            more = {} if span.rows == 1 else span.values(layout.devices_per_batch, layout.data_parallel_size)
            exact = {} if span.exact is None else {"perf/exact": int(span.exact)}
            self._answers.append((last, self.latest | more | exact))
        self._asked = self._asked[len(due) :]
        self._of_asked = Span(is_whole=due[-1] == last)

    def _booked(
        self,
        steps: Sequence[MeasuredStep],
        report: RankReport | None,
        later_seconds: float,
        peak_flops_per_s: float | None,
    ) -> Totals:
        if report is None:
            return self._session.book(steps, {}, later_seconds)
        unknown: dict[str, Any] = dict.fromkeys(AMOUNTS)
        steps = [step._replace(**unknown) for step in with_job_wait(steps, report)]
        totals = job_totals(report, self.layout.data_parallel_size)
        uses = job_use_of_peak(report, totals, peak_flops_per_s) | rank_losses(report)
        return self._session.book(steps, totals, later_seconds, uses)

    def _peak_of_devices(
        self, steps: Sequence[MeasuredStep], values: Mapping[str, Number], peak: Peak | None
    ) -> float | None:
        """Peak of one device, mean over ranks; of this rank if the window has only warm-up steps."""
        logged = values.get("perf/peak_flops_per_second_per_device")
        return logged or effective_peak(steps) or (None if peak is None else peak.flops_per_s)

    def _rates(self, steps: Sequence[MeasuredStep], peak: Peak | None, report: RankReport | None) -> dict[str, Number]:
        """Compute this rank's metrics. Those under `perf/` are left out if `report` has them for all ranks."""
        self._recent_seconds.extend(s.seconds for s in steps if s.seconds is not None and not s.is_warm_up)
        flops_per_s = None if peak is None else peak.flops_per_s
        for span in (self._of_session, self._of_asked):
            span.add(steps, flops_per_s, report)
        layout = self.layout
        values = window_values(
            steps, peak_flops_per_s=flops_per_s, device_count=layout.devices_per_batch, world_size=layout.world_size
        )
        return (
            values if report is None else {key: value for key, value in values.items() if not key.startswith("perf/")}
        )

    def _judged(self, steps: Sequence[MeasuredStep], report: RankReport | None) -> tuple[bool | None, tuple[str, ...]]:
        """Return whether the FLOPs of these steps are exact on all ranks, and the reasons if they are not."""
        exact, notes = _exactness([self._with_doubt(step) for step in steps])
        if self.layout.world_size > 1 and exact:
            notes = _reasons_of_ranks(report, self.layout.world_size)
            exact = not notes
        if exact is not None:
            self.exact = exact and self.exact is not False
            self._of_asked.exact = exact and self._of_asked.exact is not False
            self.notes = tuple(dict.fromkeys([*self.notes, *notes]))[:_MOST_REASONS]
        return exact, notes

    def _with_doubt(self, step: MeasuredStep) -> MeasuredStep:
        doubted = self._doubted_by_ranks if step.is_counted else [*self._doubted, *self._doubted_by_ranks]
        doubts = [reason for first, last, reason in doubted if first <= step.step <= last]
        return step if not doubts or step.reason else step._replace(reason=doubts[0])

    def _of_all_ranks(self, partial: RankReport | None, complete: RankReport | None) -> dict[str, Number]:
        """Compute the metrics of the whole job; if reports are missing, only the number of ranks that reported."""
        world_size = self.layout.world_size
        self.straggler = None
        reporting = world_size if complete is not None else 1 if partial is None else partial.ranks
        self.missing_ranks = 0 if partial is None else world_size - reporting
        self._fewest_ranks = min(self._fewest_ranks, reporting)
        if complete is None:
            return {} if world_size == 1 else {"ranks/reporting": reporting}
        self.straggler = self._stragglers.judge(complete)
        return job_values(complete, self.layout.data_parallel_size) | straggler_values(self.straggler)

    def _is_detailed(self, step: int) -> bool:
        """Whether this row gets all metrics. The first row does, and then one row every `detailed_log_every` steps."""
        if self._config.reduced_logging or step < self._next_detailed:
            return False
        every = self._config.detailed_log_every
        self._next_detailed = (step + 1) // every * every + every - 1
        return True

    def _percentiles(self) -> dict[str, Number]:
        if not self._recent_seconds:
            return {}
        ordered = sorted(self._recent_seconds)
        return {f"perf/step_time_p{percent}": percentile(ordered, percent / 100) for percent in (50, 90, 99)}


def _means(steps: Sequence[MeasuredStep]) -> dict[str, Number]:
    """Average the user's own metrics over the steps that logged them."""
    names = dict.fromkeys(name for step in steps for name in step.more)
    means: dict[str, Number] = {}
    for name in names:
        known = [step.more[name] for step in steps if name in step.more]
        means[name if "/" in name else f"training/{name}"] = mean_of(known)
    return means


def _denominator(steps: Sequence[MeasuredStep], peak: Peak | None) -> dict[str, Any] | None:
    if peak is None:
        return None
    return {"dtype": peak.dtype, "flops_per_s": effective_peak(steps) or peak.flops_per_s}


def _reasons_of_ranks(report: RankReport | None, world_size: int) -> tuple[str, ...]:
    """Return why FLOPs that are exact on this rank are not exact on all ranks; empty if they are."""
    if report is None or report.ranks < world_size:
        return (f"only {0 if report is None else report.ranks} of {world_size} ranks have reported these steps",)
    if report.exact_ranks < world_size:
        return (f"the FLOPs are exact on only {report.exact_ranks} of {world_size} ranks",)
    return ()


def _exactness(steps: Sequence[MeasuredStep]) -> tuple[bool | None, tuple[str, ...]]:
    """Return whether all FLOPs of these steps are exact, and the reasons if not."""
    known = [step for step in steps if step.model_flops is not None]
    reasons = dict.fromkeys(step.reason for step in steps if step.reason)
    if len(known) < len(steps) and not reasons:
        reasons["the FLOPs of some steps are not known"] = None
    return not reasons, tuple(str(reason) for reason in reasons)[:_MOST_REASONS]


def _columns(steps: Sequence[MeasuredStep]) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = {name: [getattr(step, name) for step in steps] for name in _COLUMNS}
    for name in ("seconds", "input_wait_seconds"):
        columns[name] = [None if value is None else round(value, _SECONDS_DIGITS) for value in columns[name]]
    if any(step.is_warm_up for step in steps):
        columns["warm_up"] = [step.is_warm_up for step in steps]
    return {name: column for name, column in columns.items() if any(value is not None for value in column)}
