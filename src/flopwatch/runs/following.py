"""A log while it grows."""

from collections.abc import Iterator
from pathlib import Path

from flopwatch.records.run import Record
from flopwatch.runs.lines import TornLineError, parse_object, row_step, to_record

MOST_ROWS = 2000
"""Rows read of what has piled up; more than a screen has columns."""
WHOLE_BYTES = 8 << 20
"""The end of what has piled up, of which every row is read."""


class LogFollower:
    """Gives what was appended to a log since the last look. The file may not be there yet.

    The file is opened for each look only: over NFS a handle goes stale when the file is replaced.

    Attributes:
        torn_lines: Whole lines that were no record.
        times_replaced: How often the file turned out to be another one, or to have been cut; what was read before is
            then void, and the next look begins at the new file's start.

    Example:
        >>> follower = LogFollower("outputs/training_log.jsonl")
        >>> for record in follower.poll():
        ...     print(record.type)
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.torn_lines = 0
        self.times_replaced = 0
        self._offset = 0
        self._inode: int | None = None

    def poll(self) -> Iterator[Record]:
        """The new records, oldest first; a line still being written is left for the next look.

        When much has piled up, rows are thinned out evenly, except for the newest ones. All other records are given.
        """
        try:
            file_now = self.path.stat()
        except OSError:
            return iter(())
        if self._inode is not None and (file_now.st_ino != self._inode or file_now.st_size < self._offset):
            self.times_replaced += 1
            self._offset = 0
        self._inode = file_now.st_ino
        return self._records(file_now.st_size) if file_now.st_size > self._offset else iter(())

    def _records(self, size_bytes: int) -> Iterator[Record]:
        for line in self._new_lines(size_bytes):
            try:
                record = to_record(parse_object(line))
            except TornLineError:
                self.torn_lines += 1
                continue
            if record is not None:
                yield record

    def _new_lines(self, size_bytes: int) -> Iterator[bytes]:
        thinned_until = size_bytes - WHOLE_BYTES
        spacing_bytes = (thinned_until - self._offset) // MOST_ROWS
        next_row_from = self._offset
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                for line in file:
                    if not line.endswith(b"\n"):
                        return
                    start, self._offset = self._offset, self._offset + len(line)
                    if start < min(thinned_until, next_row_from) and row_step(line) is not None:
                        continue
                    next_row_from = start + spacing_bytes
                    if line.strip():
                        yield line
        except OSError:
            # Deleted or replaced between the two calls: the next look finds out.
            return
