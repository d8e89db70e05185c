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
from flopwatch.errors import FlopwatchError
from flopwatch.monitor.batch_reader import Reading, Work
from flopwatch.monitor.config import MonitorConfig
from flopwatch.monitor.datasets import DatasetMetrics
from flopwatch.monitor.environment import describe_environment, device_memory_gib
from flopwatch.monitor.kineto import TraceCapture
from flopwatch.monitor.late_values import keep
from flopwatch.monitor.law_book import StepFlops
from flopwatch.monitor.ledger import Ledger
from flopwatch.monitor.outlets import first_line, json_ready, open_outlets
from flopwatch.monitor.pricing import Pricing
from flopwatch.monitor.resume import find_resume_point
from flopwatch.monitor.rows import RowMaker
from flopwatch.monitor.step_clock import StepClock
from flopwatch.monitor.timers import HostTimer, StepTimer, timer_for
from flopwatch.monitor.window import NotedStep, Window
from flopwatch.run_records import Number, RunStart, Summary
from flopwatch.sinks.protocol import Sink

_MFU_ALARM = 1.05


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
        world_size: int,
        loss_fn: Callable[[Any], torch.Tensor] | None,
        flops_fn: Callable[[Any], int] | None,
        peak_flops_per_s: float | None,
    ) -> None:
        self._config = config
        self._output_dir = output_dir
        self._log_path = log_path
        self._clock = clock
        self._world_size = world_size
        self.outlets = open_outlets(config, output_dir, log_path, sinks)
        self.last_step: int | None = None
        self.timer: StepTimer = HostTimer(clock)
        self.step_clock = StepClock(self.timer, clock)
        self.pricing = Pricing(
            config,
            clock,
            loss_fn=loss_fn,
            flops_fn=flops_fn,
            peak_flops_per_s=peak_flops_per_s,
            apart=lambda: self.phase("count"),
            tell=self._tell,
        )
        self.rows = RowMaker(config, world_size)
        self.datasets = DatasetMetrics()
        self.trace = TraceCapture(output_dir / "traces", self._tell)
        self.assumed_batch = _assumed_batch(config)
        self.own_seconds = 0.0
        self.count_seconds = 0.0
        self._resumed_after: int | None = None
        self._has_started = False
        self._noted: list[NotedStep] = []
        self._readings: list[Reading] = []
        self._user_flops: int | None = None
        self._late: deque[Window] = deque()
        self._window_began = clock()

    def set_model(self, model: nn.Module) -> None:
        self.pricing.set_model(model)
        timer = timer_for(self.pricing.device, self._clock)
        if type(timer) is not type(self.timer):
            self.timer = timer
            self.step_clock = StepClock(timer, self._clock)

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
        segments, wait = self.step_clock.end_step()
        step = int(step)
        if not self._has_started:
            self._start_run(step)
        if batch is not None:
            try:
                self.take(batch, lengths)
            except Exception as error:  # costs this step's tokens, not its time and loss
                self.failed("batch", error)
        noted = NotedStep(
            step,
            epoch,
            keep(loss) if isinstance(loss, torch.Tensor) else loss,
            keep(grad_norm) if isinstance(grad_norm, torch.Tensor) else grad_norm,
            keep(learning_rate) if isinstance(learning_rate, torch.Tensor) else learning_rate,
            self._readings,
            segments,
            wait,
            skip_wandb,
            {name: keep(value) for name, value in more.items()} if more else more,
            self._user_flops,
        )
        self._noted.append(noted)
        self._readings, self._user_flops = [], None
        self.last_step = step
        if not self.pricing.has_looked_for_peak:
            self.pricing.look_for_peak(loss)
        if noted.readings and batch is not None and self.pricing.is_check_due(step):
            self.pricing.check(batch, noted.readings[-1], self.close_window)
        if self.trace.is_on:
            self.trace.step_ended(step)
        steps = len(self._noted)
        if steps == 1:
            self._window_began = self._clock()
        if steps >= self._config.log_every or self._clock() - self._window_began >= self._config.log_seconds:
            self.close_window()

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
        """One of several; the first of a step is counted when that is due, since `log_step` will not have it."""
        self.take(batch, lengths)
        is_first = len(self._readings) == 1
        if is_first and self.last_step is not None and self.pricing.is_check_due(self.last_step + 1):
            self.pricing.check(batch, self._readings[-1], self.close_window)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        seconds: list[float] = []
        try:
            with self.step_clock.apart() as seconds:
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

    def close_window(self, *, now: bool = False, wait: bool = False) -> None:
        """Send the window on its way, and make rows of those that have arrived."""
        if self._noted:
            self._late.append(Window(self._noted, self.timer, self.pricing.look_at_held))
            self._noted = []
        while self._late and (wait or self._late[0].has_arrived()):
            window = self._late.popleft()
            if wait:
                window.wait()
            self._settle(window)
        for row in self.rows.ready(self.pricing.peak, self._more_values, now=now):
            self.outlets.send(row)
            self._look_for_alarms(row.step)

    def state(self) -> dict[str, Any]:
        """The totals up to the last step. The log is written up to there too, so that the two never disagree."""
        self.close_window(now=True, wait=True)
        if self._has_started:
            self.outlets.flush_log()
        return {"version": 1, "step": self.last_step, "ledger": self.rows.ledger.to_json()}

    def load(self, state: Any) -> None:
        self.rows.ledger = Ledger.from_json(state["ledger"])
        self.last_step = self._resumed_after = state["step"]

    def close(self) -> Summary:
        """Whatever fails on the way, the sinks are ended."""
        values: dict[str, Number] = {}
        try:
            self.trace.stop()
            self.close_window(now=True, wait=True)
            if not self._has_started:
                self._start_run(0)
            values = self.rows.session_values()
        except Exception as error:
            self.failed("close", error)
        finally:
            self.pricing.model = None
            summary = self.outlets.close(self.last_step, values)
        return summary

    def failed(self, part: str, error: Exception) -> None:
        """Report once what went wrong in a part of the monitor, or raise it."""
        if self._config.strict:
            raise error
        self.outlets.failed_parts.setdefault(part, f"{type(error).__name__}: {first_line(error)}")
        self._tell("error", f"part_failed:{part}", f"{part} failed, training goes on: {first_line(error)}")

    def _settle(self, window: Window) -> None:
        self.rows.add(window.settle(self._price))
        for name in sorted(window.changed_in_place):
            if name == "batch":
                self._tell(
                    "warning",
                    "batch_reused",
                    "the batch's tensors were written into after log_step, so steps of one window have no tokens and "
                    "FLOPs; from here on batches are read at once",
                )
                continue
            self._tell(
                "warning",
                f"not_readable:{name}",
                f"{name} was written into after log_step, is not a single number, or is spread over ranks, so it is "
                f"left out; pass {name}.detach().clone(), a number, or {name}.full_tensor()",
            )
        if self.pricing.is_new:
            self.pricing.is_new = False
            self.outlets.send(self.pricing.provenance(window.steps[0].step))

    def _price(self, work: Work) -> StepFlops | None:
        try:
            return self.pricing.flops(work)
        except Exception as error:  # costs this step's FLOPs
            self.failed("flops", error)
            return None

    def _more_values(self) -> dict[str, Number]:
        return {**self.datasets.take(), **device_memory_gib(self.pricing.device)}

    def _look_for_alarms(self, step: int) -> None:
        mfu, peak = self.rows.latest.get("perf/mfu"), self.pricing.peak
        if mfu is not None and peak is not None and mfu > _MFU_ALARM:
            self._tell(
                "warning",
                "mfu_above_peak",
                f"MFU is {100 * mfu:.1f} %, more than the device can do: the peak of {peak.flops_per_s:.4g} FLOP/s "
                f"({peak.device}, {peak.dtype}, {peak.source}) is not that of this training; pass dtype= or "
                "peak_flops_per_s=",
                step,
            )

    def _start_run(self, first_step: int) -> None:
        self._has_started = True
        if self._resumed_after is None:
            self._resume_from_log(first_step)
        start = RunStart(
            uuid.uuid4().hex[:12],
            time.time(),
            str(self._output_dir),
            self._resumed_after,
            self._config.total_steps,
            world_size=self._world_size,
            config=json_ready(self._config.model_dump()),
            environment=describe_environment(self.pricing.device),
        )
        self.outlets.start(start)

    def _resume_from_log(self, first_step: int) -> None:
        try:
            point = find_resume_point(self._log_path, first_step)
        except (FlopwatchError, OSError, ValueError, KeyError) as error:
            message = f"the totals start at 0: {self._log_path} is of no use: {error}"
            self._tell("warning", "log_not_resumed", message)
            return
        if point is None:
            return
        self._resumed_after, self.rows.ledger = point
        if first_step > point.step + 1:
            self._tell(
                "warning",
                "steps_lost",
                f"the log ends at step {point.step} and the run continues at {first_step}: the totals lack the steps "
                "in between; save monitor.state_dict() with your checkpoint and load it",
            )

    def _tell(self, level: Any, code: str, message: str, step: int | None = None) -> None:
        self.outlets.tell(level, code, message, step=self.last_step if step is None else step)


def _assumed_batch(config: MonitorConfig) -> dict[str, torch.Tensor] | None:
    """What the configuration says every step is given, for loops that pass neither batch nor mask."""
    if config.batch_size is None or config.seq_length is None:
        return None
    return {"attention_mask": torch.ones(config.batch_size, config.seq_length, dtype=torch.long)}
