"""From a trainer's name to its class."""

import importlib
import sys

from flopwatch.errors import InputError
from flopwatch.sweep.trainers.names import COMMAND, LABELS, canonical_trainer
from flopwatch.sweep.trainers.protocol import Trainer

_HOMES = {
    "standard": "flopwatch.sweep.trainers.standard",
    "dpsgd": "flopwatch.sweep.trainers.opacus_hooks",
    "ghost": "flopwatch.sweep.trainers.opacus_two_pass",
    "fast": "flopwatch.sweep.trainers.opacus_two_pass",
}
_METHODS = ("forward", "backward", "update")


def load_trainer(name: str) -> type[Trainer]:
    """The class behind a name: a built-in trainer, or `package.module:Class`, in the working directory too.

    >>> load_trainer("standard").__name__
    'StandardTrainer'
    """
    trainer, label = canonical_trainer(name)
    if trainer == COMMAND:
        raise InputError("a command is run by the shell and has no trainer class; give it as --command")
    module_name = _HOMES.get(trainer) or trainer.partition(":")[0]
    sys.path.insert(0, "")  # as `python -m` does: a user's file lies in the working directory
    try:
        found = getattr(importlib.import_module(module_name), label)
    except (ImportError, AttributeError) as error:
        raise InputError(f"cannot load the trainer {name!r}: {error}") from error
    finally:
        sys.path.remove("")
    if trainer not in LABELS:
        _check(name, found)
    return found  # type: ignore[no-any-return]


def _check(name: str, found: object) -> None:
    if not isinstance(found, type):
        raise InputError(f"trainer {name!r} is a {type(found).__name__}, not a class")
    missing = [method for method in _METHODS if not callable(getattr(found, method, None))]
    if missing:
        raise InputError(
            f"trainer {name!r} has no method {', '.join(missing)}; a trainer has forward(batch), which returns the "
            "loss, backward(loss) and update(), and is built with (model, settings)"
        )
