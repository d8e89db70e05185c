"""Files in a trial's folder that say which process runs the trial, whether it is alive, and how far it got.

They work on any shared file system, without locks and without comparing clocks of different hosts. They rely only
on what NFS guarantees: link(2), O_EXCL and rename are atomic, and files of another host become visible in the end. A
process claims a trial by creating `started.json`, which only one process can do. It shows that it is alive by rewriting
a small heartbeat file. A reader measures with its own clock for how long the content has not changed. For processes of
its own host a reader asks the kernel instead. Supervisors import this module, so it uses the standard library only.
"""

import contextlib
import errno
import functools
import hashlib
import json
import math
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flopwatch import process
from flopwatch.decode import read_or_none
from flopwatch.files import read_json, read_object, write_json
from flopwatch.records.trial_files import HEARTBEAT, STARTED, STRAYS, SUPERVISOR_HEARTBEAT
from flopwatch.sweep.full_disk import when_there_is_space
from flopwatch.sweep.host.processes import is_marked

BEAT_SECONDS = 5.0  # far below `visible_seconds`, so that a process does not look dead after one lost write
WITHDRAWN = "withdrawn"
"""Value of `attempt` in a `started.json` that was written so that no supervisor starts the trial any more."""

_GUARD_SECONDS = 1.0  # how often a supervisor writes a byte to the process that kills the trial if the supervisor dies
_PADDED_BYTES = 160  # content is padded to this length, so that a rewrite replaces all of the earlier content
_ENDED = "ended"
_WAITING = "waiting: "
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


_VISIBLE_SECONDS = 90.0


def visible_seconds() -> float:
    """How long to wait until files of another host must be visible.

    NFS clients cache the attributes of folders for 60 s by default (the mount option `acdirmax`); sites with a longer
    time set FLOPWATCH_VISIBLE_SECONDS.
    """
    given = os.environ.get("FLOPWATCH_VISIBLE_SECONDS", "")
    with contextlib.suppress(ValueError):
        if 0 <= (seconds := float(given or _VISIBLE_SECONDS)) < math.inf:
            return seconds
    _refuse_visible_seconds(given)
    return _VISIBLE_SECONDS


@functools.cache  # so that it is said once
def _refuse_visible_seconds(given: str) -> None:
    message = f"FLOPWATCH_VISIBLE_SECONDS={given!r} is not a number of seconds, 0 or more; using {_VISIBLE_SECONDS:g}"
    with contextlib.suppress(OSError):
        os.write(2, f"flopwatch: {message}\n".encode(errors="replace"))


def own_identity() -> dict[str, Any]:
    unknown = {"pid": os.getpid(), "start_ticks": None, "boot_id": ""}
    return {"host": os.uname().nodename, "machine": _machine(), **unknown, **process.own_identity()}


def _machine() -> str:
    """A hash of the machine id, which stays the same when the machine boots again; "" if the system has none.

    It is hashed because systemd asks to keep the id itself confidential (machine-id(5)).
    """
    with contextlib.suppress(OSError):
        if found := Path("/etc/machine-id").read_bytes().strip():
            return hashlib.sha256(b"flopwatch " + found).hexdigest()[:16]
    return ""


def is_alive_here(identity: Mapping[str, Any]) -> bool | None:
    """Whether the process of this identity is alive; None if it belongs to another host or PID namespace."""
    if "boot_id" not in identity or _is_from_an_earlier_boot(identity):
        return False  # without a boot id, the file is damaged
    return process.is_alive(identity) is True if process.is_of_here(identity) else None


def _is_from_an_earlier_boot(identity: Mapping[str, Any]) -> bool:
    """Whether the process ran on this machine before it booted; nothing survives that.

    The host's name must be the same too, because machines and containers made from one image may share a machine id.
    """
    boot_id = process.pid_scope().get("boot_id", "")
    if not boot_id or identity.get("boot_id") in ("", boot_id):
        return False
    return identity.get("machine") == _machine() != "" and identity.get("host") == os.uname().nodename


def create_exclusively(file: Path, content: Mapping[str, Any]) -> bool:
    """Create the file with this content; return False if it exists. Of several processes that try, one succeeds.

    The content is written to a temporary file, which then gets the name by a hard link, so no reader sees half of the
    content. If the name exists, this call may have created it and lost the NFS server's answer; then the temporary file
    has two links (see open(2)).
    """
    beside = file.with_name(f".{file.name}.{os.urandom(6).hex()}")  # not the pid, because two hosts may use the same
    try:
        beside.write_text(json.dumps(content))
        os.link(beside, file)
    except FileExistsError:
        return os.stat(beside).st_nlink == 2
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        return _create_by_open(file, beside)
    finally:
        beside.unlink(missing_ok=True)
    return True


def _create_by_open(file: Path, written: Path) -> bool:
    """As `create_exclusively`, for file systems without hard links."""
    try:
        handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        return False
    with os.fdopen(handle, "wb") as stream:
        stream.write(written.read_bytes())
    return True


def claim(folder: Path, attempt: str, facts: Mapping[str, Any] | None = None) -> bool:
    """Claim the trial for this process by creating `started.json` with `facts`; return False if the file exists."""
    content = {**own_identity(), "attempt": attempt, "unix_time": time.time(), **(facts or {})}
    return create_exclusively(folder / STARTED, content)


def withdraw(folder: Path) -> bool:
    """Claim the trial so that no supervisor can start it; return False if a supervisor has started it already."""
    content = {**own_identity(), "attempt": WITHDRAWN, "unix_time": time.time()}
    try:
        return create_exclusively(folder / STARTED, content) or is_withdrawn(read_json(folder / STARTED))
    except OSError:
        if folder.is_dir():
            raise
        return True  # no supervisor can start a trial without a folder


def is_withdrawn(content: Any) -> bool:
    return isinstance(content, dict) and content.get("attempt") == WITHDRAWN


class LivenessFile:
    """A heartbeat file: its content, with `facts`, changes every few seconds as long as its writer is alive."""

    def __init__(self, file: Path, facts: Mapping[str, Any]) -> None:
        self._file, self._facts = file, dict(facts)
        self._count, self._next = 0, 0.0

    def is_due(self) -> bool:
        return time.monotonic() >= self._next

    def beat(self, state: str = "alive") -> None:
        """Rewrite the file in place, which works on a full disk; close it, because NFS clients send data on close."""
        self._next = time.monotonic() + BEAT_SECONDS
        self._count += 1
        content = json.dumps({"beats": self._count, "state": state, **self._facts})
        with contextlib.suppress(OSError):
            handle = os.open(self._file, os.O_WRONLY | os.O_CREAT, 0o644)
            try:
                os.pwrite(handle, content.encode().ljust(_PADDED_BYTES), 0)
            finally:
                os.close(handle)

    def end(self) -> None:
        """Write that the process exits, so that readers need not wait for a timeout."""
        self.beat(_ENDED)


class SupervisorHeartbeat:
    """A supervisor's heartbeat: a file that the runner reads, and a pipe (`guard`) that the guard process reads.

    The thread that monitors the worker calls `beat`, so that the heartbeat stops if that thread is stuck. If a beat
    finds that another supervisor has claimed the trial, `is_superseded` says so, and this one must stop.
    """

    def __init__(self, folder: Path, attempt: str, guard: int | None = None) -> None:
        self._claim, self._attempt, self._guard = folder / STARTED, attempt, guard
        self._identity = own_identity()
        self._file = LivenessFile(folder / SUPERVISOR_HEARTBEAT, {"attempt": attempt})
        self.is_superseded = False
        self._next_to_guard = 0.0

    def beat(self, waits: str = "") -> None:
        """Write the heartbeats that are due; cheap enough to be called many times a second.

        `waits` is the system's message while the supervisor waits for space on a full disk.
        """
        if self._guard is not None and time.monotonic() >= self._next_to_guard:
            self._next_to_guard = time.monotonic() + _GUARD_SECONDS
            with contextlib.suppress(BlockingIOError, BrokenPipeError):
                os.write(self._guard, b".")
        if self._file.is_due() and not self.check_superseded():
            self._file.beat(f"{_WAITING}{waits}" if waits else "alive")

    def end(self) -> None:
        self._file.end()

    def check_superseded(self) -> bool:
        """Whether `started.json` now names another process or attempt, as `is_superseded` says from now on."""
        if claimed := read_object(self._claim):  # the file is missing if the trial has deleted its folder
            keys = ("host", "pid", "start_ticks", "boot_id")
            is_ours = claimed.get("attempt") == self._attempt and all(
                claimed.get(key) == self._identity[key] for key in keys
            )
            self.is_superseded = not is_ours
        return self.is_superseded


class LivenessWatcher:
    """Finds out whether other processes are alive, from their heartbeat files and the clock of this process."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: dict[Path, tuple[str, float]] = {}

    def is_alive(self, claim: Path, liveness: Path) -> bool:
        """False if the process has ended, or if its heartbeat has not changed for `visible_seconds`.

        The heartbeat of a process that counts as dead stays remembered: it stays dead until its heartbeat changes.
        """
        claimed = read_object(claim)
        if not claimed or is_withdrawn(claimed):
            return False
        is_alive = is_alive_here(claimed)
        if is_alive is None and not has_ended(liveness):
            return self.silent_seconds(liveness) < visible_seconds()
        if not is_alive:
            self._seen.pop(liveness, None)
        return bool(is_alive)

    def silent_seconds(self, liveness: Path) -> float:
        """For how long this process has seen the file unchanged; 0 at the first call."""
        now, content = self._clock(), repr(read_json(liveness))
        if liveness not in self._seen or content != self._seen[liveness][0]:
            self._seen[liveness] = (content, now)
        return now - self._seen[liveness][1]

    def has_changed(self, liveness: Path) -> bool:
        """Whether the file has changed since this process last read it, which means that its writer is alive."""
        before = self._seen.get(liveness)
        self.silent_seconds(liveness)
        return before is not None and before[0] != self._seen[liveness][0]


def has_ended(liveness: Path) -> bool:
    return _state(liveness) == _ENDED


def waits_for_space(folder: Path) -> str:
    """The system's message while the trial's supervisor or worker waits for space on a full disk; "" otherwise."""
    state = _state(folder / SUPERVISOR_HEARTBEAT)
    if state.startswith(_WAITING):
        return state.removeprefix(_WAITING)
    return "" if state == _ENDED else read_progress(folder).waits


def _state(liveness: Path) -> str:
    return str(read_object(liveness).get("state", ""))


@dataclass(frozen=True, slots=True)
class Progress:
    """The phase and step of a worker. If two readings are equal, the worker made no progress in between.

    `waits` is the system's message while the worker waits for space on a full disk, which counts against no limit.
    """

    phase: str = "start"
    step: int | None = None
    waits: str = ""

    @property
    def text(self) -> str:
        place = self.phase if self.step is None else f"{self.phase} step {self.step}"
        return f"{place}, waiting: {self.waits}" if self.waits else place


class Heartbeat:
    """Writes a worker's progress. Only the worker's main thread calls it, so that a stuck worker stops writing.

    One write of fixed size takes a few microseconds, and no reader sees half of it.
    """

    def __init__(self, trial_dir: Path, file: str = HEARTBEAT) -> None:
        place, flags = trial_dir / file, os.O_WRONLY | os.O_CREAT
        self._handle = when_there_is_space(lambda: os.open(place, flags, 0o644))  # stays open until the worker exits
        self._last: dict[str, Any] = {}

    def beat(self, phase: str, step: int | None = None) -> None:
        self._last = {"phase": phase, "step": step}
        when_there_is_space(lambda: self._write(self._last))

    def written(self, write: Callable[[], object]) -> None:
        """Call `write`. While the disk is full, wait for space and say so in the heartbeat, because it is no hang."""
        is_waiting = False

        def say(why: str) -> None:
            nonlocal is_waiting
            is_waiting = True
            with contextlib.suppress(OSError):  # rewriting a file in place works on most full disks, but not on all
                self._write({**self._last, "waits": why})

        when_there_is_space(write, say)
        if is_waiting:
            when_there_is_space(lambda: self._write(self._last))

    def _write(self, content: Mapping[str, Any]) -> None:
        os.pwrite(self._handle, json.dumps(content).encode().ljust(_PADDED_BYTES)[:_PADDED_BYTES], 0)


def read_progress(trial_dir: Path, file: str = HEARTBEAT) -> Progress:
    return read_or_none(Progress, read_json(trial_dir / file)) or Progress()


class Strays:
    """Lists the processes of a trial that have cleared their environment in `strays.json`.

    If the supervisor and its guard are killed together, such processes have neither a parent nor a mark of the trial.
    """

    def __init__(self, trial_dir: Path) -> None:
        self._trial_dir = trial_dir
        self._pids: Sequence[int] = ()
        self._listed: dict[int, int | None] = {}

    def note(self, pids: Sequence[int]) -> None:
        """Update the file if one of these processes, which the last search found, is not marked."""
        if pids is self._pids:
            return
        self._pids = pids
        found = {pid: process.start_ticks(pid) for pid in pids if is_marked(pid, self._trial_dir) is False}
        if found != self._listed:
            self._listed = found
            with contextlib.suppress(OSError):
                write_json(self._trial_dir / STRAYS, {**own_identity(), "processes": list(found.items())})


def kill_strays(trial_dir: Path) -> None:
    content = read_object(trial_dir / STRAYS)
    listed = content.get("processes")
    for entry in listed if isinstance(listed, list) else ():
        with contextlib.suppress(OSError, ValueError, TypeError, OverflowError):
            pid, ticks = entry
            if is_alive_here({**content, "pid": pid, "start_ticks": ticks}) and pid > 1:
                os.kill(pid, signal.SIGKILL)
