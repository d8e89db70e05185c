"""A claim says which process works on something, and whether that process is alive.

The supervisor of a trial claims it by `started.json`, the runner of a sweep claims its folder by `runners/N.runner`. Of
several processes only one can create such a file, also on a shared file system. While it works it touches the file.
Whether a process of this host is alive, the kernel says; a process of another host or container counts as gone if a
reader has seen its file untouched for `visible_seconds`, by the reader's own clock. Supervisors import this module, so
it uses the standard library only.
"""

import contextlib
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
from flopwatch.errors import InputError
from flopwatch.files import read_json
from flopwatch.records.trial_files import STARTED

BEAT_SECONDS = 5.0  # far below `visible_seconds`, so that a process does not look gone after one lost touch
_WITHDRAWN = "withdrawn"
"""Value of `attempt` in the claim of a trial that nobody may start any more."""


def visible_seconds() -> float:
    """How long to wait until files of another host must be visible.

    NFS clients cache the attributes of folders for 60 s by default (the mount option `acdirmax`); sites with a longer
    time set FLOPWATCH_VISIBLE_SECONDS.
    """
    given = os.environ.get("FLOPWATCH_VISIBLE_SECONDS") or "90"
    with contextlib.suppress(ValueError):
        if 0 <= (seconds := float(given)) < math.inf:
            return seconds
    raise InputError(f"FLOPWATCH_VISIBLE_SECONDS={given!r} is not a number of seconds, 0 or more; write 90")


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
    if identity.get("boot_id") is None or _is_from_an_earlier_boot(identity):
        return False  # without a boot id, the file is damaged
    return process.is_alive(identity) is True if process.is_of_here(identity) else None


def is_elsewhere(identity: Mapping[str, Any]) -> bool:
    """Whether the process belongs to another host. A process of another container of this host does not."""
    boot_id = process.pid_scope().get("boot_id")
    return is_alive_here(identity) is None and boot_id is not None and identity["boot_id"] != boot_id


def _is_from_an_earlier_boot(identity: Mapping[str, Any]) -> bool:
    """Whether the process ran on this machine before it booted; nothing survives that.

    The host's name must be the same too, because machines and containers made from one image may share a machine id.
    """
    boot_id = process.pid_scope().get("boot_id", "")
    if not boot_id or identity["boot_id"] in ("", boot_id):
        return False
    return identity.get("machine") == _machine() != "" and identity.get("host") == os.uname().nodename


@dataclass(frozen=True, slots=True)
class Holder:
    """What a reader knows about the process that holds a claim.

    A process that this host's kernel does not know is `gone` after `visible_seconds` of silence, and `unknown` before
    that, unless this reader has seen its file touched.
    """

    facts: Mapping[str, Any]  # what `Claim.take` wrote; empty if this host cannot read a claim yet
    life: Literal["alive", "gone", "unknown"]
    is_here: bool  # `life` is what this host's kernel says

    @property
    def may_be_alive(self) -> bool:
        return bool(self.facts) and self.life != "gone"

    @property
    def is_withdrawn(self) -> bool:
        return self.facts.get("attempt") == _WITHDRAWN


class Claim:
    """A claim as its holder and as other processes see it. `clock` is that of a reader."""

    def __init__(self, file: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.file, self.clock = file, clock
        self._written: Mapping[str, Any] = {}
        self._next_beat = 0.0
        self._seen: tuple[object, float | None] | None = None
        self._seen_since, self._was_touched = 0.0, False

    def take(self, **facts: Any) -> bool:
        """Claim it for this process and note `facts`; return False if it was claimed before."""
        content = {**own_identity(), "unix_time": time.time(), **facts}
        try:
            handle = os.open(self.file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            return False
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as stream:
                json.dump(content, stream)
        except OSError:  # a full disk
            self.file.unlink()
            raise
        self._written, self._next_beat = content, 0.0
        return True

    def withdraw(self) -> bool:
        """Claim a trial so that nobody can start it; return False if a process has claimed it already."""
        try:
            return self.take(attempt=_WITHDRAWN) or self.holder().is_withdrawn
        except (FileNotFoundError, NotADirectoryError):
            return True  # nobody can claim it without its folder

    def owner(self) -> Literal["this process", "another", "nobody"]:
        """Whose claim it is, for the process that took it: its file may have been deleted, and created again."""
        content = read_json(self.file)
        if isinstance(content, dict):
            return "this process" if content == self._written else "another"
        return "this process" if os.path.lexists(self.file) else "nobody"  # a damaged file may be ours

    def beat(self) -> bool:
        """Show that this process is alive, if that is due; return False if another process has the claim now."""
        if time.monotonic() < self._next_beat:
            return True
        self._next_beat = time.monotonic() + BEAT_SECONDS
        owner = self.owner()
        if owner == "this process":
            with contextlib.suppress(OSError):
                os.utime(self.file)  # works on a full disk
        return owner != "another"

    def release(self) -> None:
        if self.owner() == "this process":
            self.file.unlink(missing_ok=True)

    def holder(self) -> Holder:
        """Who holds the claim. One who is `gone` for being silent stays so until the file is touched."""
        content, now = read_json(self.file), self.clock()
        touched = os.stat(self.file).st_mtime if os.path.exists(self.file) else None
        if (content, touched) != self._seen:  # with `content`, because the time before a claim is taken is no silence
            self._was_touched = self._seen is not None and self._seen[0] == content
            self._seen, self._seen_since = (content, touched), now
        facts: dict[str, Any] = content if isinstance(content, dict) else {}
        is_alive = is_alive_here(facts) if isinstance(content, dict) else None
        life: Literal["alive", "gone", "unknown"] = "alive" if is_alive or self._was_touched else "unknown"
        is_silent = is_alive is None and now - self._seen_since >= visible_seconds()
        if is_alive is False or is_silent or facts.get("attempt") == _WITHDRAWN:
            life = "gone"
        return Holder(facts, life, is_alive is not None)


@functools.cache  # one for each trial, because it must remember when its file was last touched
def trial_claim(folder: Path) -> Claim:
    """The claim of the trial's supervisor."""
    return Claim(folder / STARTED)
