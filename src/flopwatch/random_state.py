"""Keeps the random numbers of a training as they are without flopwatch. Standard library only."""

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def same_random_states() -> Iterator[None]:
    """When the block ends, restore the default generators of Python, NumPy and torch, as far as they are loaded.

    Even an import can draw: `rich` numbers its styles from a random start. Never use this in a thread of flopwatch,
    because what the training draws meanwhile would be drawn again.

    >>> random.seed(0)
    >>> with same_random_states():
    ...     first = random.random()
    >>> random.random() == first
    True
    """
    states = list(_states())
    try:
        yield
    finally:
        for restore, state in states:
            restore(state)


def _states() -> Iterator[tuple[Callable[[Any], object], Any]]:
    yield random.setstate, random.getstate()
    numpy: Any = sys.modules.get("numpy.random")
    if hasattr(numpy, "get_state"):
        yield numpy.set_state, numpy.get_state(legacy=False)
    torch: Any = sys.modules.get("torch")
    if hasattr(torch, "get_rng_state"):  # not while torch is being imported
        yield torch.set_rng_state, torch.get_rng_state()
        # Only of the current device, because reading the state of another one could create a context on it.
        for device in (torch.cuda, torch.xpu):
            if device.is_initialized():
                yield device.set_rng_state, device.get_rng_state()
