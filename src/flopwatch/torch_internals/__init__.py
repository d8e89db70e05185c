"""Every private name of torch that flopwatch uses; docs/design.md says what each is for, and what happens without it.

A name is private if it, or the module that it is taken from, begins with an underscore. `PRIVATE_NAMES` lists them;
`tests/test_private_names.py` checks that no other module uses one, and `tests/test_without_private_names.py` removes
each in turn. No behaviour depends on torch's version: before the first count, one check finds out what the names do
that counting needs. If it fails, FLOPs are estimated, and the estimate says why. What the others give is then unknown.

Not private in this sense are `TorchDispatchMode`, `FakeTensorMode`, `FakeTensor` and `Tensor._values`, which torch
documents although their paths have an underscore ("Extending PyTorch", "Fake tensor", "torch.sparse"), and names of
registered ops (`aten::_grouped_mm`): an op that a release does not register never matches.
"""

import functools
from _thread import allocate_lock, start_new_thread
from collections.abc import Callable
from typing import TypeVar

import torch

from flopwatch.errors import MeasurementError
from flopwatch.guard import Guard

_Answer = TypeVar("_Answer")

TESTED_WITH = ((2, 6), (2, 15))
"""The first and the last minor release of torch that flopwatch is tested with."""
PRIVATE_NAMES: dict[str, str] = {}
"""The paths of all private names of torch by their last part; docs/design.md says what each is for, and what happens
without it."""
CHECKS: dict[tuple[str, ...], Callable[[], bool]] = {}
"""Whether the names do what counting needs. If not, FLOPs are estimated, and no step is counted as it runs."""


def declare(path: str) -> str:
    name = path.rpartition(".")[2]
    PRIVATE_NAMES[name] = path
    return name


def apart(work: Callable[[], _Answer]) -> _Answer:
    """Do something in a thread of its own; raises what it raises.

    A new thread has no dispatch modes, autocast, saved-tensor hooks or inference mode, so a check neither sees nor
    changes those of the training. It is not started by `threading`, because a trace uses
    `threading.setprofile` to notice threads of the user's model.
    """
    answers: list[_Answer] = []
    errors: list[BaseException] = []
    is_done = allocate_lock()
    is_done.acquire()

    def run() -> None:
        try:
            answers.append(work())
        except BaseException as error:  # noqa: BLE001 - it is raised again in the thread that waits
            errors.append(error)
        finally:
            is_done.release()

    start_new_thread(run, ())
    is_done.acquire()
    if errors:
        raise errors.pop()
    return answers[0]


@functools.cache
def why_not_countable() -> str | None:
    """Why this release of torch cannot count ops; None if it can."""
    failed: list[str] = []
    for names, probe in CHECKS.items():
        is_passed = False
        with Guard(f"the check of {', '.join(names)}"):
            is_passed = apart(probe)
        failed += [] if is_passed else [f"`{name}`" for name in names]
    return f"torch {torch.__version__} has no usable {', '.join(failed)}" if failed else None


def check_countable() -> None:
    if (why := why_not_countable()) is not None:
        raise MeasurementError(f"{why}, so ops cannot be counted one by one")


def untested_release() -> str | None:
    release = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if TESTED_WITH[0] <= release <= TESTED_WITH[1]:
        return None
    first, last = (".".join(map(str, each)) for each in TESTED_WITH)
    return f"flopwatch was not tested with torch {torch.__version__}, but with torch {first} to {last}"
