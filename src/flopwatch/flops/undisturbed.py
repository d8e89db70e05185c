"""Run something without leaving a trace: random states, autocast cache, dispatch modes, compiled frames."""

import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch.utils._python_dispatch import _disable_current_modes

from flopwatch.flops.replica import without_global_hooks


@contextmanager
def undisturbed(devices: Iterable[torch.device] = ()) -> Iterator[None]:
    """What runs inside changes no state that a training sees afterwards.

    Args:
        devices: The accelerators that something will be run on. Others are not even asked for their random state: that
            would set up a context, and take memory, on each of them.
    """
    with ExitStack() as stack:
        for device in dict.fromkeys(devices):
            if device.type not in ("cpu", "meta"):
                stack.enter_context(torch.random.fork_rng([device], device_type=device.type))
        stack.enter_context(_same_random_states())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(_no_autocast_cache())
        stack.enter_context(without_global_hooks())
        # The user's own modes (another counter, say) would see our ops.
        stack.enter_context(_disable_current_modes())
        # A compiled function that first runs under a dispatch mode is never compiled again (pytorch issue 140909):
        # forced to run eagerly it is passed by, and stays as it was.
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


@contextmanager
def _same_random_states() -> Iterator[None]:
    python_state = random.getstate()
    numpy = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy else None
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(python_state)
            if numpy:
                numpy.random.set_state(numpy_state)


@contextmanager
def _no_autocast_cache() -> Iterator[None]:
    # Inside a user's autocast region the casts of our tensors would stay cached until the region ends.
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)
