"""Who may run a trial, and whether he lives: on any file system, without locks and without comparing clocks.

What is asked of the file system is what NFS keeps: link(2) and O_EXCL are atomic at the server, rename is atomic, and
what another host writes comes into sight late. So a claim is a file that only one can make, and life is a file whose
content changes: a reader judges by his own clock how long he has seen it unchanged. On one's own host the kernel
knows at once whether a process lives. Standard library only: supervisors start with it.
"""

import contextlib
import errno
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flopwatch.records.reading import BrokenRecordError, UnreadableError, opened_regular, read_json, read_record

STARTED = "started.json"
PULSE = "supervisor.json"
BEAT_SECONDS = 5.0
WITHDRAWN = "withdrawn"

_BEAT_BYTES = 160
_WORD_SECONDS = 1.0
_ENDED = "ended"
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


def visible_seconds() -> float:
    """How long one waits for what another host has written: NFS keeps attributes of folders for 60 s by default.

    A site whose `acdirmax` is longer sets FLOPWATCH_VISIBLE_SECONDS.
    """
    return float(os.environ.get("FLOPWATCH_VISIBLE_SECONDS", "90"))


def own_identity() -> dict[str, Any]:
    """What tells this process from all others of all hosts, after a reboot too."""
    return {"host": os.uname().nodename, "pid": os.getpid(), "start_ticks": start_ticks(os.getpid()), **_where()}


def _where() -> dict[str, str]:
    """The boot of this machine, and what its process numbers mean: containers count from 1."""
    found = {"boot": "", "pid_namespace": ""}
    with contextlib.suppress(OSError):
        found["boot"] = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        found["pid_namespace"] = os.readlink("/proc/self/ns/pid")
    return found


def this_boot() -> str:
    return _where()["boot"]


def start_ticks(pid: int) -> int | None:
    """When the kernel started it, in ticks since boot; None when it is gone, a zombie, or where there is no /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return None if fields[0] in (b"Z", b"X") else int(fields[19])
    except (OSError, ValueError, IndexError):
        return None


def is_alive_here(identity: Mapping[str, Any]) -> bool | None:
    """Whether that process lives; None when it is, or was, one of another host and nobody here can know."""
    here = _where()
    if "boot" not in identity:
        return False  # of a version that held a lock instead, or damaged: nobody is to be waited for
    if not here["boot"] or any(identity.get(key) != value for key, value in here.items()):
        return None
    pid, ticks = identity.get("pid"), identity.get("start_ticks")
    return isinstance(pid, int) and ticks is not None and start_ticks(pid) == ticks


def make_exclusively(file: Path, content: Mapping[str, Any]) -> bool:
    """Make the file with this content; False when it is there already. Of many who try one succeeds.

    By a link to a file already written, so that nobody ever reads it half; the number of links tells whether it
    succeeded even if the server's answer was lost (open(2), on NFS).
    """
    beside = file.with_name(f".{file.name}.{os.urandom(6).hex()}")  # two hosts may have the same process number
    beside.write_text(json.dumps(content))
    try:
        os.link(beside, file)
    except FileExistsError:
        return os.stat(beside).st_nlink == 2
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        return _make_by_open(file, beside)
    finally:
        beside.unlink(missing_ok=True)
    return True


def _make_by_open(file: Path, written: Path) -> bool:
    """On file systems without links."""
    try:
        handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        return False
    with os.fdopen(handle, "wb") as stream:
        stream.write(written.read_bytes())
    return True


def claim(folder: Path, attempt: str, facts: Mapping[str, Any] | None = None) -> bool:
    """Take the trial; False when another has it, had it, or when it was withdrawn. The facts are written along."""
    content = {**own_identity(), "attempt": attempt, "unix_time": time.time(), **(facts or {})}
    return make_exclusively(folder / STARTED, content)


def withdraw(folder: Path) -> bool:
    """Keep every supervisor from starting what lies in this folder; False when one has started it."""
    content = {**own_identity(), "attempt": WITHDRAWN, "unix_time": time.time()}
    try:
        return make_exclusively(folder / STARTED, content) or is_withdrawn(read_json(folder / STARTED))
    except OSError:
        if folder.is_dir():
            raise
        return True  # no folder: nothing to start


def is_withdrawn(content: Any) -> bool:
    return isinstance(content, dict) and content.get("attempt") == WITHDRAWN


class SignOfLife:
    """A small file whose content changes as long as its writer lives.

    Args:
        file: Rewritten at most every BEAT_SECONDS, by `beat`.
        facts: Written along.
    """

    def __init__(self, file: Path, facts: Mapping[str, Any]) -> None:
        self._file, self._facts = file, dict(facts)
        self._count, self._next = 0, 0.0

    def is_due(self) -> bool:
        return time.monotonic() >= self._next

    def beat(self, state: str = "alive") -> None:
        """Into the same file and closed, which is when an NFS client sends it; a full disk has room for it."""
        self._next = time.monotonic() + BEAT_SECONDS
        self._count += 1
        content = json.dumps({"beats": self._count, "state": state, **self._facts})
        with contextlib.suppress(OSError):
            handle = os.open(self._file, os.O_WRONLY | os.O_CREAT, 0o644)
            try:
                os.pwrite(handle, content.encode().ljust(_BEAT_BYTES), 0)
            finally:
                os.close(handle)

    def end(self) -> None:
        """The writer leaves in order, so nobody has to wait for its silence."""
        self.beat(_ENDED)


class Pulse:
    """A supervisor's own sign of life, in a file for its runner and on a pipe for its guard.

    Written by the thread that watches the worker, so that a supervisor that is stuck falls silent.

    Args:
        folder: The trial's.
        attempt: Its token.
        guard: The pipe; None without a guard.
    """

    def __init__(self, folder: Path, attempt: str, guard: int | None = None) -> None:
        self._claim, self._attempt, self._guard = folder / STARTED, attempt, guard
        self._me = own_identity()
        self._sign = SignOfLife(folder / PULSE, {"attempt": attempt})
        self._is_superseded = False
        self._next_word = 0.0

    def beat(self) -> None:
        """Called as often as one likes."""
        if self._guard is not None and time.monotonic() >= self._next_word:
            self._next_word = time.monotonic() + _WORD_SECONDS
            with contextlib.suppress(BlockingIOError, BrokenPipeError):
                os.write(self._guard, b".")
        if self._sign.is_due() and not self.look_again():
            self._sign.beat()

    def end(self) -> None:
        self._sign.end()

    def superseded(self) -> str | None:
        """Why to stop, when the trial is another's by now: we were silent for so long that we were given up."""
        return (
            "the trial was given up and placed again while its supervisor was silent" if self._is_superseded else None
        )

    def look_again(self) -> bool:
        """Whether the claim is another's by now."""
        claimed = read_json(self._claim)
        if isinstance(claimed, dict):  # else the trial may have deleted its folder
            keys = ("host", "pid", "start_ticks", "boot")
            is_mine = claimed.get("attempt") == self._attempt and all(claimed.get(key) == self._me[key] for key in keys)
            self._is_superseded = not is_mine
        return self._is_superseded


class Watcher:
    """Whether others live, as this process sees it.

    Args:
        clock: Of this process; others' clocks do not count.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: dict[Path, tuple[bytes, float]] = {}

    def is_alive(self, claim: Path, sign: Path) -> bool:
        """False once that is certain, or once it has been silent for longer than anything takes to come into sight.

        Args:
            claim: The file it claimed with.
            sign: Its sign of life.
        """
        claimed = read_json(claim)
        if not isinstance(claimed, dict) or is_withdrawn(claimed):
            return False
        here = is_alive_here(claimed)
        if here is None:
            here = not has_ended(sign) and self.silent_seconds(sign) < visible_seconds()
        if not here:
            self._seen.pop(sign, None)
        return here

    def silent_seconds(self, sign: Path) -> float:
        """For how long a sign of life has been the same, since this process first looked."""
        now, beat = self._clock(), _read(sign)
        before, since = self._seen.get(sign, (None, now))
        if beat != before:
            self._seen[sign] = (beat, now)
            return 0.0
        return now - since

    def has_beaten(self, sign: Path) -> bool:
        """True when it has changed under this process's eyes: its writer lives."""
        before = self._seen.get(sign)
        self.silent_seconds(sign)
        return before is not None and before[0] != self._seen[sign][0]

    def forget(self, sign: Path) -> None:
        self._seen.pop(sign, None)


def has_ended(sign: Path) -> bool:
    """True when its writer said that it leaves."""
    try:
        content: Any = json.loads(_read(sign))
    except (ValueError, RecursionError):
        return False
    return isinstance(content, dict) and content.get("state") == _ENDED


def _read(file: Path) -> bytes:
    try:
        with opened_regular(file) as stream:
            return stream.read(4096)
    except (FileNotFoundError, UnreadableError):
        return b""


# What a worker is doing, in a small file: written by its main thread only, so that a stuck one falls silent.


FILE = "heartbeat.json"
_SIZE = 96


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a trial is; two equal ones mean that nothing happened in between."""

    phase: str = "start"
    step: int | None = None

    @property
    def text(self) -> str:
        return self.phase if self.step is None else f"{self.phase} step {self.step}"


class Heartbeat:
    """Writes progress. One write of fixed size into the same file: a few microseconds, and never half a line."""

    def __init__(self, trial_dir: Path, file: str = FILE) -> None:
        self._handle = os.open(trial_dir / file, os.O_WRONLY | os.O_CREAT, 0o644)  # open as long as the worker lives

    def beat(self, phase: str, step: int | None = None) -> None:
        content = json.dumps({"phase": phase, "step": step}).encode()
        os.pwrite(self._handle, content.ljust(_SIZE), 0)


def read_progress(trial_dir: Path, file: str = FILE) -> Progress:
    try:
        return read_record(Progress, read_json(trial_dir / file))
    except BrokenRecordError:
        return Progress()
