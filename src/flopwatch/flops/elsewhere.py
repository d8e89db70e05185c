"""Work of a step that a dispatch mode cannot see: threads that the model starts, Triton kernels launched directly."""

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

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
def threads_followed(modes: Callable[[], Sequence[Any]], tell: Tell) -> Iterator[None]:
    """Put modes on in each thread that is started meanwhile; call `tell` for one that has not ended in the end.

    A mode leaves its thread before the thread ends, or at the first call of a function after the count: a thread that
    is kept for later must not run the training's own work under it.
    """
    before: Any = threading.getprofile()
    under_way: set[_Followed] = set()
    is_over = threading.Event()

    def on_start(frame: FrameType, event: str, argument: Any) -> None:
        _Followed(modes(), frame, under_way, is_over, before).enter()

    threading.setprofile(on_start)
    try:
        yield
    finally:
        threading.setprofile(before)
        is_over.set()
        for _ in list(under_way):
            tell()


class _Followed:
    """The modes in one thread, from its first frame on."""

    def __init__(
        self, modes: Sequence[Any], first: FrameType, under_way: "set[_Followed]", is_over: threading.Event, before: Any
    ) -> None:
        self._modes, self._first, self._before = modes, first, before
        self._under_way, self._is_over = under_way, is_over

    def enter(self) -> None:
        self._under_way.add(self)
        for mode in self._modes:
            mode.__enter__()
        sys.setprofile(self._look)

    def _look(self, frame: FrameType, event: str, argument: Any) -> None:
        is_left = self._is_over.is_set() and not _is_inside_mode(frame)
        if is_left or (event == "return" and frame is self._first):
            sys.setprofile(self._before)
            for mode in reversed(self._modes):
                mode.__exit__(None, None, None)
            self._under_way.discard(self)


def _is_inside_mode(frame: FrameType | None) -> bool:
    """Whether an op is on its way through a mode, which is then not where it was put."""
    while frame is not None:
        if frame.f_code.co_name in ("__torch_dispatch__", "__torch_function__"):
            return True
        frame = frame.f_back
    return False


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
