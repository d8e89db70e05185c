"""A lease says which process works on something, and whether that process is alive.

It is held by the supervisor of a trial (`started.json`, `supervisor.json`) and by the runner of a sweep's folder
(`runners/N.runner`, `runners/N.beat`). It works on any shared file system, without locks and without comparing clocks
of different hosts, and relies only on what NFS guarantees: link(2), O_EXCL and rename are atomic, and files of another
host become visible in the end. Only one process can create the file that takes the lease. It then rewrites a small
heartbeat file. A reader measures with its own clock for how long the heartbeat has not changed; of a process on its own
host it asks the kernel instead. Supervisors import this module, so it uses the standard library only.
"""

import contextlib
import errno
import functools
import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from flopwatch import process
from flopwatch.files import read_json, read_object
from flopwatch.records.trial_files import STARTED, SUPERVISOR_HEARTBEAT
from flopwatch.sweep.progress import padded

BEAT_SECONDS = 5.0  # far below `visible_seconds`, so that a process does not look dead after one lost write
_WITHDRAWN = "withdrawn"
"""Value of `attempt` in the file of a lease that nobody can take any more."""
_ENDED, _WAITING = "ended", "waiting: "
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


def visible_seconds() -> float:
    """How long to wait until files of another host must be visible.

    NFS clients cache the attributes of folders for 60 s by default (the mount option `acdirmax`); sites with a longer
    time set FLOPWATCH_VISIBLE_SECONDS.
    """
    return _seconds(os.environ.get("FLOPWATCH_VISIBLE_SECONDS") or "90")


@functools.cache  # so that a wrong value is said once
def _seconds(given: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 <= (seconds := float(given)) < math.inf:
            return seconds
    message = f"FLOPWATCH_VISIBLE_SECONDS={given!r} is not a number of seconds, 0 or more; using 90"
    with contextlib.suppress(OSError):
        os.write(2, f"flopwatch: {message}\n".encode(errors="replace"))
    return 90.0


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
    identity = {"boot_id": identity.get("boot"), **identity}  # `boot` is the name in folders of commit f953919
    if identity["boot_id"] is None or _is_from_an_earlier_boot(identity):
        return False  # without a boot id, the file is damaged
    return process.is_alive(identity) is True if process.is_of_here(identity) else None


def _is_from_an_earlier_boot(identity: Mapping[str, Any]) -> bool:
    """Whether the process ran on this machine before it booted; nothing survives that.

    The host's name must be the same too, because machines and containers made from one image may share a machine id.
    """
    boot_id = process.pid_scope().get("boot_id", "")
    if not boot_id or identity["boot_id"] in ("", boot_id):
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


@dataclass(frozen=True, slots=True)
class Holder:
    """What a reader knows about the process that holds a lease.

    Attributes:
        life: `gone` if the process has ended, or has ended the lease, or if it is on another host and its heartbeat has
            not changed for `visible_seconds`. `unknown` if it is on another host and its heartbeat has not changed yet
            since this process first read it.
        facts: What `Lease.take` wrote. Empty if nobody has taken the lease, as far as this host sees.
        is_here: Whether `life` is what this host's kernel says.
        silent_seconds: For how long this process has seen the heartbeat unchanged.
        waits: The system's message while the holder waits for space on a full disk; empty otherwise.
    """

    life: Literal["alive", "gone", "unknown"]
    facts: Mapping[str, Any]
    is_here: bool
    silent_seconds: float
    waits: str = ""

    @property
    def may_be_alive(self) -> bool:
        return bool(self.facts) and self.life != "gone"

    @property
    def is_withdrawn(self) -> bool:
        return self.facts.get("attempt") == _WITHDRAWN


class Lease:
    """A lease as its holder and as other processes see it. `clock` is that of a reader."""

    def __init__(self, file: Path, heartbeat: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.file, self.heartbeat, self.clock = file, heartbeat, clock
        self._written: Mapping[str, Any] = {}
        self._marks: Mapping[str, Any] = {}
        self._beats, self._next_beat = 0, 0.0
        self._seen: tuple[Any, Mapping[str, Any]] | None = None
        self._seen_since, self._has_changed = -math.inf, False

    def take(self, facts: Mapping[str, Any], **marks: Any) -> bool:
        """Take the lease for this process and note `facts`; return False if it was taken or withdrawn before.

        `marks` are written with each heartbeat.
        """
        self._written, self._marks = {**own_identity(), "unix_time": time.time(), **facts}, marks
        self._beats, self._next_beat = 0, 0.0
        return create_exclusively(self.file, self._written)

    def withdraw(self) -> bool:
        """Take the lease so that no process can take it; return False if a process has taken it already."""
        content = {**own_identity(), "attempt": _WITHDRAWN, "unix_time": time.time()}
        try:
            return create_exclusively(self.file, content) or read_object(self.file).get("attempt") == _WITHDRAWN
        except OSError:
            if self.file.parent.is_dir():
                raise
            return True  # no process can take it without the folder

    def owner(self) -> Literal["this process", "another", "nobody"]:
        """Whose lease it is, for the process that took it: its file may have been deleted, and taken again."""
        content = read_json(self.file)
        if isinstance(content, dict):
            return "this process" if content == self._written else "another"
        return "this process" if os.path.lexists(self.file) else "nobody"  # a damaged file may be ours

    def is_due(self) -> bool:
        return time.monotonic() >= self._next_beat

    def beat(self, waits: str = "") -> bool:
        """Show that this process is alive; return False if another process has taken the lease meanwhile.

        `waits` is as in `Holder`.
        """
        self._next_beat = time.monotonic() + BEAT_SECONDS
        owner = self.owner()
        if owner == "this process":
            self._write(f"{_WAITING}{waits}" if waits else "alive")
        return owner != "another"

    def end(self) -> None:
        """Write that the process exits, so that readers need not wait for a timeout."""
        if self.owner() == "this process":
            self._write(_ENDED)

    def _write(self, state: str) -> None:
        """Rewrite the file in place, which works on a full disk; close it, because NFS clients send data on close."""
        self._beats += 1
        content = padded({"beats": self._beats, "state": state, **self._marks})
        with contextlib.suppress(OSError):
            handle = os.open(self.heartbeat, os.O_WRONLY | os.O_CREAT, 0o644)
            try:
                os.pwrite(handle, content, 0)
            finally:
                os.close(handle)

    def holder(self) -> Holder:
        """Who holds the lease. One whose heartbeat has stopped stays `gone` until its heartbeat changes."""
        content, said, now = read_json(self.file), read_object(self.heartbeat), self.clock()
        if (content, said) != self._seen:  # with `content`, because the time before a lease is taken is no silence
            self._has_changed = self._seen is not None and said != self._seen[1]
            self._seen, self._seen_since = (content, said), now
        silent, state = now - self._seen_since, str(said.get("state", ""))
        facts: dict[str, Any] = content if isinstance(content, dict) else {}
        is_alive = is_alive_here(facts) if isinstance(content, dict) else None
        # A process may end its lease and live on, as one does that runs several sweeps.
        is_over = facts.get("attempt") == _WITHDRAWN or state == _ENDED or is_alive is False
        life: Literal["alive", "gone", "unknown"] = "alive" if is_alive or self._has_changed else "unknown"
        if is_over or (is_alive is None and silent >= visible_seconds()):
            life = "gone"
        waits = state.removeprefix(_WAITING) if state.startswith(_WAITING) else ""
        return Holder(life, facts, is_alive is not None, silent, waits)


@functools.cache  # one for each trial, because it must remember when the heartbeat last changed
def trial_lease(folder: Path) -> Lease:
    """The lease that the trial's supervisor holds."""
    return Lease(folder / STARTED, folder / SUPERVISOR_HEARTBEAT)
