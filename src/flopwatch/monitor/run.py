"""Runs the monitor: takes each step from the loop, through its window, to a row in the sinks."""

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from torch import nn

from flopwatch.clock import Clock
from flopwatch.errors import InputError
from flopwatch.guard import Guard, decided
from flopwatch.monitor import notices
from flopwatch.monitor.arrival import Arrival, Arrivals, RecordedStep, read_now
from flopwatch.monitor.config import MonitorConfig, json_ready
from flopwatch.monitor.counters.device import DeviceCounters
from flopwatch.monitor.counting.batch_reader import BatchSizes
from flopwatch.monitor.counting.costs import FlopCost, StepCosts
from flopwatch.monitor.counting.evidence import Doubt
from flopwatch.monitor.counting.step_counter import NO_MODEL, Callbacks, StepCounter
from flopwatch.monitor.environment import describe_environment, device_memory_gib
from flopwatch.monitor.measured_step import MeasuredStep
from flopwatch.monitor.outlets import Outlets, open_outlets
from flopwatch.monitor.ranks.layout import data_parallel_size, repeated_weights, waits_in_forward
from flopwatch.monitor.ranks.rank import Rank, ends_window
from flopwatch.monitor.ranks.reports import Window
from flopwatch.monitor.recorder import OptimizerHooks, Recorder
from flopwatch.monitor.resume import newest_record, process_writing, resume_from_log
from flopwatch.monitor.rows import JobLayout, RowMaker, peak_in_use
from flopwatch.monitor.timing.hooks import PassHooks
from flopwatch.monitor.timing.tape import MICRO, HostTimer, Tape, timer_for
from flopwatch.monitor.totals import Ledger, RunTotals
from flopwatch.monitor.trace_capture import TraceCapture
from flopwatch.records.counters import CounterWindow
from flopwatch.records.run import Number, RunStart, Summary
from flopwatch.runs.traces.files import TRACES
from flopwatch.sinks.protocol import Sink
from flopwatch.text import first_line
from flopwatch.torch_internals.autograd import compile_seconds

_MFU_ALARM = 1.05
"""An MFU above this is too high to be explained by inaccurate step times, so the peak must be wrong."""
_LEAST_STALL_SECONDS, _LEAST_OUTSIDE_SECONDS = 0.5, 0.2
"""Seconds per session above which stalls and time outside steps are reported. On a busy machine, less is normal."""
_MOST_WINDOWS, _MOST_STEPS, _PLAN_SECONDS = 4, 200, 10.0
"""A rank without a plan from the logging rank stops reporting after this many windows, steps and seconds."""
DEVICE_SECONDS = 60.0
"""How long a checkpoint and the end of a run wait for the device to finish its queued work."""
CHECKPOINT_SECONDS = 2.0
"""How long a checkpoint waits for the other ranks to send their windows."""
CLOSE_RANKS_SECONDS = 5.0
"""How long the end of a run waits for the other ranks."""
_CLOSE_AFTER_ERROR_SECONDS = 0.5
"""How long the end of a run waits after an error: briefly, because other ranks may block until this process exits."""


class MonitoredRun:
    """One monitored run: owns the order in which its parts work. `TrainingMonitor` catches what its methods raise."""

    def __init__(  # noqa: PLR0913 - what `TrainingMonitor` is given and finds out
        self,
        config: MonitorConfig,
        output_dir: Path,
        log_path: Path,
        sinks: Sequence[str | Sink],
        clock: Clock,
        *,
        rank: int,
        world_size: int,
        flops_fn: Callable[[Any], int] | None,
        peak_flops_per_s: float | None,
    ) -> None:
        self.config, self._output_dir, self._log_path = config, output_dir, log_path
        self.tape = Tape(HostTimer(clock), clock)
        self.arrivals = Arrivals(self.tape)
        self.ranks = Rank(rank, world_size, config.logging_rank % world_size, self._notify)
        is_logging = self.ranks.is_logging
        self.outlets = open_outlets(config, output_dir, log_path, sinks) if is_logging else Outlets([], is_quiet=True)
        self._passes = PassHooks(self.tape)
        callbacks = Callbacks(
            self.tape,
            self._passes,
            on_evaluation=lambda: self.spent_on("eval"),
            on_doubt=self._doubt_rows,
            in_count_phase=lambda: self.phase("count"),
            notify=self._notify,
        )
        self.counter = StepCounter(config, callbacks, is_alone=world_size == 1)
        self.recorder = Recorder(config, self.counter, OptimizerHooks(self), flops_fn, clock(), self.failed)
        self.device_counters = DeviceCounters(config, self._notify, self.counter.become)
        self.costs = StepCosts(config, self.counter, peak_flops_per_s, self._notify)
        self.rows = RowMaker(config, world_size, RunTotals(clock))
        self.trace = TraceCapture(
            output_dir / TRACES,
            rank,
            world_size,
            lambda: self.costs.peaks.device.type,
            self._notify,
            strict=config.strict,
        )
        self.tape.on_full = self._divide_early
        if config.count == "every":
            self._notify(*notices.notice("every_step_counted"))

    # --- The way of a step --------------------------------------------------------------------------------------------

    def note_step(self, step: int, *values: Any) -> None:
        """Record a step that has ended, and close the window if it is full; `values` are those of `Recorder.record`."""
        step, previous = int(step), self.recorder.last_step  # it may raise, and then no step has ended
        now = self.tape.end_step()
        self.recorder.record(step, *values)
        if step == previous:
            self._notify(*notices.notice("step_logged_twice", step=step))
        if not self.ranks.has_started:
            self._start(step)
        if self.trace.is_on:
            with self.phase("pause", is_marked=False):  # writing a trace takes seconds, which belong to no step
                self.trace.step_ended(step)
        if len(self.recorder.steps) == 1 and not self.arrivals.read_early:
            self.recorder.began = now
        if self.ranks.link is not None:
            self._take_from_ranks()
        if self._is_window_full(step, previous):
            self.close_window()
        self.counter.await_step()
        self.tape.begin_gap()

    def close_window(self, *, now: bool = False, wait_seconds: float = 0.0) -> None:
        """End the window: recorded steps are measured, make a window, and then a row.

        `now` makes rows even if it is not certain yet which steps are warm-up.
        """
        if self.ranks.waits_for_plan:
            return
        self.costs.peaks.ranks = self.ranks.ranks_on_device
        self.trace.look_for_request()
        self._divide()
        if self.recorder.steps:
            self.counter.check_model()
            arrival = self.arrivals.begin(self.recorder.take(), self.counter.with_sizes)
            self.arrivals.end_window(arrival, self._take_counters())
        elif self.arrivals.read_early:
            self.rows.add(Window(tuple(self.arrivals.read_early), counters=self._take_counters()))
            self.arrivals.read_early = []
        self._take_arrived(wait_seconds)
        for window in self.rows.windows_past_warm_up(flush=now):
            self.ranks.plan(window.steps, self.config.log_every, self.config.log_seconds)
            peak = peak_in_use(window.steps, self.costs.peak)
            self.ranks.send_window(self.device_counters.with_values(window, self.costs, peak), peak)
        self._send_rows(now=now)

    def _take_counters(self) -> tuple[CounterWindow, ...]:
        with Guard("counters", self.failed):
            return self.device_counters.take()
        return ()

    def _divide(self) -> list[tuple[str, float]]:
        """Compute the times of steps and phases from the events since the last call; return those of phases."""
        divided = self.arrivals.divide()
        for phase, seconds in divided.spent:
            self.rows.totals.ledger.add_phase(phase, seconds)
            if phase == "outside" and self.arrivals.outside_seconds > _LEAST_OUTSIDE_SECONDS:
                self._notify(*notices.notice("time_outside_steps", seconds=seconds))
        if divided.seconds_between is not None:
            self._notify(*notices.notice("work_between_steps", seconds=divided.seconds_between))
        if divided.is_wait_unknown:
            self._notify(*notices.notice("input_wait_unknown"))
        return divided.spent

    def _divide_early(self) -> None:
        """Divide while the training runs, whose hooks must not raise."""
        with Guard("divide", self.failed):
            self._divide()

    def _take_arrived(self, wait_seconds: float) -> None:
        for late in self.arrivals.take_arrived(wait_seconds):
            steps = (*late.read_early, *self._measured(late.arrival))
            self.rows.add(Window(steps, counters=late.counters))

    def _measured(self, arrival: Arrival) -> tuple[MeasuredStep, ...]:
        steps = arrival.measured(self._cost)
        if arrival.batch_failure is not None:
            self.failed("batch", arrival.batch_failure)
        self._tell_what_is_missing(arrival)
        for name in sorted(arrival.left_out):
            self._notify(*notices.not_readable(name))
        provenance = self.costs.new_provenance(arrival.steps[0].step, self.rows.layout.devices_per_batch)
        if provenance is not None:
            self.outlets.send(provenance)
        return steps

    def _cost(self, step: RecordedStep, batch_sizes: list[BatchSizes] | None) -> FlopCost:
        with Guard("flops", self.failed):  # otherwise the step is logged without FLOPs
            cost = self.costs.cost(step.trace, step.step, batch_sizes, step.user_flops)
            how = "counted as it ran" if step.trace.was_counted else "not counted as it ran"
            verdict = cost.reason or ("no FLOPs" if cost.model_flops is None else "exact")
            decided("step %d, %s: %s", step.step, how, verdict)
            return cost
        return FlopCost()

    def _send_rows(self, *, now: bool = False, give_up: bool = False) -> None:
        """Send rows of the windows that all ranks have reported; with `give_up`, of all windows."""
        if not self.ranks.is_logging:
            return
        self._divide()
        doubted, last = self.ranks.take_doubt(), self.recorder.last_step
        if doubted is not None and last is not None:
            doubt = Doubt(((doubted.first_step, last),), notices.doubt_of_rank(doubted.rank))
            self._doubt_rows(doubt, by_other_rank=True)
        for window in self.ranks.complete(give_up=give_up):
            values = {**self.arrivals.datasets.take(), **device_memory_gib(self.costs.peaks.device)}
            later = self.arrivals.later_seconds()
            row = self.rows.row(window, self.costs.peak, values, with_percentiles=now, later_seconds=later)
            self.outlets.send(row)
            # With several ranks there is no notice; the row's notes have the reasons.
            if row.exact is False and self.ranks.world_size == 1 and row.notes != (NO_MODEL,):
                self._notify(*notices.notice("not_exact", reasons="; ".join(row.notes)), row.step)
            self._tell_alarms(row.step)
            self._compare_counters(window, row.step)

    def _compare_counters(self, window: Window, step: int) -> None:
        with Guard("counters", self.failed):
            told = self.device_counters.disagreement(window, self.rows.newest.values, self.costs)
            if told is not None:
                self._notify(*told, step)

    def _is_window_full(self, step: int, previous: int | None) -> bool:
        """Whether the window ends with this step: by the logging rank's plan, or by `log_every` and `log_seconds`."""
        if self.ranks.window_steps is not None:
            return ends_window(step, previous, self.ranks.window_steps)
        if self.ranks.waits_for_plan:
            return False
        is_late = self.tape.clock() - self.recorder.began >= self.config.log_seconds
        return is_late or len(self.arrivals.read_early) + len(self.recorder.steps) >= self.config.log_every

    # --- What the loop says -------------------------------------------------------------------------------------------

    def set_model(self, model: nn.Module) -> None:
        if not isinstance(model, nn.Module):
            raise InputError(notices.not_a_model(model))
        self.counter.is_on = self.recorder.flops_fn is None
        self.counter.set_model(model)
        self.costs.set_model(model)
        if self.ranks.has_started:
            self._start_counters()
        timer = timer_for(self.costs.peaks.device, self.tape.clock)
        if type(timer) is not type(self.tape.timer):
            if self.recorder.steps:  # which the other timer has measured
                self.close_window()
            self._divide()
            self.arrivals.use_timer(timer)
        self._read_layout()

    def take_micro_batch(self, batch: Any, lengths: Sequence[int] | None) -> None:
        self.tape.note(MICRO)
        self.recorder.add_batch(batch, lengths)

    @contextmanager
    def phase(self, name: str, *, is_marked: bool = True) -> Iterator[None]:
        """A context for work outside steps. With `is_marked`, a trace that is being recorded marks its time."""
        mark = self.trace.outside_steps() if is_marked else nullcontext()
        began, compiled_before = self.tape.begin_phase(), compile_seconds()
        try:
            with mark, self.counter.ignoring_calls():
                yield
        finally:
            seconds = self.tape.end_phase(began)
            compiled = min(compile_seconds() - compiled_before, seconds)
            self.rows.totals.add_phase(name, seconds - compiled, compiled)
            if name == "count":
                self.arrivals.count_seconds += seconds

    def spent_before_first_step(self, name: str, seconds: float, compiled: float) -> None:
        """Add to a phase time before the first step, when the monitor did not exist yet, and what it has compiled."""
        self.rows.totals.add_phase(name, seconds, compiled)
        self.arrivals.division.seconds_before_first_step += seconds + compiled

    def spent_on(self, name: str) -> None:
        self.tape.spent_on(name)
        if self.trace.is_on and any(seconds for phase, seconds in self._divide() if phase == name):
            self.trace.interrupted(self.recorder.last_step or 0)

    def add_to_last_step(self, loss: Any, grad_norm: Any, learning_rate: Any) -> None:
        """Add values to the newest step, for frameworks that report them only at the end of a window."""
        given = {"loss": loss, "grad_norm": grad_norm, "learning_rate": learning_rate}
        given = {name: value for name, value in given.items() if value is not None}
        read_early = self.arrivals.read_early
        if not self.recorder.add_to_last_step(given) and read_early:  # a checkpoint has read the step's values already
            known: dict[str, Any] = {name: read_now(value) for name, value in given.items()}
            read_early[-1] = read_early[-1]._replace(
                **{name: value for name, value in known.items() if value is not None}
            )

    # --- Ranks --------------------------------------------------------------------------------------------------------

    def _take_from_ranks(self, wait_seconds: float = 0.0) -> None:
        """Take what other ranks have sent: merged reports, or the logging rank's plan with the length of windows."""
        link = self.ranks.link
        if link is None:
            return
        if wait_seconds and self.ranks.waits_for_plan:
            link.wait_for_plan(wait_seconds)
        if link.merged:
            self._send_rows()
        if not self.ranks.waits_for_plan:
            return
        plan, steps = link.window_steps, len(self.recorder.steps)
        self.ranks.window_steps = plan
        most = max(_MOST_WINDOWS * self.config.log_every, _MOST_STEPS)
        if plan is not None:
            self._cut_at_windows(plan)
        elif link.failure is not None or (
            steps > most and self.tape.clock() - self.recorder.began > _PLAN_SECONDS
        ):  # no rank receives this rank's reports
            self.ranks.leave()

    def _cut_at_windows(self, window_steps: int) -> None:
        """Cut the steps so far into windows of the length that the logging rank has just sent."""
        self._divide()
        recorded, previous = self.recorder.take(), None
        for step in recorded:
            self.recorder.steps.append(step)
            if ends_window(step.step, previous, window_steps) and step is not recorded[-1]:
                self.close_window()
            previous = step.step

    def _start_counters(self) -> None:
        with Guard("counters", self.failed):
            self.device_counters.start(self.costs.peaks.device)

    def _read_layout(self) -> None:
        model, world_size = self.counter.model, self.ranks.world_size
        size = self.config.data_parallel_size or data_parallel_size(model, world_size)
        self.rows.layout = JobLayout(world_size, size)
        self.costs.devices_per_batch = self.rows.layout.devices_per_batch
        self.ranks.waits_in_forward = self.rows.layout.devices_per_batch > 1 or waits_in_forward(model)
        repeated = repeated_weights(model) if world_size > 1 else []
        self.costs.repeated = notices.repeated_weights(repeated) if repeated else None

    def _doubt_rows(self, doubt: Doubt, *, by_other_rank: bool = False) -> None:
        """Call rows exact no longer, because the count of a later step of the same kind differs."""
        level, code, message = notices.rows_in_doubt(doubt.steps, doubt.shown)
        self.outlets.notify(level, code, message, step=self.recorder.last_step, doubted=doubt.steps)
        self.rows.exactness.doubt(doubt.steps, message, by_other_rank=by_other_rank)
        if not by_other_rank:
            self.ranks.doubt(min(first for first, _ in doubt.steps))

    # --- Start, checkpoints and end -----------------------------------------------------------------------------------

    def _start(self, first_step: int) -> None:
        self._divide()
        self._read_layout()  # again, because the model may have been parallelised after `set_model`
        self.ranks.start(str(self._log_path), self.costs.peaks.device)
        self._start_counters()
        if not self.ranks.is_logging:
            return
        environment = describe_environment(self.costs.peaks.device)
        other = process_writing(self._log_path)
        if other is not None:
            self._notify(*notices.notice("folder_in_use", output_dir=self._output_dir, pid=other))
        division, totals = self.arrivals.division, self.rows.totals
        resume_from_log(totals, self._log_path, first_step, environment, self._notify)
        totals.begin(division.first_step_began, division.seconds_before_first_step, self.tape.compiled_before)
        start = RunStart(
            uuid.uuid4().hex[:12],
            time.time(),
            str(self._output_dir),
            totals.resumed_after,
            self.config.total_steps,
            world_size=self.ranks.world_size,
            config=json_ready(self.config.model_dump()),
            environment=environment,
            ledger=totals.ledger.to_json(),
        )
        self.outlets.start(start)

    def state(self) -> dict[str, Any]:
        """Return the totals up to the last step for a checkpoint, and flush the log up to the same step."""
        self._take_from_ranks(CHECKPOINT_SECONDS if self.ranks.may_wait else 0.0)
        if self.ranks.waits_for_plan:
            self.ranks.may_wait = False
        if self.ranks.link is None and self.ranks.is_logging:
            return self._state_alone()
        # With several ranks a checkpoint ends the window, because reports are merged only for whole windows.
        self.close_window(now=True, wait_seconds=DEVICE_SECONDS)
        if not self.ranks.is_logging:
            return {"version": 1, "step": self.recorder.last_step}
        self._wait_for_ranks()
        if self.ranks.has_started:
            self.outlets.flush_log()
        newest, totals = self.rows.newest.step, self.rows.totals
        return self._state_of(totals.resumed_after if newest is None else newest, totals.up_to_now().to_json())

    def _state_alone(self) -> dict[str, Any]:
        """Return the state of a training with one rank; the current window is logged as a partial row and goes on."""
        self._divide()
        self._take_arrived(DEVICE_SECONDS)
        if self.recorder.steps and not self.arrivals.late_steps:
            arrival = self.arrivals.begin(self.recorder.steps, self.counter.with_sizes)
            if arrival.arrives(DEVICE_SECONDS):
                self.recorder.take()
                self.arrivals.read_early += self._measured(arrival)
        so_far = self.rows.so_far(self.arrivals.read_early)
        if so_far is not None and so_far.steps:
            self.outlets.send_to_log(so_far)
        if self.ranks.has_started:
            self.outlets.flush_log()
        if so_far is None:
            return self._state_of(self.rows.totals.resumed_after, self.rows.totals.up_to_now().to_json())
        return self._state_of(so_far.step, dict(so_far.ledger))

    def _state_of(self, ledger_step: int | None, ledger: dict[str, Any]) -> dict[str, Any]:
        return {"version": 1, "step": self.recorder.last_step, "ledger_step": ledger_step, "ledger": ledger}

    def _wait_for_ranks(self) -> None:
        """Wait until all ranks have sent their windows up to the last step; after one timeout, never wait again."""
        link, last = self.ranks.link, self.recorder.last_step
        if link is None or last is None or not self.ranks.may_wait or self.ranks.is_complete:
            return
        self.ranks.may_wait = link.wait_for(last, CHECKPOINT_SECONDS)
        self._send_rows(now=True)
        if not self.ranks.may_wait:
            self._notify(*notices.notice("state_is_behind"))

    def load(self, state: Any) -> None:
        if state["step"] is None:  # the checkpoint was saved before the first step
            return
        self.recorder.last_step = state["step"]  # on every rank, because all ranks must number their steps equally
        if self.ranks.is_logging and "ledger" in state:
            last_step = state.get("ledger_step", state["step"])
            self.rows.totals.continue_from(Ledger.from_json(state["ledger"]), newest_record(self._log_path), last_step)

    def close(self, *, after_error: bool = False, ended_by: str | None = None) -> Summary:
        """End the run and close the sinks, even if a part of that fails; after an error, without long waits."""
        values: dict[str, Number] = {}
        try:
            with Guard("close", self.failed):
                values = self._last_values(after_error=after_error)
        finally:
            with Guard("counters", self.failed):
                self.device_counters.close()
            self.recorder.hooks.remove()
            self.counter.close()
            exact, notes = self.rows.exactness.exact, self.rows.exactness.notes
            if exact is not None:
                values = {**values, "perf/exact": int(exact)}
            last = Summary(self.recorder.last_step, 0.0, values, ended_by=ended_by, exact=exact, notes=notes)
            summary = self.outlets.close(last)
        return summary

    def _last_values(self, *, after_error: bool) -> dict[str, Number]:
        device_seconds = _CLOSE_AFTER_ERROR_SECONDS if after_error else DEVICE_SECONDS
        seconds = _CLOSE_AFTER_ERROR_SECONDS if after_error else CLOSE_RANKS_SECONDS
        self.trace.close(self.recorder.last_step or 0)
        self._take_from_ranks(seconds)
        if self.ranks.waits_for_plan:
            self.ranks.leave()
        self.close_window(now=True, wait_seconds=device_seconds)
        late = self.arrivals.late_steps
        if late:
            self._notify(*notices.notice("device_late", steps=late, seconds=device_seconds))
        if not self.ranks.has_started:
            self._start(0)
        self.counter.doubt_unproven()
        self.ranks.finish(seconds)
        self._send_rows(now=True, give_up=True)
        undivided = self.rows.totals.ledger.undivided_steps
        values = self.rows.session_values()
        if undivided:
            self._notify(*notices.notice("counting_time_unknown", steps=undivided))
        return values

    # --- What the user is told ----------------------------------------------------------------------------------------

    def _tell_what_is_missing(self, arrival: Arrival) -> None:
        if not self.recorder.tells_missing or not self.ranks.is_logging:
            return
        self.recorder.tells_missing = False
        failed = self.outlets.failed_parts
        has_model = self.counter.model is not None or self.recorder.flops_fn is not None
        has_model = has_model or "set_model" in failed  # reported already
        is_unreadable = "batch" in arrival.left_out or "batch" in failed
        has_batch = is_unreadable or any(step.readings or step.user_flops for step in arrival.steps)
        is_counted = self.counter.is_on and has_model and all(step.trace.estimates is None for step in arrival.steps)
        if not (has_model and has_batch):
            self._notify(*notices.nothing_to_count(has_model=has_model, has_batch=has_batch, is_counted=is_counted))

    def _tell_alarms(self, step: int) -> None:
        newest, world_size, stalled = self.rows.newest, self.ranks.world_size, self.rows.totals.stalled_seconds
        if newest.missing_ranks:
            self._notify(*notices.notice("ranks_missing", missing=newest.missing_ranks, world_size=world_size), step)
        if stalled > _LEAST_STALL_SECONDS:
            self._notify(*notices.notice("stalled", seconds=stalled), step)
        mfu, peak = newest.values.get("perf/mfu"), self.costs.peak
        if mfu is not None and peak is not None and mfu > _MFU_ALARM:
            self._notify(
                *notices.notice(
                    "mfu_above_peak",
                    percent=100 * mfu,
                    peak=peak.flops_per_s,
                    device=peak.device,
                    dtype=peak.dtype,
                    source=peak.source,
                ),
                step,
            )

    def failed(self, part: str, error: Exception) -> None:
        """Report the failure of a part of the monitor once; with the setting `strict`, raise the error instead."""
        if self.config.strict:
            raise error
        self.outlets.failed_parts.setdefault(part, f"{type(error).__name__}: {first_line(error)}")
        # An InputError is a mistake of the user, and its message says how to correct it.
        what = "" if isinstance(error, InputError) else f"{part} failed in the monitor, the training goes on: "
        self._notify("error", f"part_failed:{part}", f"{what}{first_line(error)}")

    def _notify(self, level: Any, code: str, message: str, step: int | None = None) -> None:
        last = self.recorder.last_step if hasattr(self, "recorder") else None
        self.outlets.notify(level, code, message, step=last if step is None else step)
