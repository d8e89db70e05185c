"""The totals of a run: everything that grows with its steps, and its wall time over all sessions.

A session is one process of a run, from its start to its end.
"""

import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from operator import floordiv, truediv
from statistics import median
from time import process_time
from typing import Any

from flopwatch import process
from flopwatch.clock import Clock, cell_start_unix_time
from flopwatch.monitor.measured_step import AMOUNTS, MeasuredStep, find_warm_up, seconds_of, window_values
from flopwatch.monitor.ranks.job_values import job_use_of_peak, job_values, with_job_wait
from flopwatch.monitor.ranks.reports import RankReport, Window, extend
from flopwatch.records.metrics import APART, carried_seconds, goodput_of, loss_in_step, typical_seconds
from flopwatch.records.run import Number
from flopwatch.stats import percentile
from flopwatch.torch_internals.autograd import compile_seconds

_TOTALS = AMOUNTS[:-1]
_ENERGY = "energy_joules"
_PROCESSOR = "processor"
"""The key of processor time in `Ledger.seconds`. It is of one rank, and no use of the wall time."""
_SUMMED = ("seconds", "input_wait_seconds", *AMOUNTS, "model_peak_seconds", "hardware_peak_seconds")
_ENOUGH_COUNTED = 3
"""This many counted steps are needed to compare the first of them with the others."""
_TYPICAL_STEPS = 64
"""A step is stalled if it takes much longer than the median of the last 64 steps."""
_PERCENTILE_STEPS = 512


@dataclass
class Ledger:
    """The run's totals over all steps, phases and sessions.

    Attributes:
        steps: Number of optimizer steps; repeated steps count once.
        totals: Samples, tokens and FLOPs of the steps, and the energy of the devices in J; amounts that were never
            known are missing.
        seconds: Time by use, such as `train` and `eval`; `wall` is the time from the run's start to its newest row.
        first_start_unix_time: When the run's first process started; None if the log does not contain it.
        timed_flops: FLOPs of the timed steps, by use as in `use_of_peak`. With them, a reader of the log can compute
            what the run would have logged with another peak.
    """

    steps: int = 0
    totals: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=dict)
    first_start_unix_time: float | None = None
    timed_flops: Counter[str] = field(default_factory=Counter)
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

        `at_peak` is what the steps used of the devices' peak, if the steps of one rank do not show it.
        """
        for step in steps:
            self.steps += 1
            self.add_amounts({name: amount for name in AMOUNTS if (amount := getattr(step, name)) is not None})
            if step.seconds is not None and step.work_seconds is not None:
                if step.model_flops is not None:
                    self.timed_flops.update(_by_use(step, step.model_flops, step.hardware_flops, floordiv))
                self.add_seconds(use_of_peak(step) if at_peak is None else {})
                self._add_time(step, step.seconds, step.work_seconds, typical_seconds)
            if step.input_wait_seconds is not None:
                self.add_seconds({"input_wait": step.input_wait_seconds})
            elif step.seconds is not None:
                self.add_seconds({"wait_unknown": step.seconds})
        if self._typical_counted is not None or len(self._counted) >= _ENOUGH_COUNTED:
            self.divide_counted(typical_seconds)
        self.add_seconds(at_peak or {})

    def _add_time(self, step: MeasuredStep, seconds: float, work_seconds: float, typical: float | None) -> None:
        self.add_seconds({"train": seconds})
        if step.is_counted:
            self._counted.append(work_seconds)
            return
        if step.is_warm_up:
            self.add_seconds({"warm_up": seconds})
            self._not_compared.append(work_seconds)
        elif not self._lose(work_seconds, typical, is_warm_up=False) and step.optimizer_seconds is not None:
            host = step.host_seconds or 0.0
            self.add_seconds({"divided": work_seconds, "optimizer": step.optimizer_seconds, "host": host})
            if step.passes_seconds is not None:
                outside = max(work_seconds - (step.optimizer_seconds + host + step.passes_seconds), 0.0)
                self.add_seconds({"passes_timed": work_seconds, "outside_passes": outside})
        if typical is not None:
            for waiting in self._not_compared:
                self._lose(waiting, typical, is_warm_up=True)
            self._not_compared.clear()

    def _lose(self, work_seconds: float, typical: float | None, *, is_warm_up: bool) -> float:
        """Add to the lost time what a step took too long; return it in seconds."""
        use, seconds = loss_in_step(work_seconds, typical, is_warm_up=is_warm_up) or ("", 0.0)
        self.add_seconds({use: seconds} if use else {})
        return seconds

    @property
    def undivided_steps(self) -> int:
        """Counted steps of which it is not known how much time counting has taken."""
        return len(self._counted)

    def divide_counted(self, typical: float | None) -> None:
        """Divide the time of counted steps into that of a typical step, of counting its FLOPs, and what was lost.

        Nothing is divided while the typical time is unknown. If the first counted steps took longer than later ones,
        because they compile or fill caches, that excess is lost time. If only one was counted, all excess is counting.
        """
        if typical is None or not self._counted:
            return
        works, self._counted = self._counted, []
        first = 0
        if self._typical_counted is None:
            first = find_warm_up(works)
            self._typical_counted = median(works[first:])
        for index, work_seconds in enumerate(works):
            lost = self._lose(work_seconds, max(self._typical_counted, typical), is_warm_up=index < first)
            counting = max(0.0, work_seconds - lost - typical)
            if index < first:
                self.add_seconds({"warm_up": work_seconds - counting})
            self.add_seconds({"train": -counting, "count": counting})

    def add_amounts(self, amounts: Mapping[str, int]) -> None:
        self.totals.update({name: amounts[name] for name in _TOTALS if name in amounts})

    def add_energy(self, joules: float) -> None:
        self.totals.update({_ENERGY: joules})

    def add_phase(self, phase: str, seconds: float) -> None:
        """Add time outside steps. A phase without a metric of its own is added to `pause`."""
        self.add_seconds({phase if phase in APART else "pause": seconds})

    def add_seconds(self, uses: Mapping[str, float]) -> None:
        for name, seconds in uses.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    @property
    def end_unix_time(self) -> float | None:
        """When the newest row was written; None if unknown."""
        wall, first_start = self.seconds.get("wall"), self.first_start_unix_time
        return None if wall is None or first_start is None else first_start + wall

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
        return {
            "steps": self.steps,
            "totals": dict(self.totals),
            "seconds": dict(self.seconds),
            "first_start_unix_time": self.first_start_unix_time,
            "timed_flops": dict(self.timed_flops),
        }

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> "Ledger":
        first_start, flops = state.get("first_start_unix_time"), Counter(state.get("timed_flops", {}))
        return cls(int(state["steps"]), Counter(state["totals"]), dict(state["seconds"]), first_start, flops)


def use_of_peak(step: MeasuredStep) -> dict[str, float]:
    """How long the devices would need for the step's FLOPs at their peak, in seconds; empty if that is unknown.

    `unpriced` is the time of a step whose FLOPs are unknown.

    >>> use_of_peak(MeasuredStep(1, 2.0, model_flops=6, hardware_flops=8, recompute_flops=2,
    ...                          model_peak_seconds=0.75, hardware_peak_seconds=1.0))
    {'model_at_peak': 0.75, 'hardware_at_peak': 1.0, 'recompute_at_peak': 0.25}
    """
    if step.model_flops is None:
        return {} if step.is_warm_up else {"unpriced": step.work_seconds or 0.0}
    if step.model_peak_seconds is None:
        return {}
    uses = _by_use(step, step.model_peak_seconds, step.hardware_peak_seconds, truediv)
    return {f"{use}_at_peak": seconds for use, seconds in uses.items()}


def _by_use(step: MeasuredStep, model: float, hardware: float | None, divide: Callable[..., Any]) -> dict[str, Any]:
    uses = {"model": model, "hardware": max(hardware or model, model)}
    if step.hardware_flops and step.recompute_flops is not None:
        uses["recompute"] = divide(uses["hardware"] * step.recompute_flops, step.hardware_flops)
    return uses


@dataclass
class Span:
    """Sums of several windows, for rates that are those of all of them together.

    Attributes:
        fewest_ranks: The number of ranks that reported in the window in which the fewest did; None without windows.
    """

    fewest_ranks: int | None = None
    _peak_flops_per_s: float | None = None
    _report: RankReport | None = None
    _sums: dict[tuple[str, ...], Any] = field(default_factory=dict)
    """Sums of steps, by the names of the values that these steps have. A rate leaves out steps that lack its value."""

    def add(self, window: Window, peak_flops_per_s: float | None, world_size: int = 1) -> None:
        self.fewest_ranks = window.ranks if self.fewest_ranks is None else min(self.fewest_ranks, window.ranks)
        self._peak_flops_per_s = peak_flops_per_s
        if window.report is not None and window.ranks == world_size:
            self._report = window.report if self._report is None else extend(self._report, window.report)
        for step in window.steps:
            if step.seconds is not None and not step.is_warm_up:
                known: dict[str, Any] = {name: it for name in _SUMMED if (it := getattr(step, name)) is not None}
                self._sums.setdefault(tuple(known), Counter()).update({"steps": 1, **known})

    def values(self, device_count: int = 1, data_parallel_size: int = 1) -> dict[str, Number]:
        if self._report is not None:
            return job_values(self._report, data_parallel_size)
        sums = list(self._sums.values())
        seconds, count = sum(each["seconds"] for each in sums), sum(each["steps"] for each in sums)
        if not seconds:
            return {}
        steps = [MeasuredStep(0, **{name: each[name] for name in each if name != "steps"}) for each in sums]
        values = window_values(steps, peak_flops_per_s=self._peak_flops_per_s, device_count=device_count)
        if "perf/counted_steps_percent" in values:
            counted = sum(each["steps"] for each in sums if "model_flops" in each)
            values["perf/counted_steps_percent"] = 100 * counted / count
        return values | {"perf/step_time": seconds / count, "perf/steps_per_second": count / seconds}


_monitored_process: int | None = None


def _session_start(now: float) -> float:
    """When the process started; now, if it had an earlier monitor.

    In a notebook, when the cell began that creates the monitor, because a person may think for hours before it.
    """
    global _monitored_process
    is_first, _monitored_process = _monitored_process != os.getpid(), os.getpid()
    started = (cell_start_unix_time() or process.start_unix_time()) if is_first else None
    return now if started is None else min(started, now)


class RunTotals:
    """The sums of a run and of this session, to which windows are added one after the other.

    Attributes:
        ledger: The run's totals up to its newest row; they continue those of its earlier sessions.
        of_session: Sums of this session, for its rates.
        resumed_after: The last step in the totals that this session continues; None if the run starts here.
        stalled_seconds: Time that steps of this session have lost to stalls.
    """

    def __init__(self, clock: Clock) -> None:
        now = time.time()
        self._clock, self._offset_seconds = clock, now - clock()
        # What the process did under an earlier monitor is no part of this session.
        is_first = _monitored_process != os.getpid()
        self._compiled_before = 0.0 if is_first else compile_seconds()
        self._processor_before = 0.0 if is_first else process_time()
        self._process_start = self._began_unix_time = _session_start(now)
        self.ledger, self.of_session = Ledger(), Span()
        self._carried_seconds: dict[str, float] = {}
        self._announced_seconds = self.stalled_seconds = 0.0
        self._last_work: deque[float] = deque(maxlen=_TYPICAL_STEPS)
        self._last_seconds: deque[float] = deque(maxlen=_PERCENTILE_STEPS)
        self.resumed_after: int | None = None

    def _unix_time(self, clock_seconds: float | None = None) -> float:
        """Convert a time of the monitor's clock, or now, to Unix time that no change of the system time affects."""
        return self._offset_seconds + (self._clock() if clock_seconds is None else clock_seconds)

    def continue_from(self, ledger: Ledger, newest: tuple[float, Ledger] | None, last_step: int | None) -> None:
        """Continue the totals of an earlier session, up to `last_step`. The time between the sessions is lost.

        `newest` has time and totals of the log's newest record; ignored if of another run or older than `ledger`.
        """
        ended, then = ledger.end_unix_time, ledger
        is_same_run = newest is not None and ledger.first_start_unix_time in (None, newest[1].first_start_unix_time)
        if newest is not None and is_same_run and (ended is None or newest[0] >= ended):
            ended, then = newest
        self._began_unix_time = self._process_start
        if ended is not None:
            self._began_unix_time = max(self._began_unix_time, ended)
            ledger.first_start_unix_time = then.first_start_unix_time
            ledger.seconds = carried_seconds(ledger.seconds, then.seconds)
            if _ENERGY in then.totals:  # steps that run again have used it too
                ledger.totals[_ENERGY] = then.totals[_ENERGY]
            ledger.add_seconds({"restart": self._began_unix_time - ended})
        # If this host's clock is behind the end of the earlier session, it goes on from there.
        self._offset_seconds += max(self._began_unix_time - self._unix_time(), 0.0)
        own = {name: spent - self._carried_seconds.get(name, 0.0) for name, spent in self.ledger.seconds.items()}
        self._carried_seconds = dict(ledger.seconds)
        ledger.add_seconds({phase: seconds for phase, seconds in own.items() if phase in APART})
        self.ledger, self.resumed_after = ledger, last_step

    def add_phase(self, name: str, seconds: float, compiled: float) -> None:
        """Add time outside of steps, and what was compiled meanwhile, which is not part of `seconds`."""
        self.ledger.add_phase(name, seconds)
        if compiled:
            self.ledger.add_phase("compile_outside", compiled)
            self._compiled_before += compiled

    def begin(
        self, first_step_began: float | None, seconds_before_first_step: float, compiled_before: float = 0.0
    ) -> None:
        """Begin the session, after its first step has ended; what is None was not opened.

        Neither phases before the first step, such as evaluation, nor what was compiled until then is start-up time.
        `compiled_before` is what `compile_seconds` was when the step began.
        """
        if self.resumed_after is None and self.ledger.first_start_unix_time is None:
            self.ledger.first_start_unix_time = self._began_unix_time
        began = self._unix_time(first_step_began)
        seconds = began - self._began_unix_time - seconds_before_first_step
        compiled = max(min(compiled_before - self._compiled_before, seconds), 0.0)
        self.ledger.add_seconds({"start_up": max(seconds - compiled, 0.0)})
        if compiled:
            self.ledger.add_phase("compile_outside", compiled)
        self._processor_before -= self.ledger.seconds.get(_PROCESSOR, 0.0)
        self.ledger.set_wall(began)

    def announce(self, steps: Sequence[MeasuredStep]) -> None:
        """Announce steps that are added later; until then, their time is left out of the wall time of rows."""
        self._announced_seconds += seconds_of(steps)
        self._last_work.extend(typical_work(steps))

    def add_window(
        self,
        steps: Sequence[MeasuredStep],
        later_seconds: float,
        report: RankReport | None,
        of_all_ranks: Mapping[str, int],
        peak_flops_per_s: float | None,
    ) -> None:
        """Add the steps of a window, which were announced with `announce`, to the totals.

        The row's wall time must not include `later_seconds`, those of later steps. Without a `report` of all ranks,
        the totals are those of this rank's steps alone. `peak_flops_per_s` is that of one device, mean over ranks.
        """
        self._announced_seconds -= seconds_of(steps)
        self._last_seconds.extend(s.seconds for s in steps if s.seconds is not None and not s.is_warm_up)
        ledger, at_peak = self.ledger, None
        if report is not None:
            unknown: dict[str, Any] = dict.fromkeys(AMOUNTS)
            steps = [step._replace(**unknown) for step in with_job_wait(steps, report)]
            at_peak = job_use_of_peak(report, of_all_ranks, peak_flops_per_s)
            ledger.add_amounts(of_all_ranks)
            flops = {use: of_all_ranks.get(f"{use}_flops") for use in ("model", "hardware", "recompute")}
            ledger.timed_flops.update({use: amount for use, amount in flops.items() if amount is not None})
        stalled_before = ledger.seconds.get("stall", 0.0)
        ledger.add_steps(steps, typical_seconds(self._last_work), at_peak)
        self.stalled_seconds += ledger.seconds.get("stall", 0.0) - stalled_before
        ledger.set_wall(self._unix_time() - self._announced_seconds - later_seconds)
        ledger.seconds[_PROCESSOR] = process_time() - self._processor_before

    def up_to_now(self, *, are_last: bool = False) -> Ledger:
        """Return the totals up to the newest row. Only the wall time includes the time since that row."""
        if are_last:  # no more counted steps will follow, with which the first could be compared
            self.ledger.divide_counted(typical_seconds(self._last_work))
        self.ledger.set_wall(self._unix_time())
        return self.ledger

    def up_to_now_with(self, steps: Sequence[MeasuredStep]) -> Ledger:
        """Return what the totals would be with these steps, without adding them."""
        ledger = deepcopy(self.ledger)
        ledger.add_steps(steps, typical_seconds([*self._last_work, *typical_work(steps)]))
        ledger.set_wall(self._unix_time())
        return ledger

    def percentiles(self) -> dict[str, Number]:
        ordered = sorted(self._last_seconds)
        return {f"perf/step_time_p{part}": percentile(ordered, part / 100) for part in (50, 90, 99) if ordered}


def typical_work(steps: Sequence[MeasuredStep]) -> list[float]:
    """Times of the steps without input wait; warm-up steps are left out. Their median is a typical step."""
    return [step.work_seconds for step in steps if step.work_seconds is not None and not step.is_warm_up]
