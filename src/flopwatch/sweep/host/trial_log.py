"""The log of a trial: what its processes print goes through a pipe to a thread, which keeps the file small.

So a trial that prints without end does not fill the disk, and a full disk is no error of the trial that prints.
"""

import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path

from flopwatch.files import is_full_disk
from flopwatch.sweep.progress import when_there_is_space

KEPT_BYTES = 4 << 20
"""Of a longer log, this much of its beginning and this much of its end are kept."""

_PENDING_BYTES = 1 << 20  # While the disk is full, this much of the latest output is kept in memory.
_READ_BYTES = 1 << 16  # the capacity of a pipe
_END_SECONDS = 5.0  # A process that survives SIGKILL may hold the pipe open for ever.


class TrialLog:
    """Copies what the trial prints to `handle` to its log. Close it after all processes of the trial have ended."""

    def __init__(self, file: Path, kept_bytes: int = KEPT_BYTES) -> None:
        self._kept_bytes = kept_bytes
        self.received_bytes = 0
        self.full_disk = ""  # the system's message if a write failed because the disk was full
        self._left_out = self._dropped = self._marker_bytes = 0
        self._pending = bytearray()
        # Two descriptors: one that appends, because the supervisor's own messages go to this file too, and one that
        # writes in the middle, which Linux does not do with the first one. Both stay valid if the trial deletes it.
        self._end = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._middle = os.open(file, os.O_RDWR)
        self._reads, self.handle = os.pipe()
        self._thread = threading.Thread(target=self._copy, name="flopwatch-log", daemon=True)

    def start(self) -> None:
        """Begin to copy. Call it after the processes were started, because a process with threads should not fork."""
        self._thread.start()

    def close(self, waits: Callable[[str], None]) -> None:
        """Write the rest; `waits` is called while the disk is full (see `when_there_is_space`)."""
        os.close(self.handle)
        if self._thread.ident is not None:
            self._thread.join(_END_SECONDS)
        if self._thread.is_alive():
            return
        with contextlib.suppress(OSError):
            when_there_is_space(self._write_pending, waits)
            self._shorten(2 * self._kept_bytes)
        for handle in (self._reads, self._end, self._middle):
            os.close(handle)

    def _copy(self) -> None:
        while data := os.read(self._reads, _READ_BYTES):
            self.received_bytes += len(data)
            self._pending += data
            try:
                self._write_pending()
                self._shorten(3 * self._kept_bytes)
            except OSError as error:
                if is_full_disk(error):
                    self.full_disk = str(error.strerror)
                if (excess := len(self._pending) - _PENDING_BYTES) > 0:
                    del self._pending[:excess]
                    self._dropped += excess

    def _write_pending(self) -> None:
        if self._dropped:
            why = self.full_disk or "the file could not be written"
            os.write(self._end, f"\n[flopwatch: {self._dropped:,} bytes are left out here: {why}]\n".encode())
            self._dropped = 0
        while self._pending:
            del self._pending[: os.write(self._end, self._pending)]

    def _shorten(self, most_bytes: int) -> None:
        kept, size = self._kept_bytes, os.fstat(self._middle).st_size
        if size <= most_bytes:
            return
        last = os.pread(self._middle, kept, size - kept)
        self._left_out += size - 2 * kept - self._marker_bytes
        why = f"the log keeps its first and last {kept / 2**20:g} MiB"
        marker = f"\n[flopwatch: {self._left_out:,} bytes are left out here: {why}]\n".encode()
        _write_at(self._middle, marker + last, kept)
        os.ftruncate(self._middle, kept + len(marker) + len(last))
        self._marker_bytes = len(marker)


def _write_at(handle: int, data: bytes, place: int) -> None:
    while data:
        written = os.pwrite(handle, data, place)
        data, place = data[written:], place + written
