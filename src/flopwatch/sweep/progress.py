"""How far a worker got, and writing on a full disk, which waits for space and must not look like a hang.

Supervisors import this module, so it uses the standard library only.
"""

import contextlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from flopwatch.decode import read_or_none
from flopwatch.files import is_full_disk, read_json
from flopwatch.records.trial_files import HEARTBEAT

_Result = TypeVar("_Result")
_TRY_SECONDS = 0.5  # time between two tries to write
_PADDED_BYTES = 160
_FULL_BYTES = 16 << 10  # less does not hold the files of a result


def when_there_is_space(write: Callable[[], _Result], waits: Callable[[str], None] = lambda why: None) -> _Result:
    """Call `write` again and again until it does not fail because the disk is full, and return what it returns.

    `waits` is called before each pause with the system's message. It may raise an exception to give up.
    """
    while True:
        try:
            return write()
        except OSError as error:
            if not is_full_disk(error):
                raise
            waits(str(error.strerror))
        time.sleep(_TRY_SECONDS)


def full_disk(place: Path) -> str:
    """Says that trials wait for space if the disk of this folder is full; empty otherwise, also for a full quota."""
    with contextlib.suppress(OSError):
        disk = os.statvfs(place)
        if disk.f_bavail * disk.f_frsize < _FULL_BYTES:
            return f"waiting: no space is left on the disk of {place.resolve()}; trials go on when there is"
    return ""


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

    def _write(self, content: dict[str, Any]) -> None:
        # Of a fixed size, so that a rewrite in place replaces all of the earlier content; works on a full disk.
        os.pwrite(self._handle, json.dumps(content).encode().ljust(_PADDED_BYTES)[:_PADDED_BYTES], 0)


def read_progress(trial_dir: Path, file: str = HEARTBEAT) -> Progress:
    return read_or_none(Progress, read_json(trial_dir / file)) or Progress()
