"""Sends a rank's reports to the logging rank through the key-value store that the training's ranks share anyway.

The ranks form a tree with the logging rank at its root (`layout.parent`): ranks of one host first, then hosts. Each rank
merges the reports of the ranks below it with its own. A rank writes to its slot in the store only while the slot is
empty, and the rank above empties it after reading. So nothing is lost or read twice, and a run has a fixed number of
keys.

All of this is done by a thread of its own. The training's thread only puts reports into a queue and checks for results.
The thread never waits inside the store for a key that may not be there: it asks again after a pause, which `give_up` ends.
"""

import atexit
import ctypes
import json
import os
import secrets
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakSet

import torch.distributed as dist
from torch.distributed import FileStore, HashStore, PrefixStore, TCPStore  # type: ignore[attr-defined]

from flopwatch.errors import FlopwatchError
from flopwatch.monitor.ranks import layout
from flopwatch.monitor.ranks.reports import Message, RankDoubt, RankReport, aligned, extend
from flopwatch.text import first_line
from flopwatch.torch_internals.modules import default_store
from flopwatch.version import __version__

_MOST_WAITING = 64
"""The maximum number of reports that wait to be sent; each further report is joined with the last one."""
_ABSENT_SECONDS = 30.0
"""A rank below this one that has not joined the run by then is left out."""
_BEAT_SECONDS, _LOST_SECONDS = 20.0, 120.0
"""A rank with nothing to report says after 20 s that it is alive. After 120 s without a sign of life it is left out."""
_FIRST_LOOK_SECONDS, _LOOK_SECONDS = 1.0, 10.0
"""When to look for a sign of life of a rank whose report is late, first and then again."""
_END_SECONDS = 1.0
"""How long to wait for the thread after `give_up`. It takes longer only if the store does not answer."""
_SHORTEST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS, _LONGEST_PAUSE_FOR_REPORTS_SECONDS = 0.02, 2.0, 0.5
_MOST_POLLS_PER_SECOND = 8000
"""How many polls per second, of all ranks together, the store's single thread answers without delaying the training."""
_PLAN, _PUBLISHED, _OVER, _ON_ANY_DEVICE = "plan", "published", "over", "on_any_device"
_links: "WeakSet[RankLink]" = WeakSet()


def is_possible() -> bool:
    return dist.is_available() and dist.is_initialized()


@dataclass(frozen=True, slots=True)
class RunPlan:
    """What the logging rank sends once to all other ranks.

    Attributes:
        window_steps: Steps per window. A window ends after each step whose number plus one is a multiple of this.
    """

    window_steps: int


@dataclass(frozen=True, slots=True)
class RunKey:
    """Identifies a monitor of this process for the monitors of the other ranks.

    Attributes:
        logging_rank: The rank that writes the run's log.
        number: How many monitors with this logging rank the process has started, including this one.
        log: The log's path on this rank, with a number appended, because several monitors may write to one path.
        known_logs: The logs of all monitors of this process, including those started later.
    """

    logging_rank: int
    number: int
    log: str
    known_logs: Collection[str] = ()

    @property
    def run(self) -> str:
        return f"{self.logging_rank}/{self.number}"

    @property
    def by_log(self) -> str:
        return f"log/{self.logging_rank}/{self.log}"


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


class RankLink:
    """The link of one rank to the other ranks of a run.

    Attributes:
        merged: On the logging rank, a queue of the merged reports of all ranks.
        plan: The `RunPlan` from the logging rank; None until it arrives.
        failure: Why the link has failed; None while it works.
        cpu_seconds: Processor time of the link's thread.
        ranks_on_device: How many ranks compute on this rank's device; None until that is known.
    """

    def __init__(self, key: RunKey, rank: int, world_size: int, device: str = "", ranks_by_launcher: int = 1) -> None:
        self._key = key
        self._rank = rank
        self._world_size = world_size
        self._on_device = f"on_device/{device}"
        self._ranks_by_launcher = ranks_by_launcher
        self._store: Any = None
        """The run's part of the job's store."""
        self._changed = threading.Condition()
        self._is_finished, self._is_given_up = threading.Event(), threading.Event()
        self._waiting: deque[RankReport] = deque()
        """Reports of this rank for its thread."""
        self._unsent: deque[RankReport] = deque()
        """Reports of this rank and those below it that the rank above has no room for yet."""
        self._doubt: RankDoubt | None = None
        """What this rank and those below it in the tree doubt, and have not sent to the rank above."""
        self._below: dict[int, _Below] = {}
        self._beats = 0
        self._wrote_at = time.monotonic()
        self._has_all_reports = False
        self.merged: deque[RankReport] = deque()
        self.plan: RunPlan | None = None
        self.failure: str | None = None
        self.cpu_seconds = 0.0
        self.ranks_on_device: int | None = None
        self._thread = threading.Thread(target=self._run, name="flopwatch-ranks", daemon=True)
        self._thread.start()
        _links.add(self)

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    @property
    def absent(self) -> tuple[int, ...]:
        """The ranks directly below this one that have not joined the run, once the plan has arrived."""
        return tuple(sorted(rank for rank, below in self._below.items() if not below.is_here))

    def announce(self, plan: RunPlan) -> None:
        """Send the plan from the logging rank to all others."""
        with self._changed:
            self.plan = plan
            self._changed.notify()

    def send(self, report: RankReport) -> None:
        with self._changed:
            _queue(self._waiting, report)
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
        self._finish()
        # After `give_up` this rank sends no more reports, and its thread may be waiting for the store.
        if not self._is_given_up.is_set():
            self._thread.join(seconds)
        is_in_time = self.is_over or self._has_all_reports  # else the thread waits for the store, not for a rank
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
        """Wait for the plan (the length of windows) from the logging rank; False on timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: self.plan is not None or self.failure is not None, seconds)

    @property
    def _is_logging(self) -> bool:
        return self._rank == self._key.logging_rank

    def _run(self) -> None:
        try:
            job_store = PrefixStore(_prefix(os.environ, self._world_size), find_job_store())
            probe(job_store)
            ranks_per_host = self._lead(job_store) if self._is_logging else self._follow(job_store)
            self._exchange(ranks_per_host)
        except Exception as error:  # for example, the store has died, or the logging rank has no monitor
            with self._changed:
                self.failure = f"{type(error).__name__}: {first_line(error)}"
                self._changed.notify_all()
            if self._store is not None and not self._is_logging:
                with suppress(Exception):
                    self._send(is_last=True)  # so that nobody waits for this rank
        self.cpu_seconds = time.thread_time()

    def _enter(self, job_store: Any, run: str) -> None:
        self._store = PrefixStore(run, job_store)
        self._store.add(self._on_device, 1)
        self._store.add(_ON_ANY_DEVICE, 1)

    def _lead(self, job_store: Any) -> int:
        """On the logging rank, publish the run, wait for the plan and publish it; return the ranks per host."""
        self._enter(job_store, self._key.run)
        self._store.add(_PUBLISHED, 1)
        check_single(self._store)
        self._store.set("log", self._key.log)
        job_store.set(self._key.by_log, self._key.run)
        for pause in pauses(self._world_size):
            with self._changed:
                seconds = None if self.ranks_on_device is not None else pause
                if self._changed.wait_for(lambda: self.plan is not None or self._is_finished.is_set(), seconds):
                    break
            self._look_at_devices()
        self._look_at_devices(at_least=self._ranks_by_launcher)
        check_single(self._store)  # the device count may already contain ranks of another training
        ranks_per_host = layout.ranks_per_host(self._world_size)  # all ranks derive the tree from this one's number
        self._store.set(_PLAN, json.dumps([self.plan and self.plan.window_steps, ranks_per_host]))
        return ranks_per_host

    def _follow(self, job_store: Any) -> int:
        """On another rank, find and join the run, and wait for its plan; return the ranks per host."""
        # Register this rank's device before searching for its run. Otherwise ranks could wait for each other forever:
        # the logging rank sends its plan after all have registered, and a rank may need the plan to find its run.
        self._enter(job_store, self._key.run)
        run: str | None = None
        for pause in pauses(self._world_size):
            self._look_at_devices()
            if run is None and (run := find_run(job_store, self._key, self._rank)) is not None:
                if run != self._key.run:
                    self._enter(job_store, run)
                self._store.set(_alive(self._rank), "0")
            if run is not None and self._store.check([_PLAN]):
                break
            if self._is_given_up.wait(pause):
                raise FlopwatchError(f"rank {self._key.logging_rank} has no monitor of this run; add one on every rank")
        self._look_at_devices(at_least=self._ranks_by_launcher)
        window_steps, ranks_per_host = json.loads(_peek(self._store, _PLAN) or "")
        with self._changed:
            self.plan = None if window_steps is None else RunPlan(window_steps)
            self._changed.notify_all()
        return int(ranks_per_host)

    def _look_at_devices(self, *, at_least: int | None = None) -> None:
        """Count the ranks on this rank's device, once all are there. With `at_least`, the larger of it and those there.

        A rank that was registered in two runs of one name is counted twice, so there are never more than all ranks.
        """
        if self.ranks_on_device is not None:
            return
        is_complete = int(self._store.add(_ON_ANY_DEVICE, 0)) >= self._world_size
        if is_complete or at_least is not None:
            counted = min(int(self._store.add(self._on_device, 0)), self._world_size)
            self.ranks_on_device = counted if is_complete else max(counted, at_least or 1)

    def _exchange(self, ranks_per_host: int) -> None:
        """Pass the reports of this rank and of those below it on, until all of them have ended."""
        children = layout.children(self._rank, self._key.logging_rank, self._world_size, ranks_per_host)
        open_slots(self._store, children)
        self._below = {child: _Below() for child in children}
        for report in aligned([self._own_reports(), *map(self._reports_of, self._below.values())]):
            if self._is_logging:
                with self._changed:
                    self.merged.append(report)
                    self._changed.notify_all()
            else:
                _queue(self._unsent, report)
                self._send()
            self.cpu_seconds = time.thread_time()
        self._has_all_reports = True
        if self._is_logging:
            with suppress(RuntimeError):  # all reports are there, so it does not matter if the store has ended
                self._store.set(_OVER, "")  # so that later monitors do not join this run
                check_single(self._store)
            return
        waiting = pauses(self._world_size)
        while not self._send(is_last=True) and self._pause(next(waiting)):
            pass
        if self._rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            # The store is probably in this process, and the logging rank in another one still reads from it.
            while not self._store.check([_OVER]) and self._pause(next(waiting)):
                pass

    def _own_reports(self) -> Iterator[RankReport]:
        while True:
            with self._changed:
                seconds = _LONGEST_PAUSE_FOR_REPORTS_SECONDS if self._unsent else _BEAT_SECONDS
                self._changed.wait_for(lambda: bool(self._waiting) or self._is_finished.is_set(), seconds)
                report = self._waiting.popleft() if self._waiting else None
            if report is not None:
                yield report
            elif self._is_finished.is_set():
                return
            else:
                self._keep_in_touch()

    def _reports_of(self, child: _Below) -> Iterator[RankReport]:
        while True:
            waiting = pauses(self._world_size // layout.FAN_OUT, _LONGEST_PAUSE_FOR_REPORTS_SECONDS)
            while not child.reports and not child.is_over:
                pause = next(waiting)
                if not self._pause(pause):
                    return
                self._read(pause)
                self._keep_in_touch()
            if not child.reports:
                return
            yield child.reports.popleft()

    def _pause(self, seconds: float) -> bool:
        """Wait, but only until this rank finishes; False once it has given up."""
        (self._is_given_up if self._is_finished.is_set() else self._is_finished).wait(seconds)
        return not self._is_given_up.is_set()

    def _read(self, waited_seconds: float) -> None:
        """Read what those ranks below have written whose next report is missing."""
        missing = {rank: below for rank, below in self._below.items() if not (below.is_over or below.reports)}
        messages = read_slots(self._store, list(missing))
        for rank, below in missing.items():
            if (message := messages.get(rank)) is None:
                self._listen(rank, below, waited_seconds)
                continue
            below.reports.extend(message.reports)
            below.is_here, below.is_over = True, message.is_last
            below.silent_seconds, below.next_look_seconds = 0.0, _FIRST_LOOK_SECONDS
            self.add_doubt(message.doubt)

    def _listen(self, rank: int, below: _Below, waited_seconds: float) -> None:
        """Look, from time to time, whether a silent rank is alive."""
        below.silent_seconds += waited_seconds
        if below.silent_seconds < below.next_look_seconds:
            return
        below.next_look_seconds = below.silent_seconds + _LOOK_SECONDS
        beat = _peek(self._store, _alive(rank))
        below.is_here |= beat is not None
        if beat != below.beat:
            below.beat, below.silent_seconds, below.next_look_seconds = beat, 0.0, _LOOK_SECONDS
        below.is_over = below.silent_seconds >= (_LOST_SECONDS if below.is_here else _ABSENT_SECONDS)

    def _keep_in_touch(self) -> None:
        if self._is_logging:
            return
        if self._unsent:
            self._send()
        elif time.monotonic() - self._wrote_at >= _BEAT_SECONDS:
            self._beats += 1
            self._store.set(_alive(self._rank), str(self._beats))
            self._wrote_at = time.monotonic()

    def _send(self, *, is_last: bool = False) -> bool:
        """Write what is unsent for the rank above; False if that has not read the last message yet."""
        message = Message(list(self._unsent), self.take_doubt(), is_last)
        if not write_slot(self._store, self._rank, message):
            self.add_doubt(message.doubt)
            return False
        self._unsent.clear()
        self._wrote_at = time.monotonic()
        return True


def _queue(reports: deque[RankReport], report: RankReport) -> None:
    if len(reports) >= _MOST_WAITING:
        report = extend(reports.pop(), report)
    reports.append(report)


def find_job_store() -> Any:
    """The store of the default process group, which all ranks of the training share, for use in another thread.

    A `TCPStore` answers one call after the other on each connection, so the link opens one of its own: its calls do not
    delay those of the training, nor does a wait of the training delay them. The other stores lock themselves for each
    call and have no connection.
    """
    try:
        shared = store = default_store()
    except FlopwatchError:  # this torch has no such function, so use the address that torchrun sets
        host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
        if not host or not port.isdigit():
            raise FlopwatchError("the store of the process group cannot be found in this release of torch") from None
        return TCPStore(host, int(port), is_master=False, wait_for_workers=False)
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if isinstance(store, FileStore | HashStore):
        return shared
    if not isinstance(store, TCPStore):
        raise FlopwatchError(f"the process group's store is a {type(store).__name__}, which flopwatch cannot use")
    if hasattr(shared, "clone"):  # a new connection with the same prefixes
        return shared.clone()
    return TCPStore(store.host, store.port, is_master=False, wait_for_workers=False)


def _prefix(environment: Mapping[str, str], world_size: int) -> str:
    """The prefix of all keys. torchrun may keep a store across restarts, so it differs after each restart.

    It also differs between releases of flopwatch, because the layout of their reports may differ.

    >>> _prefix({"TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_RESTART_COUNT": "2"}, 8).replace(__version__, "1.0")
    'flopwatch/1.0/a/2/8'
    """
    names = "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"
    return "/".join(["flopwatch", __version__, *(environment.get(name, "") for name in names), str(world_size)])


def probe(store: Any) -> None:
    """Raise an error unless the store keeps what is written to it. For torch's `FakeStore`, every key exists."""
    key, value = f"probe/{secrets.token_hex(8)}", secrets.token_hex(8)
    is_there_before = store.check([key])
    store.set(key, value)
    is_kept = not is_there_before and _peek(store, key) == value
    store.delete_key(key)
    if not is_kept:
        raise FlopwatchError("the store of the process group does not keep what is written to it")


def _peek(store: Any, key: str) -> str | None:
    """The value of a key, None if it is missing; `get` would wait for it. Such a comparison never changes a value."""
    missing = "\0missing"
    found = store.compare_set(key, missing, missing).decode()
    return None if found == missing else found


def check_single(store: Any) -> None:
    """Raise an error if another training has published the same run.

    For example, two trainings share one store and differ only by a prefix that the user has given it, in a release of
    torch whose stores have no `clone`; or ranks were restarted on a store that still has the keys of the last attempt.
    """
    if int(store.add(_PUBLISHED, 0)) != 1:
        raise FlopwatchError("another training uses the same store, so ranks of both could be mixed up")


def find_run(job_store: Any, key: RunKey, rank: int) -> str | None:
    """Find the run to which this rank's monitor belongs; None while that is not certain.

    A run with the same log path is the right one. If ranks write to different paths (`out/rank3`, a disk of the node),
    the n-th monitor of this rank takes the n-th run of the logging rank, or the next one that has not ended and that
    this rank has not joined. That could be the run of another monitor, so it is taken only if its log belongs to no
    other monitor of this process, and only once the logging rank has sent its `RunPlan`. By then, all monitors that
    were started together have published their runs.
    """
    if (run := _peek(job_store, key.by_log)) is not None:
        return run
    while (store := PrefixStore(key.run, job_store)).check([_OVER]) or store.check([_alive(rank)]):
        key = replace(key, number=key.number + 1)
    is_certain = store.check([_PLAN]) and int(store.add(_PUBLISHED, 0)) == 1
    return key.run if is_certain and _peek(store, "log") not in key.known_logs else None


def pauses(ranks: int, longest_seconds: float = _LONGEST_PAUSE_SECONDS) -> Iterator[float]:
    """Yield the pauses between polls of so many ranks, in seconds: a tenth of the time waited so far, within limits."""
    began = time.monotonic()
    shortest = max(_SHORTEST_PAUSE_SECONDS, ranks / _MOST_POLLS_PER_SECOND)
    while True:
        waited = time.monotonic() - began
        yield max(shortest, min(0.1 * waited, longest_seconds))


def _alive(rank: int) -> str:
    """The key by which a rank says that it has joined the run and is alive."""
    return f"alive/{rank}"


def _slot(rank: int) -> str:
    return f"slot/{rank}"


def open_slots(store: Any, ranks: Sequence[int]) -> None:
    """Make sure that the slots exist, so that reading them does not wait."""
    for rank in ranks:
        store.compare_set(_slot(rank), "", "")


def write_slot(store: Any, rank: int, message: Message) -> bool:
    """Write a message to the slot of a rank; False if the slot is not empty."""
    text = message.to_json()
    return bool(store.compare_set(_slot(rank), "", text).decode() == text)


def read_slots(store: Any, ranks: Sequence[int]) -> dict[int, Message]:
    """Read and empty the slots of these ranks. Nobody writes to a slot that is not empty, so nothing gets lost."""
    texts = store.multi_get([_slot(rank) for rank in ranks])
    messages = {rank: Message.from_json(text) for rank, text in zip(ranks, texts, strict=True) if text}
    emptied = [_slot(rank) for rank, message in messages.items() if not message.is_last]
    if emptied:
        store.multi_set(emptied, [""] * len(emptied))
    for rank, message in messages.items():
        if message.is_last:
            store.delete_key(_slot(rank))
    return messages


def _park(thread: threading.Thread) -> None:
    """Let a thread that waits for an answer of the store wait until the process has ended.

    If the answer came while the interpreter ends, Python would end the thread inside of torch's C++ code, which aborts
    the process; Python 3.14 lets such threads wait by itself. The thread is parked in a signal handler of the C library.
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
