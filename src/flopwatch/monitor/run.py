"""Runs the monitor: takes each step from `log_step`, computes its FLOPs and time, and sends rows to the sinks."""

import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from flopwatch.clock import Clock
from flopwatch.errors import InputError
from flopwatch.monitor import output as notices
from flopwatch.monitor.config import MonitorConfig
from flopwatch.monitor.measured_step import effective_peak
from flopwatch.monitor.output import Outlets, json_ready, open_outlets
from flopwatch.monitor.pricing.batch_reader import Reading
from flopwatch.monitor.pricing.evidence import Doubt
from flopwatch.monitor.pricing.price import StepCost, StepPricer
from flopwatch.monitor.pricing.step_counter import NO_MODEL, NOTHING, StepCounter, checked_flops
from flopwatch.monitor.ranks.job_values import explain_straggler
from flopwatch.monitor.ranks.layout import data_parallel_size, repeated_weights
from flopwatch.monitor.ranks.rank import Rank, ends_window
from flopwatch.monitor.rows import JobLayout, RowMaker
from flopwatch.monitor.session import Session, describe_environment, device_memory_gib, process_writing
from flopwatch.monitor.timing.optimizer_hooks import OptimizerHooks
from flopwatch.monitor.timing.pass_hooks import PassHooks
from flopwatch.monitor.timing.step_clock import StepClock
from flopwatch.monitor.timing.timers import HostTimer, StepTimer, timer_for
from flopwatch.monitor.trace_capture import TraceCapture
from flopwatch.monitor.window import (
    DatasetMetrics,
    NotedStep,
    PricedStep,
    PricedWindow,
    SettledStep,
    SettledWindow,
    Window,
    keep,
    passed_seconds,
    price_step,
    read_now,
)
from flopwatch.records.run import Number, RunStart, Summary
from flopwatch.runs.traces.splits import TRACES
from flopwatch.sinks.protocol import Sink
from flopwatch.text import first_line

_MFU_ALARM = 1.05
"""An MFU above this is too high to be explained by inaccurate step times, so the peak must be wrong."""
_LEAST_STALL_SECONDS, _LEAST_OUTSIDE_SECONDS = 0.5, 0.2
"""Seconds per session above which stalls and time outside steps are reported. On a busy machine, less is normal."""
_MOST_NOTED_WINDOWS, _MOST_NOTED_STEPS, _PLAN_SECONDS = 4, 200, 10.0
"""A rank without a plan from the logging rank stops reporting after this many windows, steps and seconds."""
DEVICE_SECONDS = 60.0
"""How long a checkpoint and the end of a run wait for the device to finish its queued work."""
CHECKPOINT_SECONDS = 2.0
"""How long a checkpoint waits for the other ranks to send their windows."""
CLOSE_RANKS_SECONDS = 5.0
"""How long the end of a run waits for the other ranks."""
_CLOSE_AFTER_ERROR_SECONDS = 0.5
"""How long the end of a run waits after an error: briefly, because other ranks may block until this process exits."""


class _LateWindow(NamedTuple):
    """A full window whose values are still being copied from the device.

    Attributes:
        window: Steps whose values have not been read yet.
        begun: Earlier steps of the same window, whose values were read when a checkpoint was saved.
        busy_seconds_per_step: Processor time of the training's thread in a typical step; None if not measured.
    """

    window: Window
    begun: list[PricedStep]
    busy_seconds_per_step: float | None = None


class MonitoredRun:
    """One monitored run. Its methods can raise exceptions, which `TrainingMonitor` catches and reports.

    `note_step` keeps what is known when a step ends (`NotedStep`), without reading from the device. When a window is
    full, `close_window` reads the values (`SettledStep`), adds FLOPs (`PricedStep`), merges the reports of all ranks
    (`Rank`), adds the window to the totals (`Session`), makes a row (`RowMaker`) and sends it to sinks (`Outlets`).

    Attributes:
        counter: Counts some of the steps as they run, and knows what the others cost.
        pricer: Computes the FLOPs of a step from what it ran.
        assumed_batch: Batch of the size `batch_size` x `seq_length`, for steps that are logged without a batch.
        last_step: Number of the newest step.
        count_seconds: Time that the training's thread has spent counting FLOPs.
        is_off: True when this rank has stopped reporting to the logging rank.
    """

    def __init__(
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
        self._config, self._clock, self._world_size, self._flops_fn = config, clock, world_size, flops_fn
        self._log_every, self._log_seconds = config.log_every, config.log_seconds
        self._output_dir, self._log_path = output_dir, log_path
        self.last_step: int | None = None
        self.ranks: Rank[PricedStep] = Rank(rank, world_size, config.logging_rank % world_size, self._notify)
        is_logging = self.ranks.is_logging
        self.outlets = open_outlets(config, output_dir, log_path, sinks) if is_logging else Outlets([], is_quiet=True)
        self._timer: StepTimer = HostTimer(clock)
        self.step_clock = self._new_step_clock()
        self._passes = PassHooks(lambda: self.step_clock)
        if config.count == "every":
            self._notify(*notices.notice("every_step_counted"))
        self.counter = StepCounter(
            config,
            clock,
            is_alone=world_size == 1,
            on_call=lambda has_grad: self.step_clock.model_is_called(has_grad),
            passes=self._passes,
            on_evaluation=lambda: self.spent_on("eval"),
            on_doubt=self._doubt_rows,
            off_the_clock=lambda: self.phase("count"),
            notify=self._notify,
        )
        self.pricer = StepPricer(config, self.counter, peak_flops_per_s, self._notify)
        self._optimizer_hooks = OptimizerHooks(self)
        self._session = Session(log_path, clock, self._notify)
        self.rows = RowMaker(config, world_size, self._session)
        self.datasets = DatasetMetrics()
        self.trace = TraceCapture(
            output_dir / TRACES,
            rank,
            world_size,
            lambda: self.pricer.peaks.device.type,
            self._notify,
            strict=config.strict,
        )
        self.assumed_batch = _assumed_batch(config)
        self.is_off = False
        self.count_seconds = 0.0
        self._outside_seconds = 0.0
        self._may_wait_for_ranks = True
        self._has_started = False
        self._noted: list[NotedStep] = []
        self._readings: list[Reading] = []
        self._user_flops: int | None = None
        self._late: deque[_LateWindow] = deque()
        self._window_began = clock()
        self._has_looked_for_gaps = False
        self._begun: list[PricedStep] = []
        """Steps of the current logging window whose values were already read when a checkpoint was saved."""

    @property
    def model(self) -> nn.Module | None:
        return self.counter.model

    def _doubt_rows(self, doubt: Doubt, *, by_other_rank: bool = False) -> None:
        """A live count differs from earlier ones of the same kind: the rows since then are called exact no longer."""
        level, code, message = notices.rows_in_doubt(doubt.steps, doubt.shown)
        self.outlets.notify(level, code, message, step=self.last_step, doubted=doubt.steps)
        self.rows.doubt(doubt.steps, message, by_other_rank=by_other_rank)
        if not by_other_rank:
            self.ranks.doubt(min(first for first, _ in doubt.steps))

    def _take_doubt_of_ranks(self) -> None:
        found = self.ranks.take_doubt()
        if found is not None and self.last_step is not None:
            steps = ((found.first_step, self.last_step),)
            self._doubt_rows(Doubt(steps, notices.doubt_of_rank(found.rank)), by_other_rank=True)

    def set_model(self, model: nn.Module) -> None:
        if not isinstance(model, nn.Module):
            raise InputError(notices.not_a_model(model))
        self.counter.is_on = self._flops_fn is None
        self.counter.set_model(model)
        self.pricer.set_model(model)
        timer = timer_for(self.pricer.peaks.device, self._clock)
        if type(timer) is not type(self._timer):
            self._timer = timer
            self.ranks.busy_time = None  # processor time does not show how busy an accelerator is
            self.step_clock = self._new_step_clock(self.step_clock.seconds_before_first_step)
        self._look_at_layout()

    def _new_step_clock(self, seconds_before_first_step: float = 0.0) -> StepClock:
        return StepClock(
            self._timer,
            self._clock,
            self.ranks.busy_time,
            on_time_outside=self._note_outside,
            on_wait_unknown=lambda: self._notify(*notices.notice("input_wait_unknown")),
            on_work_between=lambda seconds: self._notify(*notices.notice("work_between_steps", seconds=seconds)),
            seconds_before_first_step=seconds_before_first_step,
        )

    def _note_outside(self, seconds: float) -> None:
        self._session.add_seconds("outside", seconds)
        self._outside_seconds += seconds
        if self._outside_seconds > _LEAST_OUTSIDE_SECONDS:
            self._notify(*notices.notice("time_outside_steps", seconds=seconds))

    def _look_at_layout(self) -> None:
        size = self._config.data_parallel_size or data_parallel_size(self.counter.model, self._world_size)
        self.rows.layout = JobLayout(self._world_size, size)
        self.pricer.devices_per_batch = self.rows.layout.devices_per_batch
        repeated = repeated_weights(self.counter.model) if self._world_size > 1 else []
        self.pricer.repeated = notices.repeated_weights(repeated) if repeated else None

    def note_step(
        self,
        step: int,
        epoch: Any,
        loss: Any,
        grad_norm: Any,
        learning_rate: Any,
        skip_wandb: bool,
        batch: Any,
        lengths: Sequence[int] | None,
        more: dict[str, Any],
    ) -> None:
        """Keep what is known when a step ends. On an ordinary step, do not read from the device, write or wait."""
        passes = self._passes.take()
        segments, waits = self.step_clock.end_step()
        step = int(step)
        if step == self.last_step:
            self._notify(*notices.notice("step_logged_twice", step=step))
        if not self._has_started:
            self._start_run(step)
        if batch is not None:
            try:
                self._readings.append(self.counter.read(batch, lengths))
                if self._flops_fn is not None:
                    self._user_flops = (self._user_flops or 0) + checked_flops(self._flops_fn, batch)
            except Exception as error:  # the step is logged without tokens
                self.failed("batch", error)
        try:
            trace = self.counter.end_step(self._readings, step)
        except Exception as error:  # the step is logged without FLOPs
            self.failed("flops", error)
            trace = NOTHING
        noted = NotedStep(
            step,
            epoch if epoch is None or type(epoch) is int or type(epoch) is float else keep(epoch),
            None if loss is None else keep(loss),
            None if grad_norm is None else keep(grad_norm),
            learning_rate if type(learning_rate) is float else keep(learning_rate),
            self._readings,
            segments,
            waits,
            skip_wandb,
            {name: keep(value) for name, value in more.items()} if more else more,
            self._user_flops,
            trace,
            self.step_clock.optimizer_place,
            passes,
        )
        self._noted.append(noted)
        self._readings, self._user_flops = [], None
        previous, self.last_step = self.last_step, step
        if self.trace.is_on:
            with self.phase("pause", is_marked=False):  # writing a trace takes seconds, which are not those of a step
                self.trace.step_ended(step)
        if len(self._noted) == 1 and not self._begun:
            self._window_began = self._clock()
        if self.ranks.link is not None:
            self._look_at_ranks()
        if self._world_size == 1:
            is_late = self._clock() - self._window_began >= self._log_seconds
            is_full = is_late or len(self._begun) + len(self._noted) >= self._log_every
        else:
            is_full = self._is_window_full(step, previous)
        if is_full:
            self.close_window()
        self.counter.await_step()
        self.step_clock.begin_gap()

    def abandon_step(self) -> None:
        """Drop the current step, because its body has raised an exception."""
        self.counter.abandon_step()
        self._readings, self._user_flops = [], None

    def drop_batches(self) -> None:
        """Forget the batches of the current step, because they are not all of it."""
        self._readings = []

    @property
    def has_batches(self) -> bool:
        """Whether the current step has already received micro-batches."""
        return bool(self._readings)

    def take_micro_batch(self, batch: Any, lengths: Sequence[int] | None) -> None:
        """Add a micro-batch to the current step."""
        self.step_clock.micro_batch()
        self.add_reading(self.counter.read(batch, lengths))
        if self._flops_fn is not None:
            self._user_flops = (self._user_flops or 0) + checked_flops(self._flops_fn, batch)

    def add_reading(self, reading: Reading) -> None:
        """Add a micro-batch whose sizes were read."""
        self._readings.append(reading)

    @contextmanager
    def phase(self, name: str, *, is_marked: bool = True) -> Iterator[None]:
        """A context for work outside steps, such as evaluation: its time and its model calls belong to no step.

        Args:
            name: Name of the phase.
            is_marked: Whether a trace that is being recorded marks its time.
        """
        seconds: list[float] = []
        try:
            mark = self.trace.outside_steps() if is_marked else nullcontext()
            with self.step_clock.apart() as seconds, mark, self.counter.not_listening():
                yield
        finally:
            self._session.add_seconds(name, seconds[0])
            if name == "count":
                self.count_seconds += seconds[0]

    def spent_before_first_step(self, name: str, seconds: float) -> None:
        """Add to a phase time before the first step, when the monitor did not exist yet."""
        self._session.add_seconds(name, seconds)
        self.step_clock.seconds_before_first_step += seconds

    def spent_on(self, name: str) -> None:
        """Add to a phase the time that has passed since the last step."""
        seconds = self.step_clock.book()
        self._session.add_seconds(name, seconds)
        if seconds and self.trace.is_on:
            self.trace.interrupted(self.last_step or 0)

    def add_to_last_step(self, loss: Any, grad_norm: Any, learning_rate: Any) -> None:
        """Add values to the newest step, for frameworks that report them only at the end of a window."""
        given = {"loss": loss, "grad_norm": grad_norm, "learning_rate": learning_rate}
        if self._noted:
            kept = {name: keep(value) for name, value in given.items() if value is not None}
            self._noted[-1] = self._noted[-1]._replace(**kept)
        elif self._begun:  # a checkpoint was saved after the step, so the step's values have already been read
            known: dict[str, Any] = {name: read_now(value) for name, value in given.items()}
            known = {name: value for name, value in known.items() if value is not None}
            last = self._begun[-1]
            rate = known.pop("learning_rate", last.learning_rate)
            self._begun[-1] = last._replace(measured=last.measured._replace(**known), learning_rate=rate)

    def ask_for_window(self) -> None:
        """Ask for the values of the steps since the last time, for the row of a framework that ends a window here."""
        if self.ranks.is_logging and self.last_step is not None:
            self.rows.ask(self.last_step)

    def _is_window_full(self, step: int, previous: int | None) -> bool:
        """Whether the window ends with this step: by the logging rank's plan, or by `log_every` and `log_seconds`."""
        if self.ranks.window_steps is not None:
            return ends_window(step, previous, self.ranks.window_steps)
        if self.ranks.waits_for_plan:
            return False
        is_late = self._clock() - self._window_began >= self._log_seconds
        return is_late or len(self._begun) + len(self._noted) >= self._log_every

    def _look_at_ranks(self, wait_seconds: float = 0.0) -> None:
        """Take what other ranks have sent: merged reports, or the logging rank's plan with the length of windows."""
        link = self.ranks.link
        if link is None:
            return
        if wait_seconds and self.ranks.waits_for_plan:
            link.wait_for_plan(wait_seconds)
        if link.merged:
            self._send_rows()
        if self.ranks.waits_for_plan:
            plan = self.ranks.new_plan()
            if plan is not None:
                self._cut_at_windows(plan)
            elif link.failure is not None or self._has_waited_enough():
                self._leave_ranks()

    def _has_waited_enough(self) -> bool:
        most = max(_MOST_NOTED_WINDOWS * self._config.log_every, _MOST_NOTED_STEPS)
        return len(self._noted) > most and self._clock() - self._window_began > _PLAN_SECONDS

    def _leave_ranks(self) -> None:
        """Stop reporting, because no rank receives this rank's reports."""
        self.is_off = True
        self.ranks.leave()

    def _cut_at_windows(self, window_steps: int) -> None:
        """Divide the steps so far into windows of the length that the logging rank has just sent."""
        noted, self._noted = self._noted, []
        previous: int | None = None
        for step in noted:
            self._noted.append(step)
            if ends_window(step.step, previous, window_steps) and step is not noted[-1]:
                self.close_window()
            previous = step.step

    def close_window(self, *, now: bool = False, wait_seconds: float = 0.0) -> None:
        """End the current window, and make rows of all windows whose values have arrived from the device.

        Args:
            now: True makes rows even if it is not certain yet which steps are warm-up.
            wait_seconds: How long to wait for values from the device.
        """
        if self.ranks.waits_for_plan:
            return
        self.pricer.peaks.share(self.ranks.ranks_on_device)
        self.trace.look_for_request()
        if self._noted:
            step_seconds = (self._clock() - self._window_began) / len(self._noted)
            busy = self.step_clock.typical_busy_seconds(step_seconds)
            self.counter.look_at_model()
            window = Window(self._noted, self._timer, self.counter.look_at_held)
            self._late.append(_LateWindow(window, self._begun, busy))
            self._noted = []
        elif self._begun:
            self.rows.add(PricedWindow(self._begun))
        self._begun = []
        self._take_arrived(wait_seconds)
        for steps, busy in self.rows.windows_past_warm_up(flush=now):
            self.ranks.plan(steps, self._config.log_every, self._config.log_seconds)
            self.ranks.send_window(steps, self._peak_flops_per_s(steps), busy)
        self._send_rows(now=now)

    def _take_arrived(self, wait_seconds: float) -> None:
        while self._late and self._late[0].window.arrives(wait_seconds):
            late = self._late.popleft()
            steps = self._settled_and_priced(late.window)
            self.rows.add(PricedWindow([*late.begun, *steps], late.busy_seconds_per_step))

    def _settled_and_priced(self, window: Window) -> list[PricedStep]:
        settled = window.settle()
        steps = [price_step(step, self._cost(step)) for step in settled.steps]
        if settled.batch_failure is not None:
            self.failed("batch", settled.batch_failure)
        self._look_for_gaps(settled)
        for name in sorted(settled.left_out):
            self._notify(*notices.not_readable(name))
        provenance = self.pricer.new_provenance(window.steps[0].step, self.rows.layout.devices_per_batch)
        if provenance is not None:
            self.outlets.send(provenance)
        return steps

    def _cost(self, step: SettledStep) -> StepCost:
        noted = step.noted
        try:
            return self.pricer.cost(noted.trace, noted.step, step.works, noted.user_flops)
        except Exception as error:  # the step is logged without FLOPs
            self.failed("flops", error)
            return StepCost()

    def set_looks_for_gaps(self, looks: bool) -> None:
        self._has_looked_for_gaps = not looks

    def _look_for_gaps(self, window: SettledWindow) -> None:
        """Give a notice after the first window if no model or no batches were given, because MFU needs both."""
        if self._has_looked_for_gaps or not self.ranks.is_logging:
            return
        self._has_looked_for_gaps = True
        has_model = self.counter.model is not None or self._flops_fn is not None
        has_model = has_model or "set_model" in self.outlets.failed_parts  # reported already
        is_unreadable = "batch" in window.left_out or "batch" in self.outlets.failed_parts
        noted = [step.noted for step in window.steps]
        has_batch = is_unreadable or any(step.readings or step.user_flops for step in noted)
        is_counted = self.counter.is_on and has_model and all(step.trace.estimates is None for step in noted)
        if not (has_model and has_batch):
            self._notify(*notices.nothing_to_count(has_model=has_model, has_batch=has_batch, is_counted=is_counted))

    def _peak_flops_per_s(self, steps: Sequence[PricedStep]) -> float | None:
        """Peak of one device, averaged over the data types in which the steps ran; None if unknown."""
        peak = self.pricer.peak
        return effective_peak([step.measured for step in steps]) or (None if peak is None else peak.flops_per_s)

    def _send_rows(self, *, now: bool = False, give_up: bool = False) -> None:
        """Send rows of the windows that all ranks have reported; with `give_up`, of all windows."""
        if not self.ranks.is_logging:
            return
        self._take_doubt_of_ranks()
        for window in self.ranks.complete(give_up=give_up):
            values = {**self.datasets.take(), **device_memory_gib(self.pricer.peaks.device)}
            row = self.rows.row(
                window, self.pricer.peak, values, with_percentiles=now, later_seconds=self._later_seconds()
            )
            self.outlets.send(row)
            # With several ranks no notice is given, but the reasons are in the row's notes.
            if row.exact is False and self._world_size == 1 and row.notes != (NO_MODEL,):
                self._notify(*notices.notice("not_exact", reasons="; ".join(row.notes)), row.step)
            self._look_for_alarms(row.step)

    def _later_seconds(self) -> float:
        """Time of the steps that are in no row yet and whose values have not been read."""
        late = sum(passed_seconds(late.window.steps, self._timer) + _seconds_of(late.begun) for late in self._late)
        return passed_seconds(self._noted, self._timer) + late

    def _look_for_alarms(self, step: int) -> None:
        if self.rows.missing_ranks:
            self._notify(
                *notices.notice("ranks_missing", missing=self.rows.missing_ranks, world_size=self._world_size), step
            )
        if self._session.stalled_seconds > _LEAST_STALL_SECONDS:
            self._notify(*notices.notice("stalled", seconds=self._session.stalled_seconds), step)
        slow = self.rows.straggler
        if slow is not None and slow.chronic:
            self._notify("warning", f"straggler:{slow.rank}:{slow.cause}", explain_straggler(slow), step)
        mfu, peak = self.rows.latest.get("perf/mfu"), self.pricer.peak
        if mfu is not None and peak is not None and mfu > _MFU_ALARM:
            self._notify(*notices.notice("mfu_above_peak", percent=100 * mfu, peak=peak), step)

    def state(self) -> dict[str, Any]:
        """Return the totals up to the last step for a checkpoint, and flush the log up to the same step."""
        self._look_at_ranks(CHECKPOINT_SECONDS if self._may_wait_for_ranks else 0.0)
        if self.ranks.waits_for_plan:
            self._may_wait_for_ranks = False
        if self.ranks.link is None and self.ranks.is_logging:
            return self._state_alone()
        # With several ranks a checkpoint ends the window, because reports are merged only for whole windows.
        self.close_window(now=True, wait_seconds=DEVICE_SECONDS)
        if not self.ranks.is_logging:
            return {"version": 1, "step": self.last_step}
        self._wait_for_ranks()
        if self._has_started:
            self.outlets.flush_log()
        ledger_step = self._session.resumed_after if self.rows.last_step is None else self.rows.last_step
        return self._state_of(ledger_step, self._session.totals().ledger)

    def _state_alone(self) -> dict[str, Any]:
        """Return the state of a training with one rank; the current window is logged as a partial row and goes on."""
        self._take_arrived(DEVICE_SECONDS)
        if self._noted and not self._late:
            window = Window(self._noted, self._timer, self.counter.look_at_held)
            if window.arrives(DEVICE_SECONDS):
                self._begun, self._noted = [*self._begun, *self._settled_and_priced(window)], []
        so_far = self.rows.so_far(self._begun)
        if so_far is not None and so_far.steps:
            self.outlets.send_to_log(so_far)
        if self._has_started:
            self.outlets.flush_log()
        if so_far is None:
            return self._state_of(self._session.resumed_after, self._session.totals().ledger)
        return self._state_of(so_far.step, dict(so_far.ledger))

    def _state_of(self, ledger_step: int | None, ledger: dict[str, Any]) -> dict[str, Any]:
        return {"version": 1, "step": self.last_step, "ledger_step": ledger_step, "ledger": ledger}

    def _wait_for_ranks(self) -> None:
        """Wait until all ranks have sent their windows up to the last step; after one timeout, never wait again."""
        link, last = self.ranks.link, self.last_step
        if link is None or last is None or not self._may_wait_for_ranks or self.ranks.is_complete:
            return
        self._may_wait_for_ranks = link.wait_for(last, CHECKPOINT_SECONDS)
        self._send_rows(now=True)
        if not self._may_wait_for_ranks:
            self._notify(*notices.notice("state_is_behind"))

    def load(self, state: Any) -> None:
        if state["step"] is None:  # the checkpoint was saved before the first step
            return
        self.last_step = state["step"]  # on every rank, because all ranks must number their steps equally
        if self.ranks.is_logging and "ledger" in state:
            self._session.load(state)

    def close(self, *, after_error: bool = False, ended_by: str | None = None) -> Summary:
        """End the run and close the sinks, even if a part of that fails.

        Args:
            after_error: True waits only briefly for the device and the other ranks.
            ended_by: The exception that has ended the training, for the summary; None without one.
        """
        device_seconds = _CLOSE_AFTER_ERROR_SECONDS if after_error else DEVICE_SECONDS
        seconds = _CLOSE_AFTER_ERROR_SECONDS if after_error else CLOSE_RANKS_SECONDS
        values: dict[str, Number] = {}
        try:
            self.trace.close(self.last_step or 0)
            self._look_at_ranks(seconds)
            if self.ranks.waits_for_plan:
                self._leave_ranks()
            self.close_window(now=True, wait_seconds=device_seconds)
            if self._late:
                steps = sum(len(late.window.steps) for late in self._late)
                self._notify(*notices.notice("device_late", steps=steps, seconds=device_seconds))
            if not self._has_started:
                self._start_run(0)
            self.counter.doubt_unproven()
            self.ranks.finish(seconds)
            self._send_rows(now=True, give_up=True)
            values = self.rows.session_values()
            if self._session.undivided_steps:
                self._notify(*notices.notice("counting_time_unknown", steps=self._session.undivided_steps))
        except Exception as error:
            self.failed("close", error)
        finally:
            self._optimizer_hooks.remove()
            self.counter.close()
            summary = self.outlets.close(self._summary(values, ended_by))
        return summary

    def _summary(self, values: dict[str, Number], ended_by: str | None) -> Summary:
        exact, notes = self.rows.exact, self.rows.notes
        if exact is not None:
            values = {**values, "perf/exact": int(exact)}
        return Summary(self.last_step, 0.0, values, ended_by=ended_by, exact=exact, notes=notes)

    def _start_run(self, first_step: int) -> None:
        self._has_started = True
        self._look_at_layout()  # again, because the model may have been parallelised after `set_model`
        self.ranks.start(str(self._log_path), self.pricer.peaks.device)
        if not self.ranks.is_logging:
            self.is_off = self.ranks.link is None
            return
        environment = describe_environment(self.pricer.peaks.device)
        other = process_writing(self._log_path)
        if other is not None:
            self._notify(*notices.notice("folder_in_use", output_dir=self._output_dir, pid=other))
        clock = self.step_clock
        ledger = self._session.begin(first_step, environment, clock.first_step_began, clock.seconds_before_first_step)
        start = RunStart(
            uuid.uuid4().hex[:12],
            time.time(),
            str(self._output_dir),
            self._session.resumed_after,
            self._config.total_steps,
            world_size=self._world_size,
            config=json_ready(self._config.model_dump()),
            environment=environment,
            ledger=ledger,
        )
        self.outlets.start(start)

    def failed(self, part: str, error: Exception) -> None:
        """Report the failure of a part of the monitor once; with the setting `strict`, raise the error instead."""
        if self._config.strict:
            raise error
        self.outlets.failed_parts.setdefault(part, f"{type(error).__name__}: {first_line(error)}")
        # An InputError is a mistake of the user, and its message says how to correct it.
        what = "" if isinstance(error, InputError) else f"{part} failed in the monitor, the training goes on: "
        message = f"{what}{first_line(error)}"
        self._notify("error", f"part_failed:{part}", message)

    def _notify(self, level: Any, code: str, message: str, step: int | None = None) -> None:
        self.outlets.notify(level, code, message, step=self.last_step if step is None else step)


def _seconds_of(steps: Sequence[PricedStep]) -> float:
    return sum(step.measured.seconds or 0.0 for step in steps)


def _assumed_batch(config: MonitorConfig) -> dict[str, torch.Tensor] | None:
    """Make a batch for steps that are logged without batch and mask; None if its size is not configured."""
    if config.batch_size is None or config.seq_length is None:
        return None
    return {"attention_mask": torch.ones(config.batch_size, config.seq_length, dtype=torch.long)}
