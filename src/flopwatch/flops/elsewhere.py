"""Work of a step that a dispatch mode cannot see: threads that the model starts, Triton kernels launched directly."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

THREADS = "threads"
THREADS_NOTE = "the model started threads while it was counted: what torch runs in them is not counted"
TRITON_KERNEL = "Triton kernel"

Tell = Callable[[], None]


@contextmanager
def threads_noticed(tell: Tell) -> Iterator[None]:
    """Call `tell` for each thread that is started meanwhile; a dispatch mode is in force in its own thread only.

    Threads started by `threading` ask for a profile function when they begin: ours puts itself out of the way at once.
    """
    before: Any = threading.getprofile()

    def on_start(frame: FrameType, event: str, argument: Any) -> None:
        sys.setprofile(before)
        tell()

    threading.setprofile(on_start)
    try:
        yield
    finally:
        threading.setprofile(before)


@contextmanager
def triton_launches_noticed(tell: Tell) -> Iterator[None]:
    """Call `tell` for each Triton kernel launched meanwhile, by the hook that Triton has for profilers."""
    knobs = getattr(sys.modules.get("triton"), "knobs", None)
    chain: Any = getattr(getattr(knobs, "runtime", None), "launch_enter_hook", None)
    if not hasattr(chain, "add") or not hasattr(chain, "remove"):  # no Triton, or one before its hooks were chains
        yield
        return

    def on_launch(*_: Any, **__: Any) -> None:
        tell()

    chain.add(on_launch)
    try:
        yield
    finally:
        chain.remove(on_launch)
