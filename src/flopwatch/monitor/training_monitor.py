"""`TrainingMonitor`, the class that a user adds to a training loop."""

import atexit
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flopwatch.clock import Clock, monotonic_seconds
from flopwatch.errors import InputError
from flopwatch.guard import Guard, caught
from flopwatch.monitor.config import MonitorConfig, read_config, refuse_problems
from flopwatch.monitor.environment import rank_and_world_size
from flopwatch.monitor.run import DEVICE_SECONDS, MonitoredRun
from flopwatch.monitor.timing.hooks import Batch, TimedBatches
from flopwatch.monitor.timing.tape import OWN_END
from flopwatch.present.notebook import html_table
from flopwatch.process import is_switched_off
from flopwatch.random_state import same_random_states
from flopwatch.records.run import Number, Summary
from flopwatch.sinks.protocol import Sink
from flopwatch.text import first_line

_NOTHING_MORE: dict[str, Any] = {}


class Step:
    """The context of one optimizer step. The step is logged when the context ends, unless an exception ended it."""

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
        """Log values of this step; tensors are read later. Can be called several times."""
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
        """Add one of this step's batches, for gradient accumulation.

        The step's input wait is known only if the batches come from `monitor.batches(loader)`.
        """
        self._monitor.micro_batch(batch, lengths)

    def __enter__(self) -> "Step":
        self._monitor._start_step(self._batch is not None, self._batch)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        monitor = self._monitor
        run = monitor._run
        batch, self._batch = self._batch, None  # the loop may keep this object longer than its batch
        if kind is not None:
            monitor._do("step", lambda run: run.recorder.abandon_step())
        elif self._more or batch is None or run is None or not monitor._logs_steps_itself:
            monitor.log_step(self.number, batch=batch, lengths=self._lengths, **self._values())
        else:  # the same as `log_step`, without the cost of another call with keyword arguments
            monitor._end_step(
                run, self.number, self._epoch, self._loss, self._grad_norm, self._lr, False,
                batch, self._lengths, _NOTHING_MORE,
            )  # fmt: skip

    def _values(self) -> dict[str, Any]:
        known = {"epoch": self._epoch, "loss": self._loss, "grad_norm": self._grad_norm, "learning_rate": self._lr}
        return {**known, **(self._more or {})}


class TrainingMonitor:
    """Measures exact MFU, HFU and rates of a training, and writes them to a local log and to the sinks you choose.

    On an ordinary step `log_step` keeps a few numbers and returns: it does not read from the device, write or send.
    Every `log_every` steps, the steps of this window become one row. If a part of the monitor fails, it is reported
    once and switched off, and the training goes on.

    Args:
        output_dir: The run's folder. A run that is resumed in the same folder continues its log and totals.
        config: A YAML file or a dict, which may be a whole training configuration; see `docs/monitoring.md`.
        log_file: Name of the local log in `output_dir`, in JSON Lines.
        flops_profile_freq: Steps between two counts in mode `profiler`.
        model: The model that is trained, wrapped or not. Without it there are rates but no FLOPs.
        mode: `smart` counts some of the steps as they run, and knows from them what the others cost; `estimate` never
            counts; `profiler` counts at least every `flops_profile_freq` steps; `hybrid` does the same, and reads the
            hardware counters of the device beside it.
        sinks: One or several of `console`, `tensorboard`, `wandb`, `mlflow`, `prometheus`, `module:Class`, or objects
            with the methods of `flopwatch.sinks.protocol.Sink`.
        attention: `full` counts every pair of positions in attention, `causal` only pairs that are not masked.
        flops_fn: Returns the model FLOPs of a batch; used instead of counting.
        peak_flops_per_s: Dense peak of one device; needed if flopwatch does not know the device.
        dtype: Compute type whose peak is used for MFU; by default the type in which the model computes.
        log_every: Steps per row.
        total_steps: Planned steps, for progress and time left.
        preset: A set of defaults: `production`, `research`, `prototype` or `complex`.
        logging_rank: The rank that writes the log and the sinks for all ranks; -1 is the last one.
        data_parallel_size: Number of different batches per step, if ranks share batches (tensor, context or pipeline
            parallel). Tensor parallelism with DTensor is found without it.
        strict: True raises errors of the monitor instead of reporting them once.
        quiet: True prints nothing. By default the run's folder, a line per window and the summary go to stderr, unless
            `sinks` has `console`.
        clock: A monotonic clock in seconds; for tests.

    Example:
        >>> import tempfile, torch
        >>> model = torch.nn.Linear(8, 8)
        >>> with TrainingMonitor(tempfile.mkdtemp(), model=model, quiet=True) as monitor:
        ...     for batch in torch.randn(3, 4, 8):
        ...         with monitor.step(batch) as step:
        ...             loss = model(batch).sum()
        ...             loss.backward()
        ...             step.log(loss=loss)
        >>> monitor.summary.values["total/model_flops"]  # 3 x 4 samples x 2 x 8 x 8, forward and weight gradient
        3072
    """

    @same_random_states()
    def __init__(  # noqa: PLR0913 - public
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
        flops_fn: Callable[[Any], int] | None = None,
        peak_flops_per_s: float | None = None,
        dtype: str | torch.dtype | None = None,
        log_every: int | None = None,
        total_steps: int | None = None,
        preset: str | None = None,
        logging_rank: int | None = None,
        data_parallel_size: int | None = None,
        strict: bool | None = None,
        quiet: bool | None = None,
        clock: Clock = monotonic_seconds,
    ) -> None:
        if not isinstance(output_dir, str | os.PathLike):
            raise InputError(
                f"output_dir must be the path of a folder, got {type(output_dir).__name__}; "
                'write TrainingMonitor("outputs", model=model)'
            )
        wanted_sinks: Sequence[str | Sink] = ()
        if sinks is not None:
            wanted_sinks = sinks if isinstance(sinks, Sequence) and not isinstance(sinks, str) else [sinks]
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
            quiet=quiet,
            sinks=None if sinks is None else tuple(sink for sink in wanted_sinks if isinstance(sink, str)),
        )
        if self.config.strict:
            refuse_problems(problems)
        self.output_dir = Path(output_dir)
        self.log_path = self.output_dir / log_file
        self.summary: Summary | None = None
        self._clock = clock
        self._logs_steps_itself = type(self).log_step is TrainingMonitor.log_step
        """False if a subclass overrides `log_step`: every step must then go through that method."""
        self._run: MonitoredRun | None = None
        """The run; None if the monitor is disabled or closed."""
        self._started_run: MonitoredRun | None = None
        """The run, even after it was closed; None if the monitor is disabled."""
        self._own_seconds = 0.0
        self._exit: SystemExit | None = None
        self._guard = Guard("log_step", self._failed)
        """Catches errors of calls that are made on every step."""
        if is_switched_off():
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
            flops_fn=flops_fn,
            peak_flops_per_s=peak_flops_per_s,
        )
        self._started_run = self._run
        _open_monitors.add(self)
        for problem in problems:
            message = f"a setting of the monitor's configuration is not used: {problem}"
            self._run.outlets.notify("warning", f"configuration:{problem}", message)
        if model is not None:
            self.set_model(model)
        atexit.register(_close_forgotten, weakref.ref(self))

    def log_step(  # noqa: PLR0913 - public
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
        """Log an optimizer step that has just ended.

        Args:
            step: The step's number.
            epoch: The current epoch, which can be a fraction.
            loss: A number or a tensor; tensors are read later, when the window ends.
            grad_norm: A number or a tensor.
            learning_rate: A number or a tensor.
            attention_mask: Mask of the batch, if `batch` is not given; shows which tokens are padding.
            skip_wandb: A window is not sent to W&B if this is True for all of its steps.
            batch: What the model was given. Shapes, mask, labels, packed lengths and image grids are taken from it
                without waiting for the device. With gradient accumulation, pass each batch to `micro_batch` instead.
            lengths: Lengths of the documents in a packed batch, if the batch does not contain them.
            more: Your own metrics, logged as `training/<name>`.
        """
        run = self._run
        if run is None:
            return
        if batch is None and not run.recorder.has_batches:
            batch = run.recorder.assumed_batch if attention_mask is None else {"attention_mask": attention_mask}
        self._end_step(run, step, epoch, loss, grad_norm, learning_rate, skip_wandb, batch, lengths, more)

    def _end_step(self, run: MonitoredRun, *step: Any) -> None:
        entered = self._clock()
        try:  # on the step's path, a `Guard` would cost two more calls
            run.note_step(*step)
            if run.ranks.is_off:
                run.device_counters.close()
                self._run = None
        except Exception as error:  # noqa: BLE001 - the border to the training
            caught("log_step", error)
            run.failed("log_step", error)
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
            batch: What the model will be given. With gradient accumulation leave it out, and call
                `step.micro_batch(batch)` for each batch.
            step: The step's number; by default the number after the last step.
            epoch: The current epoch, which can be a fraction.
            lengths: Lengths of the documents in a packed batch, if the batch does not contain them.
        """
        last = self._run.recorder.last_step if self._run is not None else None
        number = step if step is not None else (0 if last is None else last + 1)
        return Step(self, number, epoch, batch, lengths)

    def start_step(self) -> None:
        """Begin a step whose batch has arrived; needed only without `step(batch)`, which calls it."""
        self._start_step(True, None)

    def _start_step(self, has_batch: bool, batch: Any) -> None:
        run = self._run
        if run is not None:
            try:
                run.tape.start_step(has_batch)
                run.counter.begin_step(batch)
            except Exception as error:  # noqa: BLE001 - the border to the training
                caught("start_step", error)
                run.failed("start_step", error)

    def batches(self, loader: Iterable[Batch]) -> Iterable[Batch]:
        """Time how long the loader takes for each batch: `for batch in monitor.batches(loader)`.

        This makes the input wait exact, both for a loop around `step()` and for one inside it. Each batch must still
        be passed to `step(batch)`, `micro_batch` or `log_step`.
        """
        return loader if self._run is None else TimedBatches(loader, self)

    @contextmanager
    def input_wait(self) -> Iterator[None]:
        """A context that times how a batch is fetched: `with monitor.input_wait(): x, y = get_batch("train")`."""
        is_timed = self.begin_wait()
        try:
            yield
        finally:
            if is_timed:
                self.end_wait()

    def begin_wait(self) -> bool:
        """Begin to time a fetch of a batch. Returns False if it is not timed: in an evaluation or another thread."""
        if self._run is not None:
            with self._guard:
                return self._run.tape.begin_wait()
        return False

    def end_wait(self, *, has_batch: bool = True) -> None:
        """End a fetch for which `begin_wait` has returned True; `has_batch` is False if no batch was left."""
        if self._run is not None:
            with self._guard:
                self._run.tape.end_wait(has_batch=has_batch)

    def end_micro_batch(self) -> None:
        """End the work on a micro-batch; the time until the next `start_step` counts as input wait."""
        self._do("end_micro_batch", lambda run: run.tape.end_micro_batch(), is_own_work=False)

    def micro_batch(self, batch: Any, lengths: Sequence[int] | None = None) -> None:
        """Add a batch to the current step, for gradient accumulation."""
        self._do("micro_batch", lambda run: run.take_micro_batch(batch, lengths))

    def pause(self) -> AbstractContextManager[None]:
        """A context whose time belongs to no step: `with monitor.pause(): ...`."""
        return self.phase("pause")

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A context for work outside steps: `with monitor.phase("eval"): ...`.

        `eval` and `checkpoint` have their own metrics. The time of a phase with any other name counts as a pause.
        """
        if self._run is None:
            yield
            return
        with self._run.phase(name):
            yield

    def spent_on(self, name: str) -> None:
        """Add the time since the last step, or the last call of this method if that is later, to the phase `name`."""
        self._do("spent_on", lambda run: run.spent_on(name), is_own_work=False)

    def set_phase(self, name: str) -> None:
        """Set the training's phase, such as `warmup`, `main` or `finetune`, which decides how often FLOPs are counted.

        The setting `phase_frequencies` has a frequency for each phase; phases that it lacks use `flops_profile_freq`.
        """
        frequency = self.config.phase_frequencies.get(name, self.config.flops_profile_freq)
        self._do("set_phase", lambda run: run.counter.count_every(frequency))

    def log_datasets(
        self,
        names: Sequence[str],
        losses: torch.Tensor | None = None,
        logits: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
    ) -> None:
        """Log loss and accuracy by dataset for a batch that mixes datasets; the sums stay on the device.

        Args:
            names: The dataset's name for each sample.
            losses: The loss of each sample.
            logits: Scores with classes in the last dimension; needed with `labels` for the accuracy.
            labels: The correct classes; -100 is left out.
        """
        if self._run is None or not self.config.log_dataset_metrics:
            return
        last = self._run.recorder.last_step
        coming = 0 if last is None else last + 1
        if coming % self.config.dataset_metrics_every == 0:
            self._do("log_datasets", lambda run: run.arrivals.datasets.add(names, losses, logits, labels))

    def log_now(
        self, *, loss: Any = None, grad_norm: Any = None, learning_rate: Any = None, wait: bool = False
    ) -> dict[str, Number]:
        """End the logging window now, and return all values of the newest row.

        Args:
            loss: The window's loss, if it was not known before; logged with the last step.
            grad_norm: The window's gradient norm.
            learning_rate: The window's learning rate.
            wait: True waits for the device, so that the returned values are those of this window. Otherwise they may
                be those of an earlier window.
        """
        wait_seconds = DEVICE_SECONDS if wait else 0.0
        self._do("log_now", lambda run: run.add_to_last_step(loss, grad_norm, learning_rate))
        self._do("log_now", lambda run: run.close_window(now=True, wait_seconds=wait_seconds))
        return self.latest

    @property
    def latest(self) -> dict[str, Number]:
        """All values of the newest row; empty before the first row."""
        return {} if self._started_run is None else dict(self._started_run.rows.newest.values)

    def capture_trace(self, steps: int = 3) -> None:
        """Record the next steps with torch's profiler into `traces/` of the run's folder, for ui.perfetto.dev.

        Every rank that calls it writes a file of its own. From another process, `flopwatch trace` asks for the same.
        """
        self._do("capture_trace", lambda run: run.trace.ask(steps))

    def says_what_was_not_given(self, says: bool) -> None:
        """Set whether a missing model or batch is reported. Integrations that pass them later switch the report off."""
        self._do("says_what_was_not_given", lambda run: setattr(run.recorder, "tells_missing", says))

    def set_model(self, model: nn.Module) -> None:
        """Set the model that is trained, if it did not exist when the monitor was created."""
        self._do("set_model", lambda run: run.set_model(model))

    @property
    def model_ref(self) -> nn.Module | None:
        """The model that is trained; can be assigned."""
        return None if self._run is None else self._run.counter.model

    @model_ref.setter
    def model_ref(self, model: nn.Module) -> None:
        self.set_model(model)

    @property
    def own_seconds(self) -> float:
        """Seconds that the training's thread has spent in the monitor, except for the time spent counting FLOPs."""
        return 0.0 if self._started_run is None else self._own_seconds - self._started_run.arrivals.count_seconds

    @property
    def count_seconds(self) -> float:
        """Seconds that the training's thread has spent counting FLOPs; they are not part of any step's time."""
        return 0.0 if self._started_run is None else self._started_run.arrivals.count_seconds

    @property
    def thread_cpu_seconds(self) -> float:
        """CPU seconds of the monitor's own threads, which write to sinks and exchange reports between ranks."""
        run = self._started_run
        return 0.0 if run is None else run.outlets.cpu_seconds + run.ranks.cpu_seconds

    def state_dict(self) -> dict[str, Any]:
        """Return the totals up to the last step, for a checkpoint."""
        state: dict[str, Any] = {}
        self._do("state_dict", lambda run: state.update(run.state()))
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the totals of a checkpoint; call it before the first step."""
        if state:
            self._do("load_state_dict", lambda run: run.load(state))

    def close(self) -> None:
        """End the run: write the last rows and the summary, and close the sinks.

        Waits for slow sinks and for the other ranks, but only for a limited time.
        """
        self._close(sys.exc_info()[1])

    def _close(self, error: BaseException | None, *, is_of_this_run: bool = True) -> None:
        run = self._run
        if run is None:
            return
        with Guard("close", self._failed):
            ended_by = _named(error) if is_of_this_run else None
            summary = run.close(after_error=error is not None, ended_by=ended_by)
            self.summary = summary if run.ranks.is_logging else None
        self._run = None
        _open_monitors.discard(self)

    def __enter__(self) -> "TrainingMonitor":
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, *__: object) -> None:
        self._close(error)

    def __repr__(self) -> str:
        values = self.latest
        shown = [("loss", "training/loss", ".4g", ""), ("MFU", "perf/mfu_percent", ".3g", " %")]
        parts = [f"{name} {values[key]:{form}}{unit}" for name, key, form, unit in shown if key in values]
        return f"TrainingMonitor({str(self.output_dir)!r}: {', '.join([self._state(), *parts])})"

    @same_random_states()
    def _repr_html_(self) -> str:
        """What a notebook shows if the monitor is the last line of a cell: newest row or summary, and the waterfall."""
        from flopwatch.runs.advice import losses_in_pairs
        from flopwatch.runs.reading import read_log
        from flopwatch.sinks.console import summary_lines  # imports rich, which a training may not need

        summary, run = self.summary, self._started_run
        if summary is None and run is not None:
            summary = Summary(
                run.recorder.last_step, 0.0, self.latest, exact=run.rows.exactness.exact, notes=run.rows.exactness.notes
            )
        lines = [] if summary is None else summary_lines(summary)
        if lines:
            self._do("flush", lambda run: run.outlets.flush_log())
            with Guard("waterfall"):  # the log may be absent or damaged; the table is shown without it
                lines += losses_in_pairs(read_log(self.log_path))
        return html_table(f"{self.output_dir}: {self._state()}", lines)

    def _state(self) -> str:
        if self._started_run is None:
            return "switched off by FLOPWATCH_DISABLE"
        if self._started_run.recorder.last_step is None:
            return "no step yet" if self._run is not None else "closed before the first step"
        return f"{'' if self._run is not None else 'closed at '}step {self._started_run.recorder.last_step:,}"

    def _do(self, part: str, action: Callable[[MonitoredRun], None], *, is_own_work: bool = True) -> None:
        """Call `action`; report its errors as those of `part`. With `is_own_work`, its time is no input wait."""
        run = self._run
        if run is None:
            return
        entered = self._clock()
        is_timed = is_own_work and run.tape.begin_own_work()
        with Guard(part, self._failed):
            action(run)
        if is_timed:
            run.tape.add(OWN_END)
        self._own_seconds += self._clock() - entered

    def _failed(self, part: str, error: Exception) -> None:
        if self._run is not None:
            self._run.failed(part, error)


_open_monitors: "weakref.WeakSet[TrainingMonitor]" = weakref.WeakSet()


def act_on_run(monitor: TrainingMonitor, part: str, action: Callable[[MonitoredRun], None]) -> None:
    """Call `action` with the monitor's run, for code of flopwatch that drives a monitor; errors are reported once."""
    monitor._do(part, action)


def note_exit(monitor: TrainingMonitor, code: Any) -> None:
    """Note the code with which the script has called `sys.exit`, because Python does not keep this exception."""
    monitor._exit = SystemExit(code)


def newest_row(monitor: TrainingMonitor) -> tuple[int | None, dict[str, Number]]:
    """Last step and values of the newest row; None and nothing before the first row."""
    run = monitor._started_run
    return (None, {}) if run is None else (run.rows.newest.step, dict(run.rows.newest.values))


def open_monitors() -> "list[TrainingMonitor]":
    return list(_open_monitors)


def _close_forgotten(reference: "weakref.ref[TrainingMonitor]") -> None:
    monitor = reference()
    if monitor is not None:
        error = monitor._exit or getattr(sys, "last_value", None)
        # In a script, `error` has ended the process. In a notebook or shell, an earlier cell may have raised it.
        monitor._close(error, is_of_this_run=not (hasattr(sys, "ps1") or "ipykernel" in sys.modules))


def _named(error: BaseException | None) -> str | None:
    """Describe an exception in one line; None without an exception, and for `sys.exit` with code 0."""
    if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
        return None
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return f"exit status {error.code}"
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    line = first_line(error)
    return name if line == kind.__name__ else f"{name}: {line}"
