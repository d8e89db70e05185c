"""Sends a rank's reports to the logging rank, in a thread of its own.

The ranks form a tree with the logging rank at its root; each rank merges the reports of its children with its own. The
training's thread only puts reports into a queue and checks for results. If another rank hangs or dies, only the link's
thread waits, or ends and keeps the reason.
"""

import atexit
import pickle
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

from flopwatch.errors import FlopwatchError
from flopwatch.monitor.ranks import group as ranks_group
from flopwatch.monitor.ranks.group import DeviceCensus, RunKey, park
from flopwatch.monitor.ranks.reports import REPORT_BYTES, RankReport, aligned, extend
from flopwatch.records.reading import first_line

_PLAN_TAG, _REPORT_TAG, _END_TAG = 1, 2, 3
_LENGTH_BYTES = 8
_MOST_WAITING = 64
"""The maximum number of reports that wait to be sent; each further report is joined with the last one."""
_CHILD_SECONDS = 30.0
"""How long a rank waits until its children (directly below it in the tree of ranks) join. Later ones are left out."""
_END_SECONDS = 1.0
"""How long to wait for the thread to end after `give_up`."""
_THE_END = RankReport(0, -1, ranks=0, is_last=True)
_links: "WeakSet[RankLink]" = WeakSet()


@dataclass(frozen=True, slots=True)
class RunPlan:
    """What the logging rank sends once to all other ranks.

    Attributes:
        window_steps: Steps per window. A window ends after each step whose number plus one is a multiple of this.
        laws: The formulas for the FLOPs of the model's calls.
    """

    window_steps: int
    laws: Any = ()


class RankLink:
    """The link of one rank to the other ranks of a run.

    Attributes:
        merged: On the logging rank, a queue of the merged reports of all ranks.
        plan: The `RunPlan` from the logging rank; None until it arrives.
        failure: Why the link has failed; None while it works.
        cpu_seconds: Processor time of the link's thread.
        ranks_on_device: How many ranks compute on this rank's device; None until that is known.
        absent: Once `plan` has arrived, the children of this rank (see `children`) that have not joined the run.
    """

    def __init__(self, key: RunKey, rank: int, world_size: int, device: str = "") -> None:
        self._key = key
        self._device = device
        self._world_size = world_size
        self._census: DeviceCensus | None = None
        self._rank = rank
        self._parent = parent(rank, key.logging_rank, world_size)
        self._children = children(rank, key.logging_rank, world_size)
        self._changed = threading.Condition()
        self._waiting: deque[RankReport] = deque()
        self._is_finished = False
        self._is_given_up = threading.Event()
        self._group: Any = None
        self._connected_rank: int | None = None
        self.merged: deque[RankReport] = deque()
        self.plan: RunPlan | None = None
        self.failure: str | None = None
        self.cpu_seconds = 0.0
        self.ranks_on_device: int | None = None
        self.absent: tuple[int, ...] = ()
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

    def finish(self, seconds: float) -> bool:
        """End this rank's reports and wait for the other ranks; False if they took longer than `seconds`."""
        with self._changed:
            self._is_finished = True
            self._changed.notify()
        self._thread.join(seconds)
        is_in_time = self.is_over
        self._end()
        return is_in_time

    def give_up(self) -> None:
        """Stop waiting for other ranks, and make the link's thread end."""
        self._is_given_up.set()
        with self._changed:
            self._is_finished = True
            self._changed.notify_all()
        group, rank = self._group, self._connected_rank
        if group is not None and rank is not None and not self.is_over:
            ranks_group.end_waits(group, rank, tag=_END_TAG)

    def _end(self) -> None:
        self.give_up()
        self._thread.join(_END_SECONDS)

    def leave(self) -> None:
        """End the link when the process exits, even if its thread waits for a host that does not answer."""
        if not self._is_given_up.is_set():
            self._end()
        if not self.is_over:
            park(self._thread)

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

    def _run(self) -> None:
        try:
            job_store = ranks_group.open_job_store()
            store = self._join_run(job_store)
            group = self._group = ranks_group.open_group(store)
            self._pass_plan_on(store, group)
            own = self._own_reports()
            for report in aligned([own, *(self._reports_of(child, group) for child in self._children)]):
                if self._parent is not None:
                    self._send(group, self._parent, report.pack(), _REPORT_TAG)
                else:
                    with self._changed:
                        self.merged.append(report)
                        self._changed.notify_all()
                self.cpu_seconds = time.thread_time()
            if self._parent is not None:
                self._send(group, self._parent, _THE_END.pack(), _REPORT_TAG)
            else:
                ranks_group.end_run(job_store, self._key)
        except Exception as error:  # for example, a rank has died or never joined
            with self._changed:
                self.failure = f"{type(error).__name__}: {first_line(error)}"
                self._changed.notify_all()
        self._group = None
        self.cpu_seconds = time.thread_time()

    def _join_run(self, job_store: Any) -> Any:
        """Wait until it is known which run this monitor belongs to; return the store of that run."""
        store = ranks_group.run_store(job_store, self._key.run)
        # Register this rank's device before searching for its run. Otherwise ranks could wait for each other forever:
        # the logging rank sends its plan after all have registered, and a rank may need the plan to find its run.
        self._census = DeviceCensus(store, self._device, self._world_size)
        if self._parent is None:
            ranks_group.publish_run(job_store, self._key)
            return store
        pauses = ranks_group.pauses()
        has_plan = _has_plan(self._key.logging_rank)
        while (run := ranks_group.find_run(job_store, self._key, self._rank, has_plan)) is None:
            if self._is_given_up.wait(next(pauses)):
                raise FlopwatchError(f"rank {self._key.logging_rank} has no monitor of this run; add one on every rank")
            self._look_at_devices()
        store = ranks_group.join_run(job_store, run, self._rank)
        if run != self._key.run:
            self._census = DeviceCensus(store, self._device, self._world_size)
        return store

    def _pass_plan_on(self, store: Any, group: Any) -> None:
        if self._parent is None:
            self._wait_for_own_plan()
            message = pickle.dumps(self.plan)
        else:
            message = self._receive_plan(self._parent, store, group)
        self._look_at_devices(is_final=True)
        store.set(_has_plan(self._rank), "")
        missing, ends = set(self._children), time.monotonic() + _CHILD_SECONDS
        for pause in ranks_group.pauses():
            for child in sorted(child for child in missing if ranks_group.is_set(store, _listens(child))):
                self._send(group, child, len(message).to_bytes(_LENGTH_BYTES, "little"), _PLAN_TAG)
                self._send(group, child, message, _PLAN_TAG)
                missing.remove(child)
            self.absent = tuple(sorted(missing))
            if not missing or time.monotonic() > ends or self._is_given_up.wait(pause):
                break
        self._children = [child for child in self._children if child not in missing]
        if self._parent is not None:
            with self._changed:
                self.plan = pickle.loads(message)  # safe, because the sender is a rank of the same training
                self._changed.notify_all()

    def _wait_for_own_plan(self) -> None:
        for pause in ranks_group.pauses():
            with self._changed:
                seconds = None if self.ranks_on_device is not None else pause
                if self._changed.wait_for(lambda: self.plan is not None or self._is_finished, seconds):
                    return
            self._look_at_devices()

    def _look_at_devices(self, *, is_final: bool = False) -> None:
        if self._census is not None and self.ranks_on_device is None:
            self.ranks_on_device = self._census.ranks(is_final=is_final)

    def _receive_plan(self, sender: int, store: Any, group: Any) -> bytes:
        for pause in ranks_group.pauses():
            if ranks_group.is_set(store, _has_plan(sender)):
                break
            if self._is_given_up.wait(pause):
                raise FlopwatchError(f"rank {sender} has not sent the FLOP formulas; check that this rank is running")
            self._look_at_devices()
        store.set(_listens(self._rank), "")
        size = int.from_bytes(self._receive(group, sender, _LENGTH_BYTES, _PLAN_TAG), "little")
        return self._receive(group, sender, size, _PLAN_TAG)

    def _send(self, group: Any, rank: int, message: bytes, tag: int) -> None:
        ranks_group.send(group, rank, message, tag=tag, connected=self._is_connected_to)

    def _receive(self, group: Any, rank: int, size: int, tag: int) -> bytes:
        return ranks_group.receive(group, rank, size, tag=tag, connected=self._is_connected_to)

    def _is_connected_to(self, rank: int) -> None:
        self._connected_rank = rank

    def _own_reports(self) -> Iterator[RankReport]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._waiting) or self._is_finished)
                if not self._waiting:
                    return
                report = self._waiting.popleft()
            yield report

    def _reports_of(self, child: int, group: Any) -> Iterator[RankReport]:
        while True:
            try:
                report = RankReport.unpack(self._receive(group, child, REPORT_BYTES, _REPORT_TAG))
            except Exception:  # the child has died, so later windows lack it and the ranks below it in the tree
                return
            if report.is_last:
                return
            yield report


@atexit.register
def _leave_all() -> None:
    """End all links at exit. Runs after all monitors are closed, because it is registered before any monitor exists."""
    for link in list(_links):
        link.leave()


def _listens(rank: int) -> str:
    """The store's key that a rank sets when it can receive the `RunPlan`; sending it earlier could block in gloo."""
    return f"listens/{rank}"


def _has_plan(rank: int) -> str:
    """The key in the store that a rank sets when it is ready to send the `RunPlan` to its children in the tree."""
    return f"has_plan/{rank}"


FAN_OUT = 8
"""The maximum number of children of a rank in the tree. With 8, 16,384 ranks have five levels below the root."""


def parent(rank: int, root: int, world_size: int) -> int | None:
    """The rank to which this rank sends its reports; None for the root.

    >>> parent(9, 0, 64), parent(0, 0, 64)
    (1, None)
    """
    place = (rank - root) % world_size
    return None if place == 0 else ((place - 1) // FAN_OUT + root) % world_size


def children(rank: int, root: int, world_size: int) -> list[int]:
    """The ranks that send their reports to this rank.

    >>> children(0, 0, 4), children(1, 0, 11)
    ([1, 2, 3], [9, 10])
    """
    place = (rank - root) % world_size
    first = place * FAN_OUT + 1
    return [(child + root) % world_size for child in range(first, min(first + FAN_OUT, world_size))]
