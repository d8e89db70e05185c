"""Records what a step ran on when it ends. On an ordinary step it does not read from the device, write or wait.

`OptimizerHooks` records when optimizers begin and end their step, by the hooks that torch offers for all optimizers.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from flopwatch.errors import InputError
from flopwatch.guard import Guard, caught
from flopwatch.monitor.arrival import RecordedStep, keep
from flopwatch.monitor.config import MonitorConfig
from flopwatch.monitor.counting.batch_reader import Reading
from flopwatch.monitor.counting.calls import failure_of
from flopwatch.monitor.counting.evidence import NOTHING
from flopwatch.monitor.counting.step_counter import StepCounter
from flopwatch.monitor.timing.tape import Tape

Flops = Callable[[Any], int]


class HasTape(Protocol):
    tape: Tape
    counter: StepCounter


class OptimizerHooks:
    """The hooks of one run. They do not keep the run alive, and they are constants for `torch.compile`."""

    def __init__(self, run: HasTape) -> None:
        self._run = weakref.ref(run)
        self._known: dict[int, tuple[weakref.ref[Any], bool]] = {}
        """By the id of an optimizer, whether it has parameters of the model."""
        self._has_seen_own = False
        self._handles = [
            register_optimizer_step_pre_hook(self._begins),
            register_optimizer_step_post_hook(self._ends),
        ]
        weakref.finalize(run, self.remove).atexit = False  # a run can be forgotten without being closed

    def remove(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _is_own(self, model: torch.nn.Module | None, optimizer: Any) -> bool:
        """Whether an optimizer is the model's, and not that of another model in the same process.

        Some libraries optimize copies of the parameters. An optimizer without any parameter of the model therefore
        counts as the model's until one with such parameters has been seen.
        """
        if model is None:
            return True
        known = self._known.get(id(optimizer))
        if known is None or known[0]() is not optimizer:
            shares = True
            with Guard("optimizers"):  # an optimizer of the user may have groups of another form
                own = set(map(id, model.parameters()))
                shares = any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"])
            known = self._known[id(optimizer)] = weakref.ref(optimizer), shares
            self._has_seen_own |= shares
        return known[1] or not self._has_seen_own

    def _begins(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # A closure runs forward and backward pass inside of the optimizer's step. Lightning's callback tells when they
        # are over; for other loops with a closure the optimizer's time is unknown.
        if torch.compiler.is_compiling():
            return
        run = self._run()
        if run is None:
            return
        run.counter.optimizer_begins(optimizer, args, kwargs)
        if (len(args) > 1 or kwargs) and any(callable(value) for value in (*args[1:], *kwargs.values())):
            run.tape.optimizer_is_untimed(id(optimizer))
        elif run.tape.times_parts:
            run.tape.optimizer_begins(id(optimizer), is_own=self._is_own(run.counter.model, optimizer))

    def _ends(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return
        run = self._run()
        if run is None:
            return
        run.counter.optimizer_ends()
        if run.tape.times_parts or not run.tape.is_working:
            run.tape.optimizer_ends(id(optimizer), is_own=self._is_own(run.counter.model, optimizer))


class Recorder:
    """Records the steps of the window that is open.

    Attributes:
        steps: The steps that no window has taken yet.
        last_step: Number of the newest step.
        began: Host time at which the window began.
        tells_missing: Whether a missing model or batch is still to be reported.
        assumed_batch: Batch of the size `batch_size` x `seq_length`, for steps that are logged without a batch.
    """

    def __init__(
        self,
        config: MonitorConfig,
        counter: StepCounter,
        hooks: OptimizerHooks,
        flops_fn: Flops | None,
        now: float,
        failed: Callable[[str, Exception], None],
    ) -> None:
        self.counter, self.hooks, self.flops_fn = counter, hooks, flops_fn
        self.steps: list[RecordedStep] = []
        self.last_step: int | None = None
        self.began = now
        self.assumed_batch: dict[str, torch.Tensor] | None = None
        if config.batch_size is not None and config.seq_length is not None:
            self.assumed_batch = {"attention_mask": torch.ones(config.batch_size, config.seq_length, dtype=torch.long)}
        self._readings: list[Reading] = []
        self._user_flops: int | None = None
        self.tells_missing = True
        self._failed = failed

    def record(  # noqa: PLR0913, PLR0917 - what `log_step` is given
        self,
        step: int,
        epoch: Any,
        loss: Any,
        grad_norm: Any,
        learning_rate: Any,
        skip_wandb: bool,
        batch: Any,
        lengths: Sequence[int] | None,
        more: Mapping[str, Any],
    ) -> None:
        """Record the step that has ended; if a part of it fails, without that part."""
        trace = NOTHING
        try:
            if batch is not None:
                error = failure_of(self.add_batch, batch, lengths)
                if error is not None:  # the ops of the step are counted all the same
                    self._failed("batch", error)
            trace = self.counter.end_step(self._readings, step)
        except Exception as error:  # noqa: BLE001 - the training goes on; a `Guard` would cost two more calls
            caught("flops", error)
            self._failed("flops", error)
        finally:
            recorded = RecordedStep(
                step,
                epoch if epoch is None or type(epoch) is int or type(epoch) is float else keep(epoch),
                None if loss is None else keep(loss),
                None if grad_norm is None else keep(grad_norm),
                learning_rate if type(learning_rate) is float else keep(learning_rate),
                self._readings,
                skip_wandb,
                {name: keep(value) for name, value in more.items()} if more else more,
                self._user_flops,
                trace,
            )
            self.steps.append(recorded)
            self._readings, self._user_flops = [], None
            self.last_step = step

    def take(self) -> list[RecordedStep]:
        steps, self.steps = self.steps, []
        return steps

    def add_batch(self, batch: Any, lengths: Sequence[int] | None) -> None:
        self.add_reading(self.counter.read(batch, lengths))
        if self.flops_fn is not None:
            self._user_flops = (self._user_flops or 0) + _checked_flops(self.flops_fn, batch)

    def add_reading(self, reading: Reading) -> None:
        self._readings.append(reading)

    @property
    def has_batches(self) -> bool:
        return bool(self._readings)

    def drop_batches(self) -> None:
        self._readings = []

    def abandon_step(self) -> None:
        self.counter.abandon_step()
        self._readings, self._user_flops = [], None

    def add_to_last_step(self, values: Mapping[str, Any]) -> bool:
        """Add values to the newest step; False if a window has taken it."""
        if self.steps:
            self.steps[-1] = self.steps[-1]._replace(**{name: keep(value) for name, value in values.items()})
        return bool(self.steps)


def _checked_flops(flops_fn: Flops, batch: Any) -> int:
    flops = flops_fn(batch)
    if isinstance(flops, bool) or not isinstance(flops, int | float) or not 0 < flops < float("inf"):
        raise InputError(f"flops_fn must return a positive finite number of FLOPs, got {flops!r}")
    return int(flops)
