"""The working half of the monitor: notes steps, closes windows, hands rows to the sinks."""

import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flopwatch.clock import Clock
from flopwatch.monitor import notices
from flopwatch.monitor.config import MonitorConfig
from flopwatch.monitor.intake.batch_reader import Reading, Work
from flopwatch.monitor.intake.step_clock import HostTimer, StepClock, StepTimer, timer_for
from flopwatch.monitor.intake.window import (
    DatasetMetrics,
    NotedStep,
    SettledStep,
    SettledWindow,
    Window,
    keep,
    read_now,
)
from flopwatch.monitor.measured_step import effective_peak
from flopwatch.monitor.outlets import Outlets, TraceCapture, first_line, json_ready, open_outlets
from flopwatch.monitor.pricing.certificates import NO_CALLS, StepCalls, StepFlops
from flopwatch.monitor.pricing.pricing import Pricing
from flopwatch.monitor.ranks.job_values import explain_straggler
from flopwatch.monitor.ranks.rank import Rank, ends_window
from flopwatch.monitor.ranks.sharing import data_parallel_size
from flopwatch.monitor.rows import RowMaker
from flopwatch.monitor.session import Session, describe_environment, device_memory_gib
from flopwatch.records.run import Number, RunStart, Summary
from flopwatch.sinks.protocol import Sink

_MFU_ALARM = 1.05
_STALL_SECONDS_TOLD, _OUTSIDE_SECONDS_TOLD = 0.5, 0.2
"""Less than that, in a whole session, is the noise of a busy machine."""
_MOST_NOTED_WINDOWS, _MOST_NOTED_STEPS, _PLAN_SECONDS = 4, 200, 10.0
"""What a rank keeps while it waits for the logging rank's plan, at the least; then it leaves."""
DEVICE_SECONDS = 60.0
"""How long a checkpoint and the end of a run wait for a device that has work queued."""
_CHECKPOINT_SECONDS = 2.0
"""How long a checkpoint waits for the other ranks' windows."""
_CLOSE_RANKS_SECONDS = 5.0
"""How long the end of a run waits for them."""
_CLOSE_AFTER_ERROR_SECONDS = 0.5
"""The others may be stuck in a collective that only the end of this process frees."""


class Core:
    """One run. Every method may raise; the monitor catches."""

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
        loss_fn: Callable[[Any], torch.Tensor] | None,
        flops_fn: Callable[[Any], int] | None,
        peak_flops_per_s: float | None,
    ) -> None:
        self._config = config
        self._log_every, self._log_seconds = config.log_every, config.log_seconds
        self._output_dir = output_dir
        self._log_path = log_path
        self._clock = clock
        self._world_size = world_size
        self.ranks: Rank[SettledStep] = Rank(rank, world_size, config.logging_rank % world_size, self._tell)
        is_logging = self.ranks.is_logging
        self.outlets = open_outlets(config, output_dir, log_path, sinks) if is_logging else Outlets([], is_quiet=True)
        self.last_step: int | None = None
        self._outside_seconds = 0.0
        self.timer: StepTimer = HostTimer(clock)
        self.step_clock = self._new_step_clock()
        self.pricing = Pricing(
            config,
            clock,
            loss_fn=loss_fn,
            flops_fn=flops_fn,
            peak_flops_per_s=peak_flops_per_s,
            apart=lambda: self.phase("count"),
            tell=self._tell,
            without_grad=lambda: self.step_clock.other_work(),
            is_alone=world_size == 1,
        )
        self.pricing.waits_for_laws = not is_logging
        self.rows = RowMaker(config, world_size)
        self._session = Session(log_path, clock, self.rows, self._tell)
        self.datasets = DatasetMetrics()
        self.trace = TraceCapture(output_dir / "traces", self._tell)
        self.assumed_batch = _assumed_batch(config)
        self.is_off = False
        """True when this rank has nothing to tell and nobody to tell it to."""
        self._may_wait_for_ranks = True
        self.own_seconds = 0.0
        self.count_seconds = 0.0
        self._has_started = False
        self._noted: list[NotedStep] = []
        self._readings: list[Reading] = []
        self._user_flops: int | None = None
        self._late: deque[Window] = deque()
        self._window_began = clock()
        self._has_looked_for_gaps = False
        self._begun: list[SettledStep] = []
        """Steps of the window under way that a checkpoint has settled."""

    def set_model(self, model: nn.Module) -> None:
        self.pricing.set_model(model)
        timer = timer_for(self.pricing.device, self._clock)
        if type(timer) is not type(self.timer):
            self.timer = timer
            spent = self.step_clock.seconds_before_first_step
            # Only a CPU's own time can be told by the processor's clock.
            self.ranks.busy_time = None
            self.step_clock = self._new_step_clock()
            self.step_clock.seconds_before_first_step = spent
        self._look_at_layout()

    def _new_step_clock(self) -> StepClock:
        step_clock = StepClock(self.timer, self._clock, self.ranks.busy_time)
        step_clock.outside = self._note_outside
        step_clock.wait_unknown = lambda: self._tell(*notices.input_wait_unknown())
        return step_clock

    def _note_outside(self, seconds: float) -> None:
        self.rows.ledger.add_seconds("outside", seconds)
        self._outside_seconds += seconds
        if self._outside_seconds > _OUTSIDE_SECONDS_TOLD:
            self._tell(*notices.time_outside_steps(seconds))

    def _look_at_layout(self) -> None:
        size = self._config.data_parallel_size or data_parallel_size(self.pricing.model, self._world_size)
        self.rows.data_parallel_size = size
        self.pricing.shares_batches = size < self._world_size

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
        """The hot path: on an ordinary step nothing here reads from a device, writes or waits."""
        segments, waits = self.step_clock.end_step()
        step = int(step)
        if not self._has_started:
            self._start_run(step)
        if batch is not None:
            try:
                self._readings.append(self.pricing.read(batch, lengths))
                if self.pricing.flops_fn is not None:
                    self._user_flops = (self._user_flops or 0) + self.pricing.user_flops(batch)
            except Exception as error:  # costs this step's tokens, not its time and loss
                self.failed("batch", error)
        try:
            calls = self.pricing.end_step(self._readings, step, self.close_window, loss)
        except Exception as error:  # costs this step's FLOPs
            self.failed("flops", error)
            calls = NO_CALLS
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
            calls,
        )
        self._noted.append(noted)
        self._readings, self._user_flops = [], None
        previous, self.last_step = self.last_step, step
        if self.trace.is_on:
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
        if is_full or calls.count is not None:
            try:
                self.pricing.look_at_graph(calls, loss)
            except Exception as error:  # costs this check of the window's FLOPs
                self.failed("flops", error)
        if is_full:
            self.close_window()
        self.step_clock.begin_gap()

    def abandon_step(self) -> None:
        """The body of a step has raised: nothing of it counts."""
        self.pricing.abandon_step()
        self._readings, self._user_flops = [], None

    @property
    def has_batches(self) -> bool:
        """Whether the step under way has given its micro-batches."""
        return bool(self._readings)

    def take(self, batch: Any, lengths: Sequence[int] | None) -> None:
        """A batch, or one micro-batch, of the step under way."""
        self._readings.append(self.pricing.read(batch, lengths))
        if self.pricing.flops_fn is not None:
            self._user_flops = (self._user_flops or 0) + self.pricing.user_flops(batch)

    def take_micro_batch(self, batch: Any, lengths: Sequence[int] | None) -> None:
        """One of several."""
        self.step_clock.micro_batch()
        self.take(batch, lengths)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        seconds: list[float] = []
        try:
            with self.step_clock.apart() as seconds, self.pricing.not_listening():
                yield
        finally:
            self.rows.ledger.add_seconds(name, seconds[0])
            if name == "count":
                self.count_seconds += seconds[0]

    def spent_on(self, name: str) -> None:
        self.rows.ledger.add_seconds(name, self.step_clock.book())

    def add_to_last_step(self, loss: Any, grad_norm: Any, learning_rate: Any) -> None:
        """For frameworks that tell the values of a window when it has ended."""
        if self._noted:
            last = self._noted[-1]
            last.loss = keep(loss) if loss is not None else last.loss
            last.grad_norm = keep(grad_norm) if grad_norm is not None else last.grad_norm
            last.learning_rate = keep(learning_rate) if learning_rate is not None else last.learning_rate
        elif self._begun:  # a checkpoint came between the step and its values
            read = {"loss": read_now(loss), "grad_norm": read_now(grad_norm)}
            known: dict[str, Any] = {name: value for name, value in read.items() if value is not None}
            settled = self._begun[-1]._replace(measured=self._begun[-1].measured._replace(**known))
            rate = read_now(learning_rate)
            self._begun[-1] = settled._replace(learning_rate=settled.learning_rate if rate is None else rate)

    def _is_window_full(self, step: int, previous: int | None) -> bool:
        """By the plan of all ranks, or by this one's own rule where there is none."""
        if self.ranks.window_steps is not None:
            return ends_window(step, previous, self.ranks.window_steps)
        if self.ranks.waits_for_plan:
            return False
        is_late = self._clock() - self._window_began >= self._log_seconds
        return is_late or len(self._begun) + len(self._noted) >= self._log_every

    def _look_at_ranks(self, wait_seconds: float = 0.0) -> None:
        """Has something come from the others? A look at two attributes on an ordinary step."""
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
                self.pricing.adopt(plan.laws)
                for step in self._noted:
                    self.pricing.learn_kept(step.calls)
                self._cut_at_windows(plan.window_steps)
            elif link.failure is not None or self._has_waited_enough():
                self._leave_ranks()

    def _has_waited_enough(self) -> bool:
        most = max(_MOST_NOTED_WINDOWS * self._config.log_every, _MOST_NOTED_STEPS)
        return len(self._noted) > most and self._clock() - self._window_began > _PLAN_SECONDS

    def _leave_ranks(self) -> None:
        """There is nobody to tell anything."""
        self.is_off = True
        self.ranks.leave()

    def _cut_at_windows(self, window_steps: int) -> None:
        """Steps were noted while it was not known where windows end."""
        noted, self._noted = self._noted, []
        previous: int | None = None
        for step in noted:
            self._noted.append(step)
            if ends_window(step.step, previous, window_steps) and step is not noted[-1]:
                self.close_window()
            previous = step.step

    def close_window(self, *, now: bool = False, wait_seconds: float = 0.0) -> None:
        """Send the window on its way, and make rows of those that have arrived, or do so in that time."""
        if self.ranks.waits_for_plan:
            return
        self.pricing.share_peak(self.ranks.ranks_on_device)
        if self._noted:
            step_seconds = (self._clock() - self._window_began) / len(self._noted)
            busy = None if self.ranks.busy_time is None else self.ranks.busy_time.typical(step_seconds)
            doubt = self.pricing.look_at_model()
            look_at = self.pricing.look_at_held
            self._late.append(Window(self._noted, self.timer, look_at, busy, begun=self._begun, doubt=doubt))
            self._noted = []
        elif self._begun:
            self.rows.add(SettledWindow(self._begun))
        self._begun = []
        while self._late and self._late[0].arrives(wait_seconds):
            self._settle(self._late.popleft())
        for steps, busy in self.rows.with_warm_up_told(now=now):
            self.ranks.plan(steps, self._config.log_every, self._config.log_seconds, self.pricing.offer())
            self.ranks.tell(steps, self._peak_flops_per_s(steps), busy)
        self._send_rows(now=now)

    def _peak_flops_per_s(self, steps: Sequence[SettledStep]) -> float | None:
        """Of one device, for the types the steps ran in."""
        peak = self.pricing.peak
        return effective_peak([step.measured for step in steps]) or (None if peak is None else peak.flops_per_s)

    def _send_rows(self, *, now: bool = False, give_up: bool = False) -> None:
        """Rows of the windows that are known of all ranks."""
        if not self.ranks.is_logging:
            return
        for window in self.ranks.complete(give_up=give_up):
            noted = Window(self._noted, self.timer).seconds() + sum(late.seconds() for late in self._late)
            row = self.rows.row(window, self.pricing.peak, self._more_values(), now=now, noted_seconds=noted)
            self.outlets.send(row)
            if row.exact is False and self._world_size == 1:  # of several ranks every row says so
                self._tell(*notices.not_exact(row.notes), row.step)
            self._look_for_alarms(row.step)

    def state(self) -> dict[str, Any]:
        """The totals up to the last step. The log is written up to there too, so that the two never disagree."""
        self._look_at_ranks(_CHECKPOINT_SECONDS if self._may_wait_for_ranks else 0.0)
        if self.ranks.waits_for_plan:
            self._may_wait_for_ranks = False
        if self.ranks.link is None and self.ranks.is_logging:
            return self._state_alone()
        # The ranks add up windows that end at the same step on all of them, so with several a checkpoint ends one.
        self.close_window(now=True, wait_seconds=DEVICE_SECONDS)
        if not self.ranks.is_logging:
            return {"version": 1, "step": self.last_step}
        self._wait_for_ranks()
        if self._has_started:
            self.outlets.flush_log()
        self.rows.ledger.tell_wall(self._session.unix_time())
        ledger_step = self._session.resumed_after if self.rows.last_step is None else self.rows.last_step
        ledger = self.rows.ledger.to_json()
        return {"version": 1, "step": self.last_step, "ledger_step": ledger_step, "ledger": ledger}

    def _state_alone(self) -> dict[str, Any]:
        """The window goes on: its steps so far are settled, and in the log without being a row."""
        while self._late and self._late[0].arrives(DEVICE_SECONDS):
            self._settle(self._late.popleft())
        if self._noted and not self._late:
            window = Window(self._noted, self.timer, self.pricing.look_at_held, begun=self._begun)
            if window.arrives(DEVICE_SECONDS):
                self._begun, self._noted = self._settled(window).steps, []
        so_far = self.rows.so_far(self._begun)
        if so_far is None:
            self.rows.ledger.tell_wall(self._session.unix_time())
            ledger, ledger_step = self.rows.ledger.to_json(), self._session.resumed_after
        else:
            ledger, ledger_step = dict(so_far.ledger), so_far.step
            if so_far.steps:
                self.outlets.send_to_log(so_far)
        if self._has_started:
            self.outlets.flush_log()
        return {"version": 1, "step": self.last_step, "ledger_step": ledger_step, "ledger": ledger}

    def _wait_for_ranks(self) -> None:
        """A checkpoint holds the totals of all ranks, if these cut their window too; once they do not, never again."""
        link, last = self.ranks.link, self.last_step
        if link is None or last is None or not self._may_wait_for_ranks or self.ranks.is_complete:
            return
        self._may_wait_for_ranks = link.wait_for(last, _CHECKPOINT_SECONDS)
        self._send_rows(now=True)
        if not self._may_wait_for_ranks:
            self._tell(*notices.state_is_behind())

    def load(self, state: Any) -> None:
        if state["step"] is None:  # saved before the first step: there is nothing to continue
            return
        self.last_step = state["step"]  # on every rank: they must number their steps alike
        if self.ranks.is_logging and "ledger" in state:
            self._session.load(state)

    def close(self, *, after_error: bool = False, ended_by: str | None = None) -> Summary:
        """Whatever fails on the way, the sinks are ended. After an error nobody is waited for but a moment."""
        device_seconds = _CLOSE_AFTER_ERROR_SECONDS if after_error else DEVICE_SECONDS
        seconds = _CLOSE_AFTER_ERROR_SECONDS if after_error else _CLOSE_RANKS_SECONDS
        values: dict[str, Number] = {}
        try:
            self.trace.stop()
            self._look_at_ranks(seconds)
            if self.ranks.waits_for_plan:
                self._leave_ranks()
            self.close_window(now=True, wait_seconds=device_seconds)
            if self._late:
                self._tell(*notices.device_late(sum(len(window.steps) for window in self._late), device_seconds))
            if not self._has_started:
                self._start_run(0)
            self.ranks.finish(seconds)
            self._send_rows(now=True, give_up=True)
            values = self.rows.session_values()
        except Exception as error:
            self.failed("close", error)
        finally:
            self.pricing.close()
            summary = self.outlets.close(self._of_session(values, ended_by))
        return summary

    def _of_session(self, values: dict[str, Number], ended_by: str | None) -> Summary:
        exact, notes, doubt = self.rows.exact, self.rows.notes, self.pricing.doubt
        if doubt is not None:  # rows that were called exact may not be
            exact, notes, values = False, (*notes, doubt.message), {**values, "perf/exact": 0}
        return Summary(self.last_step, 0.0, values, ended_by=ended_by, exact=exact, notes=notes)

    def failed(self, part: str, error: Exception) -> None:
        """Report once what went wrong in a part of the monitor, or raise it."""
        if self._config.strict:
            raise error
        self.outlets.failed_parts.setdefault(part, f"{type(error).__name__}: {first_line(error)}")
        self._tell("error", f"part_failed:{part}", f"{part} failed, training goes on: {first_line(error)}")

    def _settle(self, window: Window) -> None:
        self.rows.add(self._settled(window))

    def _settled(self, window: Window) -> SettledWindow:
        settled = window.settle(self._price, self.pricing.peak_seconds)
        if window.batch_failure is not None:
            self.failed("batch", window.batch_failure)
        self._look_for_gaps(window)
        for name in sorted(window.changed_in_place):
            self._tell(*notices.not_readable(name))
        if self.pricing.has_news:
            self.pricing.is_new = False
            self.outlets.send(self.pricing.provenance(window.steps[0].step, self.rows.devices_per_batch))
        return settled

    def set_looks_for_gaps(self, looks: bool) -> None:
        self._has_looked_for_gaps = not looks

    def _look_for_gaps(self, window: Window) -> None:
        """Once: a training that forgot the model or the batches would wait for its MFU in vain."""
        if self._has_looked_for_gaps or not self.ranks.is_logging:
            return
        self._has_looked_for_gaps = True
        has_model = self.pricing.model is not None or self.pricing.flops_fn is not None
        is_unreadable = "batch" in window.changed_in_place or "batch" in self.outlets.failed_parts
        has_batch = is_unreadable or any(step.readings or step.user_flops or step.calls.kinds for step in window.steps)
        if not (has_model and has_batch):
            self._tell(*notices.nothing_to_count(has_model=has_model, has_batch=has_batch))

    def _price(self, calls: StepCalls, works: Sequence[Work]) -> StepFlops | None:
        try:
            return self.pricing.flops(calls, works)
        except Exception as error:  # costs this step's FLOPs
            self.failed("flops", error)
            return None

    def _more_values(self) -> dict[str, Number]:
        return {**self.datasets.take(), **device_memory_gib(self.pricing.device)}

    def _look_for_alarms(self, step: int) -> None:
        if self.rows.missing_ranks:
            self._tell(*notices.ranks_missing(self.rows.missing_ranks, self._world_size), step)
        if self.rows.stalled_seconds > _STALL_SECONDS_TOLD:
            self._tell(*notices.stalled(self.rows.stalled_seconds), step)
        slow = self.rows.straggler
        if slow is not None and slow.chronic:
            self._tell("warning", f"straggler:{slow.rank}:{slow.cause}", explain_straggler(slow), step)
        mfu, peak = self.rows.latest.get("perf/mfu"), self.pricing.peak
        if mfu is not None and peak is not None and mfu > _MFU_ALARM:
            self._tell(*notices.mfu_above_peak(mfu, peak), step)

    def _start_run(self, first_step: int) -> None:
        self._has_started = True
        self._look_at_layout()  # the model may have been parallelised since
        self.ranks.start(str(self._log_path), self.pricing.device)
        if not self.ranks.is_logging:
            self.is_off = self.ranks.link is None
            return
        environment = describe_environment(self.pricing.device)
        self._session.begin(first_step, environment, self.step_clock)
        start = RunStart(
            uuid.uuid4().hex[:12],
            time.time(),
            str(self._output_dir),
            self._session.resumed_after,
            self._config.total_steps,
            world_size=self._world_size,
            config=json_ready(self._config.model_dump()),
            environment=environment,
            ledger=self.rows.ledger.to_json(),
        )
        self.outlets.start(start)

    def _tell(self, level: Any, code: str, message: str, step: int | None = None) -> None:
        self.outlets.tell(level, code, message, step=self.last_step if step is None else step)


def _assumed_batch(config: MonitorConfig) -> dict[str, torch.Tensor] | None:
    """What the configuration says every step is given, for loops that pass neither batch nor mask."""
    if config.batch_size is None or config.seq_length is None:
        return None
    return {"attention_mask": torch.ones(config.batch_size, config.seq_length, dtype=torch.long)}
