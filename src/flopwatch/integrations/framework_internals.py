"""What the integrations use of training frameworks beyond their documented interfaces, and what happens without it."""

import sys
from typing import Any


def find_trainer(callback: Any) -> Any:
    """The `Trainer` that is calling this callback, or None; checked with transformers 5.22.

    A `Trainer` does not pass itself to its callbacks. It is the `self` of a frame up the stack whose
    `callback_handler` holds the callback. If it is not found, there are step times and losses but no tokens and FLOPs,
    and a warning says so.
    """
    frame = sys._getframe(1)
    while frame is not None:
        caller = frame.f_locals.get("self")
        handler = getattr(caller, "__dict__", {}).get("callback_handler")
        if any(each is callback for each in getattr(handler, "callbacks", ())):
            return caller
        frame = frame.f_back  # type: ignore[assignment]
    return None


def guarded_part(trainer: Any) -> str:
    """The name of the `Trainer`'s method whose errors end the monitor at once; checked with transformers 5.22.

    `_run_epoch` also covers errors of the data loader and of other callbacks. Versions without it train in one piece:
    then only errors in the public `training_step` are seen, and others are tidied up when the next training begins.
    """
    return "_run_epoch" if hasattr(trainer, "_run_epoch") else "training_step"


def lightning_logs_this_step(trainer: Any) -> bool:
    """Whether Lightning is about to write a row to its loggers; checked with lightning 2.6.

    Lightning's own callbacks read `trainer._logger_connector.should_update_logs` too. Without it the documented rule is
    used, which differs for several optimizers: `global_step` counts the steps of all of them.
    """
    due = getattr(getattr(trainer, "_logger_connector", None), "should_update_logs", None)
    if due is None:
        every = trainer.log_every_n_steps
        return bool(every and trainer.global_step % every == 0)
    return bool(due)


def without_fabric_wrapper(model: Any) -> Any:
    """The model that `fabric.setup` has wrapped; checked with lightning 2.6.

    Fabric's wrapper accepts any arguments, so a batch could not be cut down to what the model takes. Fabric's public
    `module` would also match a user's model with that attribute. Without `_original_module` the wrapper itself is
    monitored, and batches that hold more than the model takes cannot be counted.
    """
    return getattr(model, "_original_module", model)
