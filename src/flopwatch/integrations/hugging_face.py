"""A callback for the Hugging Face `Trainer` and its subclasses, such as the trainers of TRL."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flopwatch.integrations.callback_parts import MonitorOwner, Selection, harmless
from flopwatch.library_internals import find_trainer, guarded_part
from flopwatch.monitor.timing.hooks import TimedIterator
from flopwatch.optional import require

_callbacks = require("transformers.trainer_callback", "hf")

_log = logging.getLogger("flopwatch")

_PRINTED = ("perf/mfu", "perf/tokens_per_second")
"""The metrics in the lines that the `Trainer` prints; trackers get more."""


class FlopwatchCallback(MonitorOwner, _callbacks.TrainerCallback, _callbacks.ExportableState):  # type: ignore[misc, name-defined]
    """Adds exact MFU, tokens and rates to the log rows of a `Trainer`, and writes a local log.

    Pass it as `Trainer(..., callbacks=[FlopwatchCallback()])` or with `trainer.add_callback(FlopwatchCallback())`. The
    numbers are in the same row as the loss, so W&B and TensorBoard show `train/perf/mfu` beside `train/loss`. Of these,
    the lines that the `Trainer` prints show MFU and tokens per second. The numbers are computed when the `Trainer`
    logs, every `logging_steps`. Evaluation and saving are not part of the step time. A run resumed from a checkpoint
    continues its totals.

    A `Trainer` passes neither the batch nor itself to its callbacks. So the callback finds the `Trainer` on the call
    stack and moves itself to the front of the `Trainer`'s callbacks. To read each batch, it replaces `training_step`
    on this one object until the training ends.

    Args:
        output_dir: The run's folder; by default `flopwatch` in the `Trainer`'s `output_dir`.
        metrics: `basic` adds the basic metrics to the `Trainer`'s rows, `all` adds all, `none` adds none.
        monitor_options: As for `flopwatch.TrainingMonitor`, such as `mode=`, `sinks=`, `peak_flops_per_s=`.

    Example:
        >>> callback = FlopwatchCallback(peak_flops_per_s=989e12)
        >>> callback.monitor is None  # until a training begins; `callback.monitor.summary` exists when it has ended
        True

    Attributes:
        monitor: The monitor of the current training, or of the last one.
        strict: True raises errors of the callback; False logs the first error of each method.
        totals: The totals that a checkpoint stores.
        lost_options: Names of options that were not stored in the checkpoint from which the `Trainer` has restored
            this callback (`restore_callback_states_from_checkpoint`).
    """

    def __init__(self, output_dir: str | Path | None = None, *, metrics: Selection = "basic", **monitor_options: Any):
        super().__init__(None if output_dir is None else str(output_dir), metrics, monitor_options)
        self._steps_to_log = 0
        self._added: dict[str, float] = {}
        """What we add to the row that the `Trainer` is logging."""
        self.totals: dict[str, Any] = {}
        self.lost_options: list[str] = []

    @harmless
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.end()  # closes the monitor of an earlier training that raised
        self._steps_to_log = 0
        # One step more than the Trainer's interval, so that the monitor never logs before the Trainer does. With
        # several ranks, whose first windows end before a multiple of it, the first one ends where the Trainer logs.
        logs_steps = args.logging_strategy == "steps" and state.logging_steps
        every = int(state.logging_steps) + 1 if logs_steps else None
        own = {"model": kwargs["model"], "dtype": "bf16" if args.bf16 else "fp16" if args.fp16 else None}
        is_new = state.global_step == 0
        monitor = self._begin(args.output_dir, state.max_steps, every, is_new=is_new, **own)
        saved = state.stateful_callbacks.get(type(self).__name__, {})
        saved = saved[0] if isinstance(saved, list) else saved
        totals = dict(saved.get("attributes", {}).get("totals", {}))
        if state.global_step > 0 and totals.get("step") == state.global_step:
            monitor.load_state_dict(totals)
        # The Trainer expects an entry for every stateful callback, but a checkpoint saved without this one has none.
        state.stateful_callbacks.setdefault(type(self).__name__, {})
        if self.lost_options:
            _log.warning(
                "flopwatch: these options could not be stored in the checkpoint and are back at their defaults: %s. "
                "To use the values that you pass to the callback, set restore_callback_states_from_checkpoint=False",
                ", ".join(self.lost_options),
            )
        trainer = find_trainer(self)
        if trainer is None:
            _log.warning(
                "flopwatch: the callback was not called by a Trainer, so tokens, FLOPs and MFU are unknown; in a "
                "training loop of your own, use flopwatch.TrainingMonitor"
            )
            return
        # To the front, so that values are added to a log row before W&B and TensorBoard get the row. The `Trainer` may
        # be iterating over the list. Callbacks behind this one keep their index, so each is called once.
        callbacks = trainer.callback_handler.callbacks
        callbacks.insert(0, callbacks.pop(next(i for i, each in enumerate(callbacks) if each is self)))
        for each in callbacks:
            if self._changes_rows_of(each):
                self._replace(each, "on_log", self._on_changed_log)
        self._replace(trainer, "training_step", self._step)
        if hasattr(trainer, "get_batch_samples"):
            self._replace(trainer, "get_batch_samples", self._fetch)
        self._replace(trainer, guarded_part(trainer), self._ending_on_error)

    @harmless
    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.monitor is not None:
            self.monitor.start_step()

    @harmless
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.monitor is not None:
            self._steps_to_log += 1
            self.monitor.log_step(state.global_step, state.epoch)

    @harmless
    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        self._added = {}
        if self.monitor is None or not logs or "loss" not in logs or not self._steps_to_log:
            return  # this row is from an evaluation or from code of the user
        self._steps_to_log = 0
        # Waiting for the device takes no time here, because the Trainer has just read the loss from it.
        given = {name: logs.get(name) for name in ("loss", "grad_norm", "learning_rate")}
        self._added = self._end_window(wait=True, **given)
        self._add_to(logs)

    def _add_to(self, logs: dict[str, Any]) -> None:
        logs.update(self._added)

    def _changes_rows_of(self, callback: Any) -> bool:
        """The callbacks that print a row show only a few of our values."""
        return isinstance(callback, _callbacks.PrinterCallback | _callbacks.ProgressCallback)

    def _changed(self, logs: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in logs.items() if key not in self._added or key in _PRINTED}

    def _on_changed_log(
        self, on_log: Callable[..., Any], *args: Any, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> Any:
        return on_log(*args, logs=self._changed(logs) if logs and self._added else logs, **kwargs)

    @harmless
    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.monitor is not None:
            self.monitor.spent_on("eval")

    @harmless
    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.monitor is not None:
            self.monitor.spent_on("checkpoint")

    @harmless
    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.end()

    def state(self) -> dict[str, Any]:
        """The state that a checkpoint stores: the totals, and the options that can be stored as JSON."""
        self._note_totals()
        options = {"output_dir": self._output_dir, "metrics": self._metrics, **self._monitor_options}
        plain = {name: value for name, value in options.items() if _is_plain(value)}
        lost = [name for name in options if name not in plain]
        return {"args": plain, "attributes": {"totals": self.totals, "lost_options": lost}}

    @harmless
    def _note_totals(self) -> None:
        self.totals = {} if self.monitor is None else self.monitor.state_dict()

    def _step(self, training_step: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self._read_batch(inputs)
        return training_step(model, inputs, *args, **kwargs)

    def _fetch(self, get_batch_samples: Callable[..., Any], epoch_iterator: Any, *args: Any, **kwargs: Any) -> Any:
        return get_batch_samples(TimedIterator(epoch_iterator, self), *args, **kwargs)

    @harmless
    def _read_batch(self, inputs: Any) -> None:
        if self.monitor is not None:
            self.monitor.micro_batch(inputs)

    def _ending_on_error(self, part: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return part(*args, **kwargs)
        except BaseException:  # raised again
            self.end()
            raise


class AutomaticCallback(FlopwatchCallback):
    """The callback of `flopwatch run`, which does nothing if the script has added a callback of its own.

    It adds values only to what the `Trainer` sends to W&B, TensorBoard and other trackers (`report_to`). What the
    script prints, and what callbacks of its own are given, stays as it is.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer = find_trainer(self)
        if trainer is None or self._is_alone(trainer.callback_handler.callbacks, FlopwatchCallback):
            super().on_train_begin(args, state, control, **kwargs)

    def _add_to(self, logs: dict[str, Any]) -> None:
        pass

    def _changes_rows_of(self, callback: Any) -> bool:
        return _is_tracker(callback)

    def _changed(self, logs: dict[str, Any]) -> dict[str, Any]:
        return {**logs, **self._added}


def _is_tracker(callback: Any) -> bool:
    """Whether a callback sends rows to W&B, TensorBoard or another tracker (`report_to`)."""
    return any(kind.__module__.startswith("transformers.integrations") for kind in type(callback).__mro__)


def _is_plain(value: Any) -> bool:
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except (TypeError, ValueError):
        return False
