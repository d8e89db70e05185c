"""`TrainingMonitor`: what a user adds to a training loop and forgets."""

import atexit
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import nn

from flopwatch.clock import Clock, monotonic_seconds
from flopwatch.monitor.config import MonitorConfig, read_config, refuse_problems
from flopwatch.monitor.run import DEVICE_SECONDS, MonitoredRun
from flopwatch.monitor.session import rank_and_world_size
from flopwatch.records.reading import first_line
from flopwatch.records.run import Number, Summary
from flopwatch.sinks.protocol import Sink

# Batches whose arrival is timed: `for batch in monitor.batches(loader)`.


Batch = TypeVar("Batch")


class WaitTimer(Protocol):
    """Measures how long batches are fetched."""

    def begin_wait(self) -> bool:
        """False means that this one is not timed."""

    def end_wait(self, *, has_batch: bool = True) -> None:
        """The fetching has ended, with a batch or without."""


class TimedIterator(Generic[Batch]):
    """An iterator, with every `next` timed."""

    __slots__ = ("_iterator", "_timer")

    def __init__(self, iterator: Iterator[Batch], timer: WaitTimer) -> None:
        self._iterator = iterator
        self._timer = timer

    def __iter__(self) -> "TimedIterator[Batch]":
        return self

    def __next__(self) -> Batch:
        is_timed = self._timer.begin_wait()
        has_batch = False
        try:
            batch = next(self._iterator)
            has_batch = True
        finally:
            if is_timed:
                self._timer.end_wait(has_batch=has_batch)
        return batch


class TimedBatches(Generic[Batch]):
    """A loader whose batches are timed. It has the loader's length and attributes, and can be gone through again."""

    def __init__(self, loader: Iterable[Batch], timer: WaitTimer) -> None:
        self._loader = loader
        self._timer = timer

    def __iter__(self) -> Iterator[Batch]:
        is_timed = self._timer.begin_wait()  # starting the loader's workers is waiting, too
        try:
            iterator = iter(self._loader)
        finally:
            if is_timed:
                self._timer.end_wait(has_batch=False)
        return TimedIterator(iterator, self._timer)

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


# `with monitor.step(batch) as step:` one optimizer step as a context.


_NOTHING_MORE: dict[str, Any] = {}


class Step:
    """An optimizer step under way. It is logged when the context ends, unless the body raised.

    Attributes:
        number: The step's number.
    """

    __slots__ = ("_batch", "_epoch", "_grad_norm", "_lengths", "_loss", "_lr", "_monitor", "_more", "number")

    def __init__(
        self, monitor: "TrainingMonitor", number: int, epoch: Any, batch: Any, lengths: Sequence[int] | None
    ) -> None:
        self.number = number
        self._monitor = monitor
        self._epoch = epoch
        self._batch = batch
        self._lengths = lengths
        self._loss: Any = None
        self._lr: Any = None
        self._grad_norm: Any = None
        self._more: dict[str, Any] | None = None

    def log(self, loss: Any = None, lr: Any = None, grad_norm: Any = None, epoch: Any = None, **more: Any) -> None:
        """Values of this step; tensors are read later. Can be called several times."""
        if loss is not None:
            self._loss = loss
        if lr is not None:
            self._lr = lr
        if grad_norm is not None:
            self._grad_norm = grad_norm
        if epoch is not None:
            self._epoch = epoch
        if more:
            known = {name: value for name, value in more.items() if value is not None}
            self._lr = known.pop("learning_rate", self._lr)
            self._more = {**(self._more or {}), **known}

    def micro_batch(self, batch: Any, lengths: Sequence[int] | None = None) -> None:
        """One of the batches of this step, for gradient accumulation.

        When it arrived is known where it comes from `monitor.batches(loader)`; else the step's input wait is not.
        """
        self._monitor.micro_batch(batch, lengths)

    def __enter__(self) -> "Step":
        monitor = self._monitor
        run = monitor._run
        if run is not None:
            try:
                run.step_clock.start_step(self._batch is not None)
                run.noter.begin_step()
            except Exception as error:
                monitor._failed("start_step", error)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        monitor = self._monitor
        run = monitor._run
        if kind is not None:
            monitor._abandon_step()
        elif self._more or self._batch is None or run is None or not monitor._logs_steps_itself:
            monitor.log_step(self.number, batch=self._batch, lengths=self._lengths, **self._values())
        else:  # what `log_step` does, without taking its arguments apart a second time
            entered = monitor._clock()
            try:
                run.note_step(
                    self.number, self._epoch, self._loss, self._grad_norm, self._lr, False,
                    self._batch, self._lengths, _NOTHING_MORE,
                )  # fmt: skip
                if run.is_off:
                    monitor._run = None
            except Exception as error:
                monitor._failed("log_step", error)
            monitor._own_seconds += monitor._clock() - entered

    def _values(self) -> dict[str, Any]:
        """As `log_step` takes them."""
        known = {"epoch": self._epoch, "loss": self._loss, "grad_norm": self._grad_norm, "learning_rate": self._lr}
        return {**known, **(self._more or {})}


class TrainingMonitor:
    """Exact MFU, HFU and rates of a live run, in a local log and in the tools you use.

    On an ordinary step `log_step` notes a few numbers and returns: nothing is read from a device, written or sent.
    Every `log_every` steps the window becomes one row. A part of the monitor that fails is reported once and switched
    off; the training goes on.

    Args:
        output_dir: The run's folder. A run that is resumed in the same folder continues its log and totals.
        config: A YAML file, or a dict (also a whole training configuration); see `docs/monitoring.md`.
        log_file: Name of the local log in `output_dir`: JSON Lines, append-only.
        flops_profile_freq: Steps between two counts in mode `profiler`.
        model: The model that is trained, wrapped or not. Without it there are rates but no FLOPs.
        mode: `smart` counts once without running the model, and prices every step by its own shape; `estimate` never
            counts; `profiler` counts every `flops_profile_freq` steps; `hybrid` falls back to `profiler`.
        sinks: One or several of `console`, `tensorboard`, `wandb`, `mlflow`, `prometheus`, `module:Class`, or objects
            with the methods of `flopwatch.sinks.protocol.Sink`.
        attention: `full` counts every pair of positions, `causal` those not masked.
        loss_fn: From the model's output to the loss, where the model does not return one.
        flops_fn: From a batch to its model FLOPs; replaces counting.
        peak_flops_per_s: The device's dense peak, where the table does not know it or you know better.
        dtype: Compute type the peak is looked up for; found from the loss's graph or the weights without it.
        log_every: Steps per row.
        total_steps: Planned steps, for progress and time left.
        preset: `production`, `research`, `prototype` or `complex`.
        logging_rank: The rank that writes the log and the sinks; all others send it their share. -1 is the last one.
        data_parallel_size: Ranks that work on different data, where others share theirs (tensor, context or pipeline
            parallel); tensor parallelism by DTensor is seen without it.
        strict: Raise what would otherwise be reported once.
        clock: Seconds that never go back; for tests.

    Example:
        >>> import tempfile, torch
        >>> model = torch.nn.Linear(8, 8)
        >>> with TrainingMonitor(tempfile.mkdtemp(), model=model) as monitor:
        ...     for number in range(3):
        ...         with monitor.step(torch.randn(4, 8)) as step:
        ...             step.log(loss=0.5)
        >>> monitor.summary.values["total/model_flops"]  # 3 x 4 samples x 2 x 8 x 8, forward and weight gradient
        3072
    """

    def __init__(
        self,
        output_dir: str | Path = "outputs",
        config: "Mapping[str, Any] | str | Path | MonitorConfig | None" = None,
        log_file: str = "training_log.jsonl",
        flops_profile_freq: int | None = None,
        *,
        model: nn.Module | None = None,
        mode: str | None = None,
        sinks: Sequence[str | Sink] | str | Sink | None = None,
        attention: str | None = None,
        loss_fn: Callable[[Any], torch.Tensor] | None = None,
        flops_fn: Callable[[Any], int] | None = None,
        peak_flops_per_s: float | None = None,
        dtype: str | torch.dtype | None = None,
        log_every: int | None = None,
        total_steps: int | None = None,
        preset: str | None = None,
        logging_rank: int | None = None,
        data_parallel_size: int | None = None,
        strict: bool | None = None,
        clock: Clock = monotonic_seconds,
    ) -> None:
        wanted_sinks = _as_list(sinks)
        self.config, problems = read_config(
            config,
            preset,
            mode=mode or os.environ.get("FLOPWATCH_MODE") or None,
            flops_profile_freq=flops_profile_freq,
            attention=attention,
            dtype=None if dtype is None else str(dtype).removeprefix("torch."),
            log_every=log_every,
            total_steps=total_steps,
            logging_rank=logging_rank,
            data_parallel_size=data_parallel_size,
            strict=strict,
            sinks=None if sinks is None else tuple(sink for sink in wanted_sinks if isinstance(sink, str)),
        )
        if self.config.strict:
            refuse_problems(problems)
        self.output_dir = Path(output_dir)
        self.log_path = self.output_dir / log_file
        self.summary: Summary | None = None
        self._clock = clock
        self._logs_steps_itself = type(self).log_step is TrainingMonitor.log_step
        """False where a subclass overrides `log_step`, which then receives every step."""
        self._run: MonitoredRun | None = None
        """None when switched off or closed, so that every call is cheap then."""
        self._started_run: MonitoredRun | None = None
        """The run, also after it was closed."""
        self._own_seconds = 0.0
        if os.environ.get("FLOPWATCH_DISABLE", "") not in ("", "0"):
            return
        rank, world_size = rank_and_world_size()
        objects = [sink for sink in wanted_sinks if not isinstance(sink, str)]
        self._run = MonitoredRun(
            self.config,
            self.output_dir,
            self.log_path,
            [*self.config.sinks, *objects],
            clock,
            rank=rank,
            world_size=world_size,
            loss_fn=loss_fn,
            flops_fn=flops_fn,
            peak_flops_per_s=peak_flops_per_s,
        )
        self._started_run = self._run
        for problem in problems:
            self._run.outlets.notify("warning", f"configuration:{problem}", f"configuration left out: {problem}")
        if model is not None:
            self.set_model(model)
        atexit.register(_close_forgotten, weakref.ref(self))

    def log_step(
        self,
        step: int,
        epoch: float | None = None,
        loss: Any = None,
        grad_norm: Any = None,
        learning_rate: Any = None,
        attention_mask: torch.Tensor | None = None,
        skip_wandb: bool = False,
        *,
        batch: Any = None,
        lengths: Sequence[int] | None = None,
        **more: Any,
    ) -> None:
        """Say that an optimizer step has ended.

        Args:
            step: Its number.
            epoch: Where the training is.
            loss: A number or a tensor; a tensor is read later, with its window.
            grad_norm: The same.
            learning_rate: The same.
            attention_mask: Of the batch; marks the tokens that are not padding.
            skip_wandb: True keeps this step's window out of W&B, if all its steps say so.
            batch: What the model was given; its shapes, mask, labels, packed lengths and image grids are read from it
                without touching the device. With gradient accumulation, pass each one to `micro_batch` instead.
            lengths: Lengths of the documents in the batch, where it does not contain them.
            more: Your own metrics, logged as `training/<name>`.
        """
        run = self._run
        if run is None:
            return
        entered = self._clock()
        if batch is None and not run.has_batches:
            batch = run.assumed_batch if attention_mask is None else {"attention_mask": attention_mask}
        try:
            run.note_step(step, epoch, loss, grad_norm, learning_rate, skip_wandb, batch, lengths, more)
            if run.is_off:
                self._run = None
        except Exception as error:
            self._failed("log_step", error)
        self._own_seconds += self._clock() - entered

    def step(
        self,
        batch: Any = None,
        *,
        step: int | None = None,
        epoch: float | None = None,
        lengths: Sequence[int] | None = None,
    ) -> Step:
        """One optimizer step as a context: `with monitor.step(batch) as step: ... step.log(loss=loss, lr=lr)`.

        Args:
            batch: What the model is given, which has just arrived; leave it out and call `step.micro_batch(batch)` with
                accumulation.
            step: The step's number; counted on from the last one without it.
            epoch: Where the training is.
            lengths: Lengths of the documents in the batch, where it does not contain them.
        """
        last = self._run.last_step if self._run is not None else None
        number = step if step is not None else (0 if last is None else last + 1)
        return Step(self, number, epoch, batch, lengths)

    def start_step(self) -> None:
        """The batch is there: the wait for it ends. `step(batch)` does this itself."""
        run = self._run
        if run is None:
            return
        try:
            run.step_clock.start_step()
            run.noter.begin_step()
        except Exception as error:
            self._failed("start_step", error)

    def _abandon_step(self) -> None:
        self._do("step", lambda run: run.abandon_step())

    def batches(self, loader: Iterable[Batch]) -> Iterable[Batch]:
        """The loader's batches, timed: `for batch in monitor.batches(loader)`. Makes input wait exact in any loop.

        It does not matter whether the loop is around `step()` or inside it. Batches are still given to `step(batch)`,
        `micro_batch` or `log_step`.
        """
        return loader if self._run is None else TimedBatches(loader, self)

    @contextmanager
    def input_wait(self) -> Iterator[None]:
        """Time in which a batch is fetched: `with monitor.input_wait(): x, y = get_batch("train")`."""
        is_timed = self.begin_wait()
        try:
            yield
        finally:
            if is_timed:
                self.end_wait()

    def begin_wait(self) -> bool:
        """A batch is being fetched. False when that is not timed: in a phase, or in another thread."""
        if self._run is None:
            return False
        try:
            return self._run.step_clock.begin_wait()
        except Exception as error:
            self._failed("begin_wait", error)
            return False

    def end_wait(self, *, has_batch: bool = True) -> None:
        """The fetching has ended, with a batch or without. After a `begin_wait` that has returned True."""
        if self._run is None:
            return
        try:
            self._run.step_clock.end_wait(has_batch=has_batch)
        except Exception as error:
            self._failed("end_wait", error)

    def end_micro_batch(self) -> None:
        """The work on a micro-batch has ended, and the loop goes for the next one; before the next `start_step`."""
        self._do("end_micro_batch", lambda run: run.step_clock.end_micro_batch(), is_own_work=False)

    def micro_batch(self, batch: Any, lengths: Sequence[int] | None = None) -> None:
        """One of the batches of the step under way, for gradient accumulation."""
        self._do("micro_batch", lambda run: run.take_micro_batch(batch, lengths))

    def pause(self) -> AbstractContextManager[None]:
        """Time that belongs to no step: `with monitor.pause(): ...`."""
        return self.phase("pause")

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time outside training: `with monitor.phase("eval"): ...`; `eval` and `checkpoint` have their own metrics."""
        if self._run is None:
            yield
            return
        with self._run.phase(name):
            yield

    def spent_on(self, name: str) -> None:
        """Book the time since the last step's end (or last booking) to a phase, where only its end is seen."""
        self._do("spent_on", lambda run: run.spent_on(name), is_own_work=False)

    def set_phase(self, name: str) -> None:
        """The training's phase, such as `warmup`, `main`, `finetune`: decides how often FLOPs are counted.

        The frequencies stand in `phase_frequencies` of the configuration; a name that is not there uses
        `flops_profile_freq`.
        """
        frequency = self.config.phase_frequencies.get(name, self.config.flops_profile_freq)
        self._do("set_phase", lambda run: run.costs.set_check_every(frequency))

    def log_datasets(
        self,
        names: Sequence[str],
        losses: torch.Tensor | None = None,
        logits: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
    ) -> None:
        """Loss and accuracy per dataset of a mixed batch, summed on the device.

        Args:
            names: The dataset of each sample.
            losses: The loss of each sample.
            logits: Scores, classes last; with `labels` they give the accuracy.
            labels: The right classes; -100 is left out.
        """
        if self._run is None or not self.config.log_dataset_metrics:
            return
        coming = 0 if self._run.last_step is None else self._run.last_step + 1
        if coming % self.config.dataset_metrics_every == 0:
            self._do("log_datasets", lambda run: run.datasets.add(names, losses, logits, labels))

    def log_now(
        self, *, loss: Any = None, grad_norm: Any = None, learning_rate: Any = None, wait: bool = False
    ) -> dict[str, Number]:
        """Close the logging window now; returns the newest row's values, all of them, for a logger of your own.

        Args:
            loss: Of the window, where it is known only now: logged with its last step.
            grad_norm: The same.
            learning_rate: The same.
            wait: True waits for the device, so that the values are those of this window; without it, they are those
                of the newest window that has arrived.
        """
        wait_seconds = DEVICE_SECONDS if wait else 0.0
        self._do("log_now", lambda run: run.add_to_last_step(loss, grad_norm, learning_rate))
        self._do("log_now", lambda run: run.close_window(now=True, wait_seconds=wait_seconds))
        return self.latest

    @property
    def latest(self) -> dict[str, Number]:
        """All values of the newest row; empty before the first."""
        return {} if self._started_run is None else dict(self._started_run.rows.latest)

    def capture_trace(self, steps: int = 3) -> None:
        """Record the next steps with torch's profiler into `traces/` of the run's folder, for ui.perfetto.dev."""
        self._do("capture_trace", lambda run: run.trace.ask(steps))

    def says_what_was_not_given(self, says: bool) -> None:
        """Whether a missing model or missing batches give a notice; off where a framework provides them."""
        self._do("says_what_was_not_given", lambda run: run.set_looks_for_gaps(says))

    def set_model(self, model: nn.Module) -> None:
        """The model that is trained, where it was not there when the monitor was made."""
        self._do("set_model", lambda run: run.set_model(model))

    @property
    def model_ref(self) -> nn.Module | None:
        """The model; can be assigned."""
        return None if self._run is None else self._run.costs.model

    @model_ref.setter
    def model_ref(self, model: nn.Module) -> None:
        self.set_model(model)

    @property
    def own_seconds(self) -> float:
        """Seconds the training thread has spent in the monitor, the counting of FLOPs not included."""
        return 0.0 if self._started_run is None else self._own_seconds - self._started_run.count_seconds

    @property
    def count_seconds(self) -> float:
        """Seconds the training thread has spent counting FLOPs; not in any step's time."""
        return 0.0 if self._started_run is None else self._started_run.count_seconds

    @property
    def thread_cpu_seconds(self) -> float:
        """CPU seconds of the threads of sinks and ranks."""
        run = self._started_run
        return 0.0 if run is None else run.outlets.cpu_seconds + run.ranks.cpu_seconds

    def state_dict(self) -> dict[str, Any]:
        """The totals up to the last step, for a checkpoint."""
        state: dict[str, Any] = {}
        self._do("state_dict", lambda run: state.update(run.state()))
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the totals of a checkpoint; call it before the first step."""
        if state:
            self._do("load_state_dict", lambda run: run.load(state))

    def close(self) -> None:
        """Write what is left, end the sinks. Waits for slow ones and for the other ranks, but not for ever."""
        self._close(sys.exc_info()[1])

    def _close(self, error: BaseException | None, *, is_of_this_run: bool = True) -> None:
        run = self._run
        if run is None:
            return
        try:
            ended_by = _named(error) if is_of_this_run else None
            summary = run.close(after_error=error is not None, ended_by=ended_by)
            self.summary = summary if run.ranks.is_logging else None
        except Exception as failure:
            self._failed("close", failure)
        self._run = None

    def __enter__(self) -> "TrainingMonitor":
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, *__: object) -> None:
        self._close(error)

    def __repr__(self) -> str:
        return f"TrainingMonitor({str(self.output_dir)!r}: {self._words()})"

    def _words(self) -> str:
        if self._started_run is None:
            return "switched off by FLOPWATCH_DISABLE"
        if self._started_run.last_step is None:
            return "no step yet" if self._run is not None else "closed before the first step"
        values = self._started_run.rows.latest
        shown = [("loss", "training/loss", ".4g"), ("MFU", "perf/mfu_percent", ".3g")]
        parts = [f"{name} {values[key]:{form}}" for name, key, form in shown if key in values]
        percent = " %" if "perf/mfu_percent" in values else ""
        closed = "" if self._run is not None else ", closed"
        return ", ".join([f"step {self._started_run.last_step:,}", *parts]) + percent + closed

    def _do(self, part: str, action: Callable[[MonitoredRun], None], *, is_own_work: bool = True) -> None:
        """Run one part of the monitor so that it cannot harm the training; its own work is no waiting for a batch."""
        run = self._run
        if run is None:
            return
        entered = self._clock()
        try:
            began = run.step_clock.begin_own_work() if is_own_work else None
            action(run)
            run.step_clock.end_own_work(began)
        except Exception as error:
            self._failed(part, error)
        self._own_seconds += self._clock() - entered

    def _failed(self, part: str, error: Exception) -> None:
        if self._run is not None:
            self._run.failed(part, error)


def _as_list(sinks: Sequence[str | Sink] | str | Sink | None) -> Sequence[str | Sink]:
    """One sink is a list of one: the letters of its name are none."""
    if sinks is None:
        return ()
    return sinks if isinstance(sinks, Sequence) and not isinstance(sinks, str) else [sinks]


def _close_forgotten(reference: "weakref.ref[TrainingMonitor]") -> None:
    monitor = reference()
    if monitor is not None:
        error = getattr(sys, "last_value", None)  # an exception ends the process
        # In a notebook or a shell it is the last one of any cell or line, and ended none of them.
        monitor._close(error, is_of_this_run=not (hasattr(sys, "ps1") or "ipykernel" in sys.modules))


def _named(error: BaseException | None) -> str | None:
    """The exception in one line; None without one, and for an exit that is no failure."""
    if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
        return None
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    line = first_line(error)
    return name if line == kind.__name__ else f"{name}: {line}"
