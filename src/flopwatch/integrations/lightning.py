"""A callback for Lightning's `Trainer`, from the package `lightning` or `pytorch_lightning`."""

import copy
import inspect
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from flopwatch.integrations.callback_parts import MonitorOwner, Selection, harmless
from flopwatch.integrations.fabric import autocast_dtype
from flopwatch.library_internals import lightning_logs_this_step, lightning_row_writer
from flopwatch.monitor.training_monitor import act_on_run
from flopwatch.optional import require


def _lightning() -> ModuleType:
    """The module `lightning.pytorch` or `pytorch_lightning`: the one that is loaded, else the one that is installed."""
    names = ("lightning.pytorch", "pytorch_lightning")
    loaded = [name for name in names if name in sys.modules]
    installed = [name for name in names if find_spec(name.partition(".")[0])]
    return require((loaded or installed or names)[0], "lightning")


_FETCH = ".train_dataloader_next"
"""Lightning's profiler action for fetching a training batch has a name that ends like this."""


class FlopwatchCallback(MonitorOwner, _lightning().Callback):  # type: ignore[misc]
    """Sends exact MFU, tokens and rates to the loggers of a Lightning `Trainer`, and writes a local log.

    Pass it as `Trainer(..., callbacks=[FlopwatchCallback()])`. Every `log_every_n_steps` the numbers go to all loggers
    of the `Trainer`, in the same row as the module's values of that step. Validation and saving are not part of the
    step time. A run resumed from a checkpoint continues its totals.

    FLOPs are counted for the module's `forward` with the batch; a batch `(x, y)` is cut to the parts that `forward`
    takes. If the module has no `forward`, or its batches are dicts, and one child such as `self.model` has all
    parameters, the `forward` of that child is counted. `training_step` is not called for counting, because it logs.

    Args:
        output_dir: The run's folder; by default `flopwatch` in the `Trainer`'s `log_dir`.
        model: Module to count, or its name in the `LightningModule`, such as `"model"`; by default it is searched for.
        metrics: `basic` adds the basic metrics to the loggers' rows, `all` adds all, `none` adds none.
        monitor_options: As for `flopwatch.TrainingMonitor`, such as `mode=`, `sinks=`, `flops_fn=`.

    Example:
        >>> callback = FlopwatchCallback(peak_flops_per_s=989e12)
        >>> callback.monitor is None  # until a training begins; `callback.monitor.summary` exists when it has ended
        True

    Attributes:
        monitor: The monitor of the current training, or of the last one.
        strict: True raises errors of the callback; False logs the first error of each method.
    """

    def __init__(
        self,
        output_dir: str | Path | None = None,
        *,
        model: nn.Module | str | None = None,
        metrics: Selection = "basic",
        **monitor_options: Any,
    ) -> None:
        super().__init__(output_dir, metrics, monitor_options)
        self._wanted_model = model
        self._counted: nn.Module | None = None
        self._has_looked_for_model = False
        self._phases = ExitStack()
        self._totals: dict[str, Any] = {}
        self._loss: Any = None
        self._learning_rate: Any = None
        self._steps_done = 0
        self._is_fetching = False
        self._is_row_due = self._has_own_rows = False
        """Whether Lightning is about to log a row of the step that has ended; whether our values get another row."""

    @harmless
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.end()
        self._loss = self._learning_rate = None
        self._has_looked_for_model = False
        self._steps_done = trainer.global_step
        folder, is_new = _log_folder(trainer), trainer.global_step == 0
        # With one step more, the monitor never logs before Lightning. With several ranks, windows end where it logs.
        every = trainer.log_every_n_steps or None
        if every is not None and trainer.world_size == 1:
            every += 1
        dtype = autocast_dtype(trainer.precision)
        monitor = self._begin(folder, trainer.max_steps, every, is_new=is_new, dtype=dtype)
        if self._totals.get("step") == trainer.global_step - 1:
            monitor.load_state_dict(self._totals)
        self._replace(trainer, "save_checkpoint", self._save)
        writer = lightning_row_writer(trainer)
        self._has_own_rows = writer is None
        if writer is not None:
            self._replace(writer, "log_metrics", partial(self._log_metrics, trainer))
        # Lightning calls `start` and `stop` of its profiler around each fetch of a batch, even without profiling.
        self._replace(trainer.profiler, "start", self._before_fetch)
        self._replace(trainer.profiler, "stop", self._after_fetch)

    @harmless
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self.monitor is None:
            return
        if not self._has_looked_for_model:
            self._has_looked_for_model = True
            self._look_for_model(pl_module, batch)
        self.monitor.start_step()
        self.monitor.micro_batch(batch)

    @harmless
    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self._learning_rate = optimizer.param_groups[0]["lr"]
        if self.monitor is not None:  # Lightning runs forward and backward pass inside of the optimizer's step
            act_on_run(self.monitor, "optimizer", lambda run: run.tape.optimizer_begins(id(optimizer)))

    @harmless
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.monitor is None:
            return
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else None
        if loss is not None:
            # Lightning divides the loss of a micro-batch by the number of micro-batches, so the sum is the mean.
            self._loss = loss if self._loss is None else self._loss + loss
        if trainer.global_step == self._steps_done:
            self.monitor.end_micro_batch()  # gradients are still being accumulated
            return
        self._steps_done = trainer.global_step
        # Lightning's loggers count steps from 0, `global_step` counts from 1.
        values = {"loss": self._loss, "learning_rate": self._learning_rate}
        self.monitor.log_step(trainer.global_step - 1, trainer.current_epoch, **values)
        self._loss = self._learning_rate = None
        self._is_row_due = lightning_logs_this_step(trainer)
        if self._is_row_due and self._has_own_rows:
            values = self._end_window(wait=False)
            for logger in trainer.loggers if values else ():
                logger.log_metrics(values, self._steps_done - 1)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._enter(self._phases, "eval")

    @harmless
    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._phases.close()

    @harmless
    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.end()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.end()

    def state_dict(self) -> dict[str, Any]:
        self._note_totals()
        return self._totals

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._totals = state_dict

    @harmless
    def _note_totals(self) -> None:
        if self._put_back and self.monitor is not None:
            self._totals = self.monitor.state_dict()

    @harmless
    def end(self) -> None:
        self._note_totals()  # because Lightning saves some checkpoints after this
        self._phases.close()
        super().end()
        self._counted = None

    def _before_fetch(self, start: Callable[..., Any], action_name: str, *args: Any, **kwargs: Any) -> Any:
        started = start(action_name, *args, **kwargs)
        if action_name.endswith(_FETCH):
            self._is_fetching = self.begin_wait()
        return started

    def _after_fetch(self, stop: Callable[..., Any], action_name: str, *args: Any, **kwargs: Any) -> Any:
        if action_name.endswith(_FETCH) and self._is_fetching:
            self._is_fetching = False
            self.end_wait()
        return stop(action_name, *args, **kwargs)

    def _log_metrics(
        self, trainer: Any, log_metrics: Callable[..., Any], metrics: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Add our values to the row of Lightning's loggers. With `log_dict` they would reach the callbacks too."""
        is_due, self._is_row_due = self._is_row_due, False
        added = (self._row(trainer, metrics) or {}) if is_due else {}
        logged = log_metrics({**metrics, **added}, *args, **kwargs)
        for key in added:
            trainer.logged_metrics.pop(key, None)  # the script reads this dict, and expects only tensors in it
        return logged

    @harmless
    def _row(self, trainer: Any, metrics: Mapping[str, Any]) -> dict[str, float]:
        # If there are tensors, Lightning reads them from the device now, so that waiting for it takes no time.
        return self._end_window(wait=any(isinstance(value, torch.Tensor) for value in metrics.values()))

    def _save(self, save_checkpoint: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as phase:
            self._enter(phase, "checkpoint")
            return save_checkpoint(*args, **kwargs)

    @harmless
    def _enter(self, stack: ExitStack, phase: str) -> None:
        if self.monitor is not None:
            stack.enter_context(self.monitor.phase(phase))

    @harmless
    def _look_for_model(self, pl_module: Any, batch: Any) -> None:
        wanted = self._wanted_model
        named = pl_module.get_submodule(wanted) if isinstance(wanted, str) else wanted
        self._counted = named or find_model(pl_module, batch)
        if self.monitor is not None:
            self.monitor.set_model(self._counted)


class AutomaticCallback(FlopwatchCallback):
    """The callback of `flopwatch run`, which does nothing if the script has added a callback of its own."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if self._is_alone(trainer.callbacks, FlopwatchCallback):
            super().on_train_start(trainer, pl_module)


def _log_folder(trainer: Any) -> str | Path:
    """The folder `trainer.log_dir`. Reading that itself waits for all ranks, forever if one has no callback."""
    logger = next(iter(trainer.loggers), None)
    return getattr(logger, "log_dir", None) or getattr(logger, "save_dir", None) or Path(trainer.default_root_dir)


def find_model(pl_module: nn.Module, batch: Any) -> nn.Module:
    """The module that is trained: the `LightningModule`, or a child with all parameters if it has no `forward`."""
    everything = {id(parameter) for parameter in pl_module.parameters()}
    children = list(pl_module.children())
    whole = next((child for child in children if {id(p) for p in child.parameters()} == everything), None)
    forward_package = type(pl_module).forward.__module__.partition(".")[0]
    has_forward = forward_package not in ("lightning", "pytorch_lightning", "torch")
    kinds = {parameter.kind for parameter in inspect.signature(type(pl_module).forward).parameters.values()}
    takes_anything = isinstance(batch, Mapping) or inspect.Parameter.VAR_POSITIONAL in kinds
    if has_forward and not (whole is not None and takes_anything):
        return _uncompiled(pl_module)
    return pl_module if whole is None else whole


def _uncompiled(module: nn.Module) -> nn.Module:
    """The module, or, if this instance has a compiled `forward`, a copy of it that uses the `forward` of its class."""
    if "forward" not in vars(module):
        return module
    plain = copy.copy(module)
    del vars(plain)["forward"]
    return plain
