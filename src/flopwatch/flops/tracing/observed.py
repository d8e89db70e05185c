"""Counts a step with torch's profiler, which changes nothing that the step computes.

A few ops compute other last bits while a dispatch mode is active (`RISKY` in `formulas/free_ops.py`). The profiler
only listens: torch tells it the name, the shapes and the types of every op. It costs more than a dispatch mode.

Torch has one profiler per process. To start a second one, or to end the one that runs, would empty or even crash the
profile of the user. So a step is not observed while the training has any profiler object, and if one starts within
the step, torch ends this recording by itself, and it is left as it is.
"""

import gc
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from threading import get_ident
from typing import Any

import torch
from torch.autograd.profiler import emit_itt, emit_nvtx, profile, record_function

from flopwatch.errors import MeasurementError
from flopwatch.flops.tracing import kernels
from flopwatch.flops.tracing.live import StepCount, may_compile
from flopwatch.flops.tracing.recorded import BEGIN, CLOSURE, TAKEN, RecordedOps
from flopwatch.flops.tracing.scaling import UNCLEAR, Axes
from flopwatch.guard import Guard
from flopwatch.records.flops import AttentionConvention
from flopwatch.text import first_line
from flopwatch.torch_internals import apart, check_countable

_IN_USE = "the training uses torch's profiler, of which a process can run only one"
_LOG_LEVEL = "KINETO_LOG_LEVEL"
_NOTHING = "6"
"""A level above all messages. Torch 2.13 otherwise prints two lines for every recording."""


def can_observe() -> str | None:
    """Why the current step cannot be observed by torch's profiler; None if it can."""
    if not torch.profiler.kineto_available():
        return "this build of torch has no profiler"
    if may_compile():
        return "this process uses torch.compile, and the profiler does not see the ops in compiled code"
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return "steps cannot be observed while a CUDA graph is captured"
    if "KINETO_USE_DAEMON" in os.environ:
        return "a daemon may start torch's profiler at any time (KINETO_USE_DAEMON)"
    if _running or gc.get_freeze_count() or _profilers():
        return _IN_USE
    return None


def _profilers() -> list[Any]:
    """Return all profiler objects of the training that have not ended, even those that have not started.

    There is no list of them, so the garbage collector searches for objects that refer to their classes. It cannot see
    objects after `gc.freeze()`. An object that has ended often waits for the garbage collector.
    """
    classes: list[type] = [profile, torch.profiler.profile, emit_itt, emit_nvtx]
    if (legacy := sys.modules.get("torch.autograd.profiler_legacy")) is not None:
        classes.append(legacy.profile)
    for each in classes:
        classes += each.__subclasses__()
    ours = _running[-1:]
    found = [each for each in gc.get_referrers(*classes) if type(each) in classes and each not in ours]
    return [each for each in found if not _has_ended(each)]


def _has_ended(profiler: Any) -> bool:
    """Whether a profiler has recorded and will not begin again by itself, as one with a schedule does.

    One that accumulates events keeps its result while it records again, so that it never counts as ended.
    """
    recording = getattr(profiler, "profiler", profiler)  # that of `torch.autograd` in a `torch.profiler.profile`
    goes_on = getattr(profiler, "record_steps", False) or getattr(recording, "acc_events", False)
    return getattr(recording, "kineto_results", None) is not None and not goes_on


_running: list[profile] = []
"""The recording of this process that has begun and not ended, or nothing."""
_threads: list[int] = []
"""The thread in which it began, which is the only one that can end it."""


def _end_in_child() -> None:
    """In a forked process, such as a worker of a data loader, the recording would go on."""
    if _running and _threads == [get_ident()]:
        _running.pop().__exit__(None, None, None)
    _running.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_end_in_child)


class ObservedStep:
    """Counts one step, from the constructor to `end`. Never raises: `failure` says why a count is not complete."""

    def __init__(self, attention: AttentionConvention) -> None:
        self._attention: AttentionConvention = attention
        self._failure: str | None = None
        self._recordings: list[Any] = []
        self._is_paused = False
        self._stop_watching = kernels.watch_launches(self._meet_kernel)
        self._guarded(self._begin_recording)

    def set_paused(self, is_paused: bool) -> None:
        if is_paused != self._is_paused:
            self._is_paused = is_paused
            self._guarded(self._end_recording if is_paused else self._begin_recording)

    def end(self, axes: Axes | None = None) -> StepCount:
        self._guarded(self._end_recording)
        self._stop_watching()
        ops = RecordedOps(self._attention)
        # A new thread has no dispatch modes, autocast or default device of the training.
        self._guarded(lambda: apart(lambda: ops.add_all(self._recordings)))
        self._recordings.clear()
        count = StepCount.of(
            ops.tally,
            failure=self._failure,
            optimizer=ops.optimizer_flops,
            doubt=ops.doubt,
            before_calls=1,  # the recording does not show what ran before the first call of a module
        )
        return replace(count, by_scale={UNCLEAR: count.phases.forward + count.phases.backward})

    def set_axes(self, axes: Axes | None) -> None:
        """As in `LiveStep`; how products depend on lengths is not recorded."""

    def note_call(self) -> None:
        """As in `LiveStep`; calls of modules are not recorded."""

    def enter_optimizer(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note in the recording that an optimizer's step has a closure, which runs forward and backward passes."""
        if any(callable(value) for value in (*args[1:], *kwargs.values())):
            with record_function(CLOSURE):
                pass

    def leave_optimizer(self) -> None:
        """As in `LiveStep`; the profiler records the optimizer's step itself."""

    def _guarded(self, action: Callable[[], object]) -> None:
        """Do something of the recording, unless it has failed."""
        if self._failure is None:
            with Guard("the recording of ops", self._note_failure):
                action()

    def _note_failure(self, _: str, error: Exception) -> None:
        is_ours = isinstance(error, MeasurementError)
        self._failure = first_line(error) if is_ours else f"{type(error).__name__}: {first_line(error)}"

    def _meet_kernel(self, kernel: Any, arguments: Mapping[str, Any]) -> None:
        if not self._is_paused and kernels.flops_of(kernel, arguments) != 0:
            self._failure = f"the kernel {kernels.name_of(kernel)} is not in the profiler's record of ops"

    def _begin_recording(self) -> None:
        if (why := can_observe()) is not None:
            raise MeasurementError(why)
        check_countable()
        recording = profile(record_shapes=True)
        # Torch reads, when it loads its profiler, that it shall print nothing at the begin and end of a recording.
        is_set = _LOG_LEVEL in os.environ
        os.environ.setdefault(_LOG_LEVEL, _NOTHING)
        try:
            recording.__enter__()
        finally:
            if not is_set:
                del os.environ[_LOG_LEVEL]
        _running.append(recording)
        _threads[:] = [get_ident()]
        with record_function(BEGIN):
            pass

    def _end_recording(self) -> None:
        if not _running:
            return
        # One that warms up has begun, though torch does not count it as running.
        begun = [each for each in _profilers() if getattr(each, "entered", False)]
        is_taken = _threads != [get_ident()] or any(getattr(each, "kineto_results", None) is None for each in begun)
        recording = _running.pop()
        if is_taken:  # to end the recording would end the profiler that has taken its place
            self._failure = TAKEN
            return
        recording.__exit__(None, None, None)
        self._recordings.append(recording.kineto_results)
