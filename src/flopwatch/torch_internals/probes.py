"""Checks private names of torch by what they do, once each, and collects what is missing."""

from _thread import allocate_lock, start_new_thread
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from flopwatch.errors import MeasurementError

TESTED_WITH = ((2, 6), (2, 15))
"""The first and the last minor release of torch that flopwatch is tested with."""


@dataclass(frozen=True, slots=True)
class PrivateName:
    """A private name: its path, what flopwatch uses it for, and what flopwatch does without it."""

    path: str
    purpose: str
    without: str
    """What is different for the user if the name is missing or fails its check, as part of a sentence."""


PRIVATE_NAMES: dict[str, PrivateName] = {}
"""All private names of torch by their last part."""
results: dict[str, bool] = {}
"""The results of the checks that have been made in this process."""
resets: list[Callable[[], None]] = []


def declare(path: str, purpose: str, without: str) -> str:
    name = path.rpartition(".")[2]
    PRIVATE_NAMES[name] = PrivateName(path, purpose, without)
    return name


def works(name: str, probe: Callable[[], bool]) -> bool:
    """Whether a private name does what it should. The check runs once, in a thread of its own, and never raises.

    A new thread has no dispatch modes, autocast, saved-tensor hooks or inference mode, so a check neither sees nor
    changes those of the training. It is not started by `threading`, because a trace uses
    `threading.setprofile` to notice threads of the user's model.
    """
    if name not in results:
        results[name] = apart(probe)
    return results[name]


def apart(probe: Callable[[], bool]) -> bool:
    answers: list[bool] = []
    is_done = allocate_lock()
    is_done.acquire()

    def run() -> None:
        try:
            answers.append(bool(probe()))
        except Exception:
            answers.append(False)
        finally:
            is_done.release()

    start_new_thread(run, ())
    is_done.acquire()
    return bool(answers and answers[0])


def what_is_missing() -> list[str]:
    """Return a sentence for each private name that failed its check, and one if this torch release was not tested."""
    found = []
    release = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if not TESTED_WITH[0] <= release <= TESTED_WITH[1]:
        first, last = (".".join(map(str, each)) for each in TESTED_WITH)
        found.append(f"flopwatch was not tested with torch {torch.__version__}, but with torch {first} to {last}")
    for name, is_fine in results.items():
        if not is_fine:
            found.append(f"torch {torch.__version__} has no usable `{name}`: {PRIVATE_NAMES[name].without}")
    return found


def forget_probes() -> None:
    """Forget the results of all checks, so that the next use of each name checks it again (for tests)."""
    results.clear()
    for reset in resets:
        reset()


def checked(name: str, find: Callable[[], Any], probe: Callable[[Any], bool], instead: Callable[..., Any]) -> Any:
    """Return a function that calls the private function `find()`, or `instead` if its check fails at the first call."""
    chosen: Callable[..., Any]

    def first(*args: Any) -> Any:
        nonlocal chosen
        chosen = find() if works(name, lambda: probe(find())) else instead
        return chosen(*args)

    def call(*args: Any) -> Any:
        return chosen(*args)

    def reset() -> None:
        nonlocal chosen
        chosen = first

    reset()
    resets.append(reset)
    return call


def unusable(name: str, what: str) -> MeasurementError:
    return MeasurementError(f"torch {torch.__version__} has no usable `{name}`, so {what}")
