"""One callback for the Hugging Face `Trainer` and everything built on it, TRL's trainers among them."""

import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flopwatch.integrations.callback_parts import FetchTimer, Selection, framework_metrics, harmless, replace_method
from flopwatch.monitor.training_monitor import TimedIterator, TrainingMonitor
from flopwatch.optional import require

_callbacks = require("transformers.trainer_callback", "hf")

_log = logging.getLogger("flopwatch")


class FlopwatchCallback(_callbacks.TrainerCallback, _callbacks.ExportableState):  # type: ignore[misc, name-defined]
    """Exact MFU, tokens and rates of a `Trainer`'s run, in its own log rows and in a local log.

    `Trainer(..., callbacks=[FlopwatchCallback()])` or `trainer.add_callback(FlopwatchCallback())` is all. The numbers
    stand in the same row as the loss, so W&B and TensorBoard show `train/perf/mfu` beside `train/loss`. They are
    taken when the `Trainer` logs (`logging_steps`). Evaluation and saving are not in any step's time. A run resumed
    from a checkpoint continues its totals.

    A `Trainer` hands its callbacks neither the batch nor itself. The callback finds it on the call stack, comes first
    among its callbacks while it trains, and looks at each batch in a `training_step` put on this one object, which is
    gone when the training ends.

    Args:
        output_dir: The run's folder; `flopwatch` in the `Trainer`'s `output_dir` without it.
        metrics: `basic` adds the basic numbers to the `Trainer`'s rows, `all` adds all.
        monitor_options: As for `flopwatch.TrainingMonitor`, such as `mode=`, `sinks=`, `peak_flops_per_s=`.

    Example:
        >>> callback = FlopwatchCallback(peak_flops_per_s=989e12)
        >>> callback.monitor is None  # until a training begins; `callback.monitor.summary` tells when it has ended
        True

    Attributes:
        monitor: Of the training under way, or of the last one.
        strict: True raises what would otherwise be reported once.
        totals: What a checkpoint keeps.
        lost_options: Options a checkpoint could not keep, on a callback that `restore_callback_states_from_checkpoint`
            has made anew.
    """

    def __init__(self, output_dir: str | Path | None = None, *, metrics: Selection = "basic", **monitor_options: Any):
        self._output_dir = None if output_dir is None else str(output_dir)
        self._metrics = metrics
        self._monitor_options = monitor_options
        self._put_back: list[Callable[[], None]] = []
        self._steps_to_log = 0
        self.strict = bool(monitor_options.get("strict"))
        self.monitor: TrainingMonitor | None = None
        self.totals: dict[str, Any] = {}
        self.lost_options: list[str] = []

    @harmless
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._end()  # of a training that raised
        self._steps_to_log = 0
        self.monitor = TrainingMonitor(**self._options(args, state, kwargs["model"]))
        self.strict = self.strict or self.monitor.config.strict
        self.monitor.says_what_was_not_given(False)  # what the callback does not find, it says itself
        saved = _saved_totals(state, type(self).__name__)
        if state.global_step > 0 and saved.get("step") == state.global_step:
            self.monitor.load_state_dict(saved)
        # A checkpoint made without this callback has no place for its state, and the Trainer asks for one.
        state.stateful_callbacks.setdefault(type(self).__name__, {})
        if self.lost_options:
            _log.warning("flopwatch: the Trainer restored the callback without %s", ", ".join(self.lost_options))
        trainer = _trainer_above(self)
        if trainer is None:
            _log.warning("flopwatch: no Trainer found around the callback, so there are no tokens, FLOPs or MFU")
            return
        _move_to_front(self, trainer.callback_handler.callbacks)
        self._put_back.append(replace_method(trainer, "training_step", self._seeing))
        if hasattr(trainer, "get_batch_samples"):
            self._put_back.append(replace_method(trainer, "get_batch_samples", self._timing))
        # Older versions train in one piece; then an error outside training_step is tidied up at the next beginning.
        guarded = "_run_epoch" if hasattr(trainer, "_run_epoch") else "training_step"
        self._put_back.append(replace_method(trainer, guarded, self._ending_on_error))

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
        if self.monitor is None or not logs or "loss" not in logs or not self._steps_to_log:
            return  # an evaluation's row, or one of the user's own
        self._steps_to_log = 0
        # The Trainer has just read the loss, so the device is idle and there is nothing to wait for.
        values = self.monitor.log_now(
            loss=logs["loss"], grad_norm=logs.get("grad_norm"), learning_rate=logs.get("learning_rate"), wait=True
        )
        logs.update(framework_metrics(values, self._metrics))

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
        self._end()

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: the totals, and those options that JSON can hold."""
        self._note_totals()
        options = {"output_dir": self._output_dir, "metrics": self._metrics, **self._monitor_options}
        plain = {name: value for name, value in options.items() if _is_plain(value)}
        lost = [name for name in options if name not in plain]
        return {"args": plain, "attributes": {"totals": self.totals, "lost_options": lost}}

    @harmless
    def _note_totals(self) -> None:
        self.totals = {} if self.monitor is None else self.monitor.state_dict()

    def _options(self, args: Any, state: Any, model: Any) -> dict[str, Any]:
        own: dict[str, Any] = {
            "output_dir": self._output_dir or Path(args.output_dir) / "flopwatch",
            "model": model,
            "total_steps": state.max_steps if state.max_steps > 0 else None,
            "dtype": "bf16" if args.bf16 else "fp16" if args.fp16 else None,
        }
        if args.logging_strategy == "steps":
            # One more than the Trainer's, so that it is the Trainer who closes each window.
            own["log_every"] = int(state.logging_steps) + 1
        return own | self._monitor_options

    def _seeing(self, training_step: Callable[..., Any]) -> Callable[..., Any]:
        def training_step_seen(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            self._see(inputs)
            return training_step(model, inputs, *args, **kwargs)

        return training_step_seen

    def _timing(self, get_batch_samples: Callable[..., Any]) -> Callable[..., Any]:
        timer = FetchTimer(self)

        def get_timed_batch_samples(epoch_iterator: Any, *args: Any, **kwargs: Any) -> Any:
            return get_batch_samples(TimedIterator(epoch_iterator, timer), *args, **kwargs)

        return get_timed_batch_samples

    @harmless
    def _see(self, inputs: Any) -> None:
        if self.monitor is not None:
            self.monitor.micro_batch(inputs)

    def _ending_on_error(self, part: Callable[..., Any]) -> Callable[..., Any]:
        def guarded_part(*args: Any, **kwargs: Any) -> Any:
            try:
                return part(*args, **kwargs)
            except BaseException:
                self._end()
                raise

        return guarded_part

    @harmless
    def _end(self) -> None:
        while self._put_back:
            self._put_back.pop()()
        if self.monitor is not None:
            self.monitor.close()


def _trainer_above(callback: Any) -> Any:
    """The `Trainer` that has called this callback; looks no further up the stack than that."""
    frame = sys._getframe(1)
    while frame is not None:
        caller = frame.f_locals.get("self")
        handler = getattr(caller, "__dict__", {}).get("callback_handler")
        if any(each is callback for each in getattr(handler, "callbacks", ())):
            return caller
        frame = frame.f_back  # type: ignore[assignment]
    return None


def _move_to_front(callback: Any, callbacks: list[Any]) -> None:
    """Reporting callbacks come before those of users, so keys that are added to a row would come too late.

    The list may be in use: everything after this callback keeps its place, so none is left out or called twice.
    """
    callbacks.insert(0, callbacks.pop(next(i for i, each in enumerate(callbacks) if each is callback)))


def _saved_totals(state: Any, name: str) -> dict[str, Any]:
    saved = state.stateful_callbacks.get(name, {})
    saved = saved[0] if isinstance(saved, list) else saved
    return dict(saved.get("attributes", {}).get("totals", {}))


def _is_plain(value: Any) -> bool:
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except (TypeError, ValueError):
        return False
