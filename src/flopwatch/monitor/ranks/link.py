"""Sends a rank's reports to the logging rank, in a thread of its own.

The ranks form a tree with the logging rank at its root; each rank merges the reports of its children with its own. The
training's thread only puts reports into a queue and checks for results. If another rank hangs or dies, only the link's
thread waits, or ends with a `failure`.
"""

import atexit
import os
import pickle
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakSet

from flopwatch.errors import FlopwatchError
from flopwatch.monitor.ranks import layout, meeting, wire
from flopwatch.monitor.ranks.job_store import OPEN_SECONDS, JobStore, find_job_store, probe
from flopwatch.monitor.ranks.meeting import DeviceCensus, RunKey, Terms
from flopwatch.monitor.ranks.reports import REPORT_BYTES, RankDoubt, RankReport, aligned, extend
from flopwatch.text import first_line

_MOST_WAITING = 64
"""The maximum number of reports that wait to be sent; each further report is joined with the last one."""
_CHILD_SECONDS = 30.0
"""How long a rank waits for its children in the tree of ranks to join. Later ones are left out."""
_GRACE_SECONDS, _END_SECONDS = 0.5, 3.0
"""How long to wait for the thread to end: first after `give_up`, then after its calls to the store are ended too.

Torch prints a stack trace when a call to the store is ended, so this is done only if the thread does not end first.
"""
_EXIT_SECONDS = 2 * OPEN_SECONDS + 5.0
"""How long the exit of the process waits for the thread. Only opening a store takes so long, because torch retries."""
_THE_END = RankReport(0, -1, ranks=0, is_last=True)
_links: "WeakSet[RankLink]" = WeakSet()


@dataclass(frozen=True, slots=True)
class RunPlan:
    """What the logging rank sends once to all other ranks.

    Attributes:
        window_steps: Steps per window. A window ends after each step whose number plus one is a multiple of this.
    """

    window_steps: int


class RankLink:
    """The link of one rank to the other ranks of a run.

    Attributes:
        merged: On the logging rank, a queue of the merged reports of all ranks.
        plan: The `RunPlan` from the logging rank; None until it arrives.
        failure: Why the link has failed; None while it works.
        cpu_seconds: Processor time of the link's thread.
        ranks_on_device: How many ranks compute on this rank's device; None until that is known.
        absent: Once `plan` has arrived, the children of this rank (see `layout.children`) that have not joined the run.
    """

    def __init__(self, key: RunKey, rank: int, world_size: int, device: str = "", ranks_by_launcher: int = 1) -> None:
        self._key = key
        self._device = device
        self._ranks_by_launcher = ranks_by_launcher
        self._world_size = world_size
        self._census: DeviceCensus | None = None
        self._rank = rank
        self._changed = threading.Condition()
        self._waiting: deque[RankReport] = deque()
        self._is_finished = False
        self._has_all_reports = False
        self._is_given_up = threading.Event()
        self._sockets = wire.Sockets()
        self._store_sockets = wire.Sockets()
        self.merged: deque[RankReport] = deque()
        self.plan: RunPlan | None = None
        self.failure: str | None = None
        self.cpu_seconds = 0.0
        self.ranks_on_device: int | None = None
        self.absent: tuple[int, ...] = ()
        self._doubt: RankDoubt | None = None
        """What this rank and those below it in the tree doubt, and have not sent to the rank above."""
        self._thread = threading.Thread(target=self._run, name="flopwatch-ranks", daemon=True)
        self._thread.start()
        _links.add(self)

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def announce(self, plan: RunPlan) -> None:
        """Send the plan from the logging rank to all others."""
        with self._changed:
            self.plan = plan
            self._changed.notify()

    def send(self, report: RankReport) -> None:
        with self._changed:
            if len(self._waiting) >= _MOST_WAITING:
                report = extend(self._waiting.pop(), report)
            self._waiting.append(report)
            self._changed.notify()

    def add_doubt(self, doubt: RankDoubt | None) -> None:
        """Doubt steps that were called exact, also those of windows that were sent."""
        with self._changed:
            self._doubt = min((each for each in (self._doubt, doubt) if each is not None), default=None)

    def take_doubt(self) -> RankDoubt | None:
        with self._changed:
            doubt, self._doubt = self._doubt, None
        return doubt

    def finish(self, seconds: float) -> bool:
        """End this rank's reports and wait for the other ranks; False if they took longer than `seconds`."""
        with self._changed:
            self._is_finished = True
            self._changed.notify()
        # After `give_up` this rank sends no more reports, and its thread may be waiting for the store.
        if not self._is_given_up.is_set():
            self._thread.join(seconds)
        is_in_time = self.is_over or self._has_all_reports  # else the thread waits for the store, not for a rank
        self._end(_END_SECONDS)
        return is_in_time

    def give_up(self) -> None:
        """Stop waiting for other ranks, and let the link's thread end."""
        self._is_given_up.set()
        with self._changed:
            self._is_finished = True
            self._changed.notify_all()
        self._sockets.end()

    def _end(self, seconds: float) -> None:
        self.give_up()
        self._thread.join(_GRACE_SECONDS)
        self._store_sockets.end()
        self._thread.join(seconds)

    def leave(self) -> None:
        """End the link when the process exits, even if its thread waits for a host that does not answer."""
        if not self.is_over:
            self._end(_EXIT_SECONDS)

    def forget(self) -> None:
        """In a forked process, which has no thread of this link, close the copies of the link's sockets."""
        self._sockets.forget()
        self._store_sockets.forget()
        self._changed = threading.Condition()  # the other thread may have held the lock at the fork
        self._is_given_up.set()

    def wait_for(self, last_step: int, seconds: float) -> bool:
        """On the logging rank, wait until all ranks have sent their windows up to this step; False on timeout."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self.failure is not None or any(report.last_step >= last_step for report in self.merged),
                seconds,
            )

    def wait_for_plan(self, seconds: float) -> bool:
        """Wait for the plan (window length and FLOP formulas) from the logging rank; False on timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: self.plan is not None or self.failure is not None, seconds)

    @property
    def _is_logging(self) -> bool:
        return self._rank == self._key.logging_rank

    def _run(self) -> None:
        try:
            job_store = find_job_store()
            above, children = self._connect(job_store)
            reports = aligned([self._own_reports(), *map(self._reports_of, children)])
            for report in reports:
                if above is not None:
                    wire.send(above, replace(report, doubt=self.take_doubt()).pack())
                else:
                    with self._changed:
                        self.merged.append(report)
                        self._changed.notify_all()
                self.cpu_seconds = time.thread_time()
            self._has_all_reports = True
            if above is not None:
                wire.send(above, replace(_THE_END, doubt=self.take_doubt()).pack())
            else:
                self._end_run(job_store)
        except Exception as error:  # for example, a rank has died or never joined
            with self._changed:
                self.failure = f"{type(error).__name__}: {first_line(error)}"
                self._changed.notify_all()
        self._sockets.close()
        self.cpu_seconds = time.thread_time()

    def _connect(self, job_store: JobStore) -> tuple[socket.socket | None, list[socket.socket]]:
        """Connect to the parent and the children in the tree, and pass the plan from the parent to the children."""
        listener: socket.socket | None = None
        above: socket.socket | None = None
        with job_store.open(self._store_sockets) as opened:
            probe(opened)
            store, terms = self._join_run(opened)
            place = self._rank, self._key.logging_rank, self._world_size, terms.ranks_per_host
            children = layout.children(*place)
            if children:
                listener = wire.listen(job_store.host, self._sockets)
                meeting.publish_address(store, self._rank, wire.address_of(listener))
            if (rank_above := layout.parent(*place)) is None:
                self._wait_for_own_plan()
                message = pickle.dumps(self.plan)
                meeting.check_single(store)  # the device count may already contain ranks of another training
                meeting.has_plan(store)
            else:
                above = self._call_parent(rank_above, store)
                message = wire.receive_sized(above)
            self._look_at_devices(at_least=self._ranks_by_launcher)
        self._census = None
        below = [] if listener is None else self._pass_plan_on(message, children, listener, terms)
        if above is not None:
            with self._changed:
                self.plan = pickle.loads(message)  # safe, because the sender is a rank of the same training
                self._changed.notify_all()
        return above, below

    def _join_run(self, job_store: Any) -> tuple[Any, Terms]:
        """Wait until it is known which run this monitor belongs to; return the store of that run, and its terms."""
        store = meeting.run_store(job_store, self._key.run)
        # Register this rank's device before searching for its run. Otherwise ranks could wait for each other forever:
        # the logging rank sends its plan after all have registered, and a rank may need the plan to find its run.
        self._census = DeviceCensus(store, self._device, self._world_size)
        if self._is_logging:
            terms = Terms(wire.new_token(), layout.ranks_per_host(self._world_size))
            meeting.publish_run(job_store, self._key, terms)
            return store, terms
        pauses = meeting.pauses(self._world_size)
        while (run := meeting.find_run(job_store, self._key, self._rank)) is None:
            if self._is_given_up.wait(next(pauses)):
                raise FlopwatchError(f"rank {self._key.logging_rank} has no monitor of this run; add one on every rank")
            self._look_at_devices()
        store = meeting.join_run(job_store, run, self._rank)
        if run != self._key.run:
            self._census = DeviceCensus(store, self._device, self._world_size)
        return store, meeting.terms_of(store)

    def _wait_for_own_plan(self) -> None:
        for pause in meeting.pauses(self._world_size):
            with self._changed:
                seconds = None if self.ranks_on_device is not None else pause
                if self._changed.wait_for(lambda: self.plan is not None or self._is_finished, seconds):
                    return
            self._look_at_devices()

    def _look_at_devices(self, *, at_least: int | None = None) -> None:
        if self._census is not None and self.ranks_on_device is None:
            self.ranks_on_device = self._census.ranks(at_least=at_least)

    def _call_parent(self, rank: int, store: Any) -> socket.socket:
        """Connect to the rank above this one, and wait until it has the plan."""
        call: wire.Call | None = None
        for pause in meeting.pauses(self._world_size):
            address = meeting.find_address(store, rank)
            if address is not None:
                with suppress(OSError):  # the address may be that of a process before a restart of the training
                    call = wire.call(address, meeting.terms_of(store).token, self._rank, self._sockets)
                    break
            if self._is_given_up.wait(pause):
                raise FlopwatchError(f"rank {rank} cannot be reached; check that it is running and has a monitor")
            self._look_at_devices()
        assert call is not None
        for pause in meeting.pauses(self._world_size):
            if self.ranks_on_device is not None or not call.is_ringing(pause):
                break
            self._look_at_devices()
        return call.answered()

    def _pass_plan_on(
        self, message: bytes, children: list[int], listener: socket.socket, terms: Terms
    ) -> list[socket.socket]:
        """Send the plan to the children; return the connections of those that have joined in time."""
        found: dict[int, socket.socket] = {}
        self.absent = tuple(sorted(children))
        for child, connection in wire.arrivals(listener, terms.token, children, _CHILD_SECONDS, self._sockets):
            with suppress(OSError):  # the child has closed the connection
                wire.send_sized(connection, message)
                found[child] = connection
            self.absent = tuple(sorted(set(children) - set(found)))
        self._sockets.drop(listener)
        return [found[child] for child in children if child in found]

    def _end_run(self, job_store: JobStore) -> None:
        # All reports are there, so it does not matter if the store has ended with the training.
        with suppress(OSError, RuntimeError), job_store.open(self._store_sockets) as opened:
            meeting.end_run(opened, self._key)
            meeting.check_single(meeting.run_store(opened, self._key.run))

    def _own_reports(self) -> Iterator[RankReport]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._waiting) or self._is_finished)
                if not self._waiting:
                    return
                report = self._waiting.popleft()
            yield report

    def _reports_of(self, child: socket.socket) -> Iterator[RankReport]:
        while True:
            try:
                report = RankReport.unpack(wire.receive(child, REPORT_BYTES))
            except Exception:  # the child has died, so later windows lack it and the ranks below it in the tree
                return
            self.add_doubt(report.doubt)
            if report.is_last:
                return
            yield report


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
