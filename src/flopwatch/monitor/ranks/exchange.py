"""Sends a rank's reports to the logging rank through the key-value store that the training's ranks share anyway.

The ranks form a tree with the logging rank at its root (`layout.children`): ranks of one host first, then hosts. Each
rank merges the reports of the ranks below it with its own, and leaves the sum in the store for the rank above
(`job_store.StoreOutbox`). Nothing is lost or read twice, and a run has a fixed number of keys.

A thread of its own does all of this. The training's thread only puts reports into a queue and checks for results.
It never waits inside the store for a key that may not be there: it asks again after a pause that `give_up` ends.
"""

import atexit
import ctypes
import json
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

from torch.distributed import DistError, PrefixStore  # type: ignore[attr-defined]

from flopwatch.errors import FlopwatchError
from flopwatch.monitor.ranks import job_store, layout
from flopwatch.monitor.ranks.job_store import (
    ON_ANY_DEVICE,
    OVER,
    PLAN,
    PUBLISHED,
    RunKey,
    StoreOutbox,
    alive,
    pauses,
    peek,
)
from flopwatch.monitor.ranks.reports import Message, RankDoubt, RankReport, add_to_queue, aligned, earliest
from flopwatch.text import first_line

_ABSENT_SECONDS = 30.0
"""If a rank below this one has not joined the run after this time, it is left out."""
_BEAT_SECONDS, _LOST_SECONDS = 20.0, 120.0
"""A rank with nothing to report says after 20 s that it is alive. After 120 s without a sign of life it is left out."""
_FIRST_LOOK_SECONDS, _LOOK_SECONDS = 1.0, 10.0
"""When to look for a sign of life of a rank whose report is late, first and then again."""
_END_SECONDS = 1.0
"""How long to wait for the thread after `give_up`. It takes longer only if the store does not answer."""
_LONGEST_PAUSE_SECONDS = 0.5
"""The longest pause between two looks for reports."""
_links: "WeakSet[RankLink]" = WeakSet()


class RankLink:
    """The link of one rank to the other ranks of a run, as the training's thread uses it.

    Attributes:
        merged: On the logging rank, a queue of the merged reports of all ranks.
        window_steps: The plan of the logging rank: a window ends after each step whose number plus one is a multiple of
            this. None until it arrives.
        failure: Why the link has failed; None while it works.
        ranks_on_device: How many ranks compute on this rank's device; None until that is known.
    """

    def __init__(self, key: RunKey, rank: int, world_size: int, device: str = "", ranks_by_launcher: int = 1) -> None:
        self._changed = threading.Condition()
        self._is_finished, self._is_given_up = threading.Event(), threading.Event()
        self._waiting: deque[RankReport] = deque()
        """Reports of this rank for its thread."""
        self._doubt: RankDoubt | None = None
        """The earliest doubt of this rank and those below it in the tree that was not yet sent to the rank above."""
        self.merged: deque[RankReport] = deque()
        self.window_steps: int | None = None
        self.failure: str | None = None
        self.ranks_on_device: int | None = None
        self._exchange = Exchange(self, key, rank, world_size, device, ranks_by_launcher)
        self._thread = threading.Thread(target=self._run, name="flopwatch-ranks", daemon=True)
        self._thread.start()
        _links.add(self)

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    @property
    def cpu_seconds(self) -> float:
        return self._exchange.cpu_seconds

    @property
    def absent(self) -> tuple[int, ...]:
        """The ranks directly below this one that have not joined the run, once the plan has arrived."""
        return tuple(sorted(rank for rank, below in self._exchange.below.items() if not below.is_here))

    def announce(self, window_steps: int) -> None:
        """Set the plan: on the logging rank, which sends it to all others, and on these when it arrives."""
        with self._changed:
            self.window_steps = window_steps
            self._changed.notify_all()

    def send(self, report: RankReport) -> None:
        with self._changed:
            add_to_queue(self._waiting, report)
            self._changed.notify_all()

    def add_doubt(self, doubt: RankDoubt | None) -> None:
        """Tell the rank above that steps are not exact after all, even if their windows were sent."""
        with self._changed:
            self._doubt = earliest(self._doubt, doubt)

    def take_doubt(self) -> RankDoubt | None:
        with self._changed:
            doubt, self._doubt = self._doubt, None
        return doubt

    def finish(self, seconds: float) -> bool:
        """End this rank's reports and wait for the other ranks; False if they took longer than `seconds`."""
        self._finish()
        # After `give_up` there is nothing to wait for: this rank sends no more reports.
        if not self._is_given_up.is_set():
            self._thread.join(seconds)
        # If all reports are there, the thread waits for the store and not for a rank.
        is_in_time = self.is_over or self._exchange.has_all_reports
        self.give_up()
        self._thread.join(_END_SECONDS)
        return is_in_time

    def give_up(self) -> None:
        """Stop waiting for other ranks, and let the link's thread end."""
        self._is_given_up.set()
        self._finish()

    def _finish(self) -> None:
        with self._changed:
            self._is_finished.set()
            self._changed.notify_all()

    def leave(self) -> None:
        """End the link when the process exits, even if its thread waits for a store that does not answer."""
        self.give_up()
        self._thread.join(_END_SECONDS)
        if not self.is_over:
            _park(self._thread)

    def forget(self) -> None:
        """In a forked process, which has no thread of this link, replace what that thread may have held at the fork."""
        self._changed = threading.Condition()
        self._is_finished, self._is_given_up = threading.Event(), threading.Event()
        self.give_up()

    def wait_for(self, last_step: int, seconds: float) -> bool:
        """On the logging rank, wait until all ranks have sent their windows up to this step; False on timeout."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self.failure is not None or any(report.last_step >= last_step for report in self.merged),
                seconds,
            )

    def wait_for_plan(self, seconds: float) -> bool:
        """Wait for the plan (the length of windows) of the logging rank, or the link's end; False on timeout."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self.window_steps is not None or self.failure is not None or self._is_finished.is_set(), seconds
            )

    def pause(self, seconds: float) -> bool:
        """In the link's thread, wait, but only until this rank finishes; False once it has given up."""
        (self._is_given_up if self._is_finished.is_set() else self._is_finished).wait(seconds)
        return not self._is_given_up.is_set()

    def reports(self) -> Iterator[RankReport | None]:
        """In the link's thread, yield this rank's reports until it finishes, and None when a sign of life is due."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._waiting) or self._is_finished.is_set(), _BEAT_SECONDS)
                if self._is_finished.is_set() and not self._waiting:
                    return
                report = self._waiting.popleft() if self._waiting else None
            yield report

    def add_merged(self, report: RankReport) -> None:
        with self._changed:
            self.merged.append(report)
            self._changed.notify_all()

    def _run(self) -> None:
        try:
            self._exchange.run()
        except Exception as error:  # noqa: BLE001 - such as a dead store, or a logging rank without a monitor
            with self._changed:
                self.failure = f"{type(error).__name__}: {first_line(error)}"
                self._changed.notify_all()
            if not isinstance(error, DistError):  # the store is there, so tell the rank above not to wait for this one
                with suppress(RuntimeError):
                    self._exchange.send_last()
        self._exchange.cpu_seconds = time.thread_time()


@dataclass(slots=True)
class _Below:
    """A rank that reports to this one.

    Attributes:
        reports: Reports that were read and not yet merged.
        is_here: Whether it has joined the run.
        is_over: True once it has sent its last report, or was lost.
        beat: Its last sign of life besides reports.
        silent_seconds: How long this rank has waited for a sign of life. A pause in which this process was itself
            stopped counts with its intended length.
        next_look_seconds: When to look for a sign of life, in `silent_seconds`.
    """

    reports: deque[RankReport] = field(default_factory=deque)
    is_here: bool = False
    is_over: bool = False
    beat: str | None = None
    silent_seconds: float = 0.0
    next_look_seconds: float = _FIRST_LOOK_SECONDS

    def take(self, message: Message) -> None:
        self.reports.extend(message.reports)
        self.is_here, self.is_over = True, message.is_last
        self.silent_seconds, self.next_look_seconds = 0.0, _FIRST_LOOK_SECONDS

    def look_for_life(self, store: Any, rank: int, waited_seconds: float) -> None:
        """Look from time to time whether this silent rank is alive; if it is not, leave it out."""
        self.silent_seconds += waited_seconds
        if self.silent_seconds < self.next_look_seconds:
            return
        self.next_look_seconds = self.silent_seconds + _LOOK_SECONDS
        beat = peek(store, alive(rank))
        self.is_here |= beat is not None
        if beat != self.beat:
            self.beat, self.silent_seconds, self.next_look_seconds = beat, 0.0, _LOOK_SECONDS
        self.is_over = self.silent_seconds >= (_LOST_SECONDS if self.is_here else _ABSENT_SECONDS)


class Exchange:
    """What a link's thread does: it meets the other ranks in the job's store, and then passes reports up the tree.

    Attributes:
        store: The run's part of the job's store; None before this rank has found that.
        has_all_reports: True once this rank and those below it have ended their reports.
    """

    def __init__(
        self, link: RankLink, key: RunKey, rank: int, world_size: int, device: str, ranks_by_launcher: int
    ) -> None:
        self._link, self._key, self._rank, self._world_size = link, key, rank, world_size
        self._on_device, self._ranks_by_launcher = f"on_device/{device}", ranks_by_launcher
        self.store: Any = None
        self._outbox: StoreOutbox | None = None
        """Messages to the rank above, once this rank has joined the run; always None on the logging rank."""
        self.below: dict[int, _Below] = {}
        self._wrote_at = time.monotonic()
        self.has_all_reports = False
        self.cpu_seconds = 0.0

    def run(self) -> None:
        """Meet the other ranks, and pass the reports of this rank and of those below it on until all have ended."""
        job = PrefixStore(job_store.prefix(os.environ, self._world_size), job_store.find_job_store())
        is_logging = self._rank == self._key.logging_rank
        ranks_per_host = self._lead(job) if is_logging else self._follow(job)
        children = layout.children(self._rank, self._key.logging_rank, self._world_size, ranks_per_host)
        job_store.open_slots(self.store, children)
        self.below = {child: _Below() for child in children}
        for report in aligned([self._own_reports(), *map(self._reports_of, self.below.values())]):
            if is_logging:
                self._link.add_merged(report)
            else:
                self._send([report])
            self.cpu_seconds = time.thread_time()
        self.has_all_reports = True
        if is_logging:
            with suppress(RuntimeError):  # all reports are there, so it does not matter if the store has ended
                self.store.set(OVER, "")  # so that later monitors do not join this run
                job_store.check_single(self.store)
            return
        self.send_last()
        if self._rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            # The store is probably in this process, and the logging rank in another one still reads from it.
            waiting = pauses(self._world_size)
            while not self.store.check([OVER]) and self._link.pause(next(waiting)):
                pass

    def _enter(self, job: Any, run: str) -> None:
        self.store = PrefixStore(run, job)
        self.store.add(self._on_device, 1)
        self.store.add(ON_ANY_DEVICE, 1)

    def _lead(self, job: Any) -> int:
        """On the logging rank, publish the run, wait for the plan and publish it; return the ranks per host."""
        self._enter(job, self._key.run)
        self.store.add(PUBLISHED, 1)
        job_store.check_single(self.store)
        self.store.set("log", self._key.log)
        job.set(self._key.by_log, self._key.run)
        waiting = pauses(self._world_size)
        while not self._link.wait_for_plan(next(waiting)):
            self._look_at_devices()
        self._look_at_devices(at_least=self._ranks_by_launcher)
        job_store.check_single(self.store)  # the device count may already contain ranks of another training
        ranks_per_host = layout.ranks_per_host(self._world_size)  # all ranks derive the tree from this one's number
        self.store.set(PLAN, json.dumps([self._link.window_steps, ranks_per_host]))
        return ranks_per_host

    def _follow(self, job: Any) -> int:
        """On another rank, find and join the run, and wait for its plan; return the ranks per host."""
        # Register this rank's device before searching for its run. Otherwise ranks could wait for each other forever:
        # the logging rank sends its plan after all have registered, and a rank may need the plan to find its run.
        self._enter(job, self._key.run)
        run: str | None = None
        for pause in pauses(self._world_size):
            self._look_at_devices()
            if run is None and (run := job_store.find_run(job, self._key, self._rank)) is not None:
                if run != self._key.run:
                    self._enter(job, run)
                if int(self.store.add(alive(self._rank), 1)) != 1:
                    raise FlopwatchError(f"another process uses the same store as rank {self._rank} of this run")
                self._outbox = StoreOutbox(self.store, self._rank)
            if run is not None and self.store.check([PLAN]):
                break
            if not self._link.pause(pause):
                raise FlopwatchError(f"rank {self._key.logging_rank} has no monitor of this run; add one on every rank")
        self._look_at_devices(at_least=self._ranks_by_launcher)
        window_steps, ranks_per_host = json.loads(peek(self.store, PLAN) or "")
        if window_steps is not None:
            self._link.announce(window_steps)
        return int(ranks_per_host)

    def _look_at_devices(self, *, at_least: int | None = None) -> None:
        """Count the ranks on this rank's device, once all are there. With `at_least`, the larger of it and those there.

        A rank that was registered in two runs of one name is counted twice, so there are never more than all ranks.
        """
        if self._link.ranks_on_device is not None:
            return
        is_complete = int(self.store.add(ON_ANY_DEVICE, 0)) >= self._world_size
        if is_complete or at_least is not None:
            counted = min(int(self.store.add(self._on_device, 0)), self._world_size)
            self._link.ranks_on_device = counted if is_complete else max(counted, at_least or 1)

    def _own_reports(self) -> Iterator[RankReport]:
        for report in self._link.reports():
            if report is None:
                self._keep_in_touch()
            else:
                yield report

    def _reports_of(self, child: _Below) -> Iterator[RankReport]:
        while True:
            waiting = pauses(self._world_size // layout.FAN_OUT, _LONGEST_PAUSE_SECONDS)
            while not child.reports and not child.is_over:
                pause = next(waiting)
                if not self._link.pause(pause):
                    return
                self._read(pause)
                self._keep_in_touch()
            if not child.reports:
                return
            yield child.reports.popleft()

    def _read(self, waited_seconds: float) -> None:
        """Read what those ranks below have written whose next report is missing."""
        missing = {rank: below for rank, below in self.below.items() if not (below.is_over or below.reports)}
        messages = job_store.read_slots(self.store, list(missing))
        for rank, below in missing.items():
            if (message := messages.get(rank)) is None:
                below.look_for_life(self.store, rank, waited_seconds)
            else:
                below.take(message)
                self._link.add_doubt(message.doubt)

    def _keep_in_touch(self) -> None:
        if self._outbox is not None and time.monotonic() - self._wrote_at >= _BEAT_SECONDS:
            self.store.add(alive(self._rank), 1)
            self._wrote_at = time.monotonic()

    def _send(self, reports: list[RankReport], *, is_last: bool = False) -> None:
        if self._outbox is not None:
            self._outbox.write(Message(reports, self._link.take_doubt(), is_last))
            self._wrote_at = time.monotonic()

    def send_last(self) -> None:
        """Tell the rank above, if this rank has joined the run, that no further message will come."""
        self._send([], is_last=True)


def _park(thread: threading.Thread) -> None:
    """Let a thread that waits for an answer of the store wait until the process has ended.

    If the answer came while the interpreter ends, Python would end the thread inside of torch's C++ code, which aborts
    the process; Python 3.14 lets such threads wait by itself. The thread is parked in a signal handler of libc.
    """
    if sys.version_info >= (3, 14) or not hasattr(signal, "SIGRTMAX") or thread.ident is None:
        return
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    libc.signal(signal.SIGRTMAX, ctypes.cast(libc.pause, ctypes.c_void_p))
    signal.pthread_kill(thread.ident, signal.SIGRTMAX)


@atexit.register
def _leave_all() -> None:
    """End all links at exit. Runs after all monitors are closed, because it is registered before any monitor exists."""
    for link in list(_links):
        link.leave()


def _forget_all() -> None:
    """In a forked process, such as a worker of a DataLoader, drop the links, which belong to its parent process."""
    for link in list(_links):
        link.forget()
    _links.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
