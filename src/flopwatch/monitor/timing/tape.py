"""Records when steps, waits, optimizers, phases and passes begin and end. `divide` decides later what that means."""

import multiprocessing
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from flopwatch.clock import Clock
from flopwatch.torch_internals.autograd import compile_seconds

(
    START, END, GAP, MICRO, END_MICRO, OPTIMIZER, OPTIMIZER_END, UNTIMED, WAIT, WAIT_END, PHASE, PHASE_END, SPENT, OWN,
    OWN_END, CALL, FIRST, FORWARD, FORWARD_END, REGION, BACKWARD, BACKWARD_END, UNSEEN, GRADIENT,
) = range(24)  # fmt: skip
"""What an event says; `divide` has a method for each."""

Event = tuple[int, float, Any, Any, float | None]
"""Code, host time, mark of the timer, a fact, and processor time of the thread (None if it is not needed)."""

_FIRST_TIMED, _TIMED_EVERY = 256, 7
"""Optimizer and passes are timed in this many steps at first, and then in one of seven, because marks cost time."""
_MOST_EVENTS = 50_000
_GAPS_PER_LOOK = 32


def _has_timed_parts(number: int) -> bool:
    """Whether optimizer and passes are timed in a step. Of seven steps it is each time another one.

    Otherwise an optimizer that steps every seventh time would be timed each time or never.
    """
    return number < _FIRST_TIMED or number % _TIMED_EVERY == number // _TIMED_EVERY % _TIMED_EVERY


class Tape:
    """The events of a training, in their order. Its methods run on every step, so they append and decide nothing.

    Attributes:
        timer: Sets the marks: readings of the clock on a CPU, events of the stream on an accelerator.
        times_parts: Whether the optimizer and the passes of the current step are timed.
        is_working: Whether the training works on a batch.
        in_pass: `FORWARD` or `BACKWARD` while a pass runs that is recorded; otherwise None.
        compiled_before: What `compile_seconds` was when the first step began.
        on_full: Is called when a loop without ended steps has recorded very many events; must call `take`.
    """

    def __init__(self, timer: "StepTimer", clock: Clock) -> None:
        self.events: list[Event] = []
        self.timer, self.clock = timer, clock
        self._cpu_seconds: Callable[[], float] | None = None
        self._thread = threading.get_ident()
        self.times_parts, self.is_working = True, False
        self.in_pass: int | None = None
        self.on_full: Callable[[], object] = self.take
        self.compiled_before = self._compiled = 0.0
        self._inside: list[tuple[int, bool]] = []
        """Phases and fetches that the training is in, and whether it was working when each of them began."""
        self._steps, self._steps_when_full = 0, -1

    def add(self, code: int, fact: Any = None) -> float:
        """Append an event, and return its time."""
        now = self.clock()
        mark = now if self.timer.mark is self.clock else self.timer.mark()
        self.events.append((code, now, mark, fact, None if self._cpu_seconds is None else self._cpu_seconds()))
        if len(self.events) > _MOST_EVENTS:
            self._empty()
        return now

    def note(self, code: int, fact: Any = None) -> None:
        """Append an event whose time does not matter."""
        self.events.append((code, 0.0, None, fact, None))
        if len(self.events) > _MOST_EVENTS:
            self._empty()

    def _empty(self) -> None:
        """Hand over the events. What a step is made of is not recorded further if it lasts for very many of them."""
        self.on_full()
        if self.times_parts and self._steps == self._steps_when_full:
            self.times_parts, self.in_pass = False, None
            self.note(UNSEEN)
        self._steps_when_full = self._steps

    def take(self) -> list[Event]:
        events, self.events = self.events, []
        return events

    def is_in_thread(self) -> bool:
        return threading.get_ident() == self._thread

    # --- Steps --------------------------------------------------------------------------------------------------------

    def start_step(self, has_batch: bool = True) -> None:
        """Begin a step, or the next micro-batch of a step. With `has_batch`, its batch was already fetched."""
        if not self._steps:  # the monitor may have been made in another thread than the training's
            self._thread, self.compiled_before = threading.get_ident(), compile_seconds()
        self.is_working = True
        self.add(START, has_batch)

    def end_micro_batch(self) -> None:
        """End the work on a micro-batch and begin the gap before the next one."""
        self.is_working = False
        self.add(END_MICRO)

    def end_step(self) -> float:
        now = self.add(END, self.times_parts)
        self._steps += 1
        self.times_parts = _has_timed_parts(self._steps)
        self.is_working, self.in_pass = False, None
        return now

    def begin_gap(self) -> None:
        """Begin the gap, the time until the next batch arrives; called after `end_step` and the monitor's own work."""
        if self._steps % _GAPS_PER_LOOK == 1 and self._cpu_seconds is None and multiprocessing.active_children():
            # In a gap that was spent waiting for a loader's workers, the thread uses no processor time.
            self._cpu_seconds = time.thread_time
        self._compiled = compile_seconds()
        self.add(GAP)

    def spent_on(self, phase: str) -> None:
        """The gap so far was spent on a phase, such as evaluation, and belongs to no step."""
        before, self._compiled = self._compiled, compile_seconds()
        self.add(SPENT, (phase, self._compiled - before))

    def begin_own_work(self) -> bool:
        """Begin the monitor's own work; if it returns True, `OWN_END` must follow."""
        if not self.is_working:
            self.add(OWN)
        return not self.is_working

    def model_is_called(self, has_grad: bool) -> None:
        """Note a forward pass. If the newest event is the same, nothing is added."""
        event = CALL, 0.0, None, has_grad, None
        if not self.events or self.events[-1] != event:
            self.events.append(event)

    # --- Waits and phases ---------------------------------------------------------------------------------------------

    def begin_wait(self) -> bool:
        """Begin to time a fetch. Returns False if it is not timed: in a phase such as evaluation, or another thread."""
        if self._inside or not self.is_in_thread():
            return False
        self._enter(WAIT)
        return True

    def end_wait(self, *, has_batch: bool = True) -> None:
        """End a timed fetch; `has_batch` says whether it has returned a batch."""
        if self._inside and self._inside[-1][0] == WAIT:
            self.is_working = self._inside.pop()[1] or has_batch
            self.add(WAIT_END, has_batch)

    def begin_phase(self) -> float | None:
        """Begin time that belongs to no step; return the host time, or None inside of another phase."""
        if any(code == PHASE for code, _ in self._inside):
            self._inside.append((OWN, False))
            return None
        return self._enter(PHASE)

    def end_phase(self, began: float | None) -> float:
        """End a phase, and return its seconds; 0 if it is part of another one."""
        if self._inside:
            self.is_working = self._inside.pop()[1]
        return 0.0 if began is None else self.add(PHASE_END, began) - began

    def _enter(self, code: int) -> float:
        self._inside.append((code, self.is_working))
        self.is_working = False
        return self.add(code)

    # --- Optimizers ---------------------------------------------------------------------------------------------------

    def optimizer_begins(self, optimizer: object = None, *, is_own: bool = True) -> None:
        """Begin an optimizer's part of a step. An optimizer that another one calls is part of that one.

        `is_own` says whether it is one of this run. Between steps, an optimizer of another training is not timed.
        """
        if self.is_in_thread():
            self.add(OPTIMIZER, (optimizer, is_own))

    def optimizer_is_untimed(self, optimizer: object) -> None:
        """Note that an optimizer steps, and that it is unknown when it begins."""
        if self.is_in_thread():
            self.note(UNTIMED, optimizer)

    def optimizer_ends(self, optimizer: object = None, *, is_own: bool = True) -> None:
        if self.is_in_thread():
            self.add(OPTIMIZER_END, (optimizer, is_own))


class StepTimer(Protocol):
    """Sets marks in time, and measures the time between two marks.

    On an accelerator marks are events, because the host queues work ahead of the device: host time would show when
    work was queued, not when it ran. Events are read one window later, so the host never waits for them.
    """

    def mark(self) -> Any:
        """Set a mark after all work that is queued now."""

    def has_passed(self, mark: Any) -> bool:
        """Whether the device has reached the mark."""

    def seconds(self, start: Any, end: Any) -> float:
        """Seconds between two marks, both of which the device has reached."""


class HostTimer:
    """Uses the host's clock; a mark is a number of seconds."""

    def __init__(self, clock: Clock) -> None:
        self.mark = clock

    def has_passed(self, mark: float) -> bool:
        return True

    def seconds(self, start: float, end: float) -> float:
        return end - start


class EventTimer:
    """Measures time with events in the current stream. Written from torch's documentation, and not yet run on a GPU."""

    def __init__(self, device: torch.device, event: Any = torch.Event) -> None:
        self._device = device
        self._event = event

    def mark(self) -> Any:
        event = self._event(self._device, enable_timing=True)
        event.record()
        return event

    def has_passed(self, mark: Any) -> bool:
        return bool(mark.query())

    def seconds(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end)) / 1e3


def timer_for(device: torch.device, clock: Clock) -> StepTimer:
    return HostTimer(clock) if device.type in ("cpu", "meta", "mps") else EventTimer(device)
