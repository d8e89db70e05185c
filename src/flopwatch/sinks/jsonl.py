"""Writes the local log of a run as JSON Lines that stay readable after `kill -9`."""

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from numbers import Integral, Real
from pathlib import Path
from typing import Any, cast

from flopwatch.clock import Clock, monotonic_seconds
from flopwatch.files import is_full_disk
from flopwatch.records.run import Notice, Provenance, Record, Row, RunStart, is_doubted

_MOST_WAITING_BYTES = 8 << 20
"""While the disk is full, lines of this size wait in memory; then the oldest rows are dropped."""

_STRICT_JSON = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


class JsonlSink:
    r"""Appends one line of JSON per record.

    JSON has no NaN and no infinity, so they are written as the texts `"nan"`, `"inf"` and `"-inf"`. A row is passed to
    the operating system after at most `flush_steps` steps or `flush_seconds` seconds, other records immediately. A
    crash can truncate only one line. While the disk is full, the newest lines wait for space. Lines are only appended,
    except that a notice with `doubted` changes earlier rows of this session from exact to not exact, which keeps their
    length.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from flopwatch.records.run import Notice
    >>> path = Path(tempfile.mkdtemp()) / "log.jsonl"
    >>> sink = JsonlSink(path)
    >>> sink.write(Notice(7, "warning", "mfu_above_peak", "MFU is 1.2"))
    >>> path.read_text()
    '{"step":7,"level":"warning","code":"mfu_above_peak","message":"MFU is 1.2","type":"notice"}\n'
    """

    name = "jsonl"

    def __init__(
        self,
        path: Path | str,
        flush_steps: int = 200,
        flush_seconds: float = 5.0,
        clock: Clock = monotonic_seconds,
        describe: Callable[[], Mapping[str, Any]] | None = None,
    ) -> None:
        """Create a sink; the file is opened with the first record.

        `describe` returns what runs, for `RunStart.what_ran`. It is called in the sink's thread, so it may take a
        moment, and by this sink alone, so no other sink gets it.
        """
        # Rows queue up for this long. If it were `flush_seconds`, `write` would flush the first of them alone.
        self.gather_seconds = 0.8 * flush_seconds
        self._path = Path(path)
        self._flush_steps = flush_steps
        self._flush_seconds = flush_seconds
        self._clock = clock
        self._describe = describe
        self.tell: Callable[[str], None] = lambda message: None
        self.lost_rows = 0
        """Rows that were dropped because the disk was full for too long."""
        self._note_of_lost_rows = b""
        self._has_told_full = False
        self._is_line_cut = False
        """Whether a full disk has cut the last line in the file; then its rest is the first line of the buffer."""
        self._descriptor: int | None = None
        self._session_start = 0
        """Where the lines of this session begin in the file."""
        self._buffer = bytearray()
        self._last_step: int | None = None
        self._flushed_step: int | None = None
        self._flushed_at = clock()
        self._headers: dict[type, bytes] = {}
        """The lines with the run's start and provenance. They are written again if the log must be created anew."""

    def write(self, record: Record) -> None:
        if isinstance(record, RunStart) and self._describe is not None:
            record = replace(record, what_ran=self._describe())
        line = _encode(record.to_json())
        if isinstance(record, Row) and record.exact:
            line = _EXACT_WHEN_WRITTEN.join(line.rsplit(b',"exact":true,', 1))
        if isinstance(record, Notice) and record.doubted:
            self.flush()
            self._doubt(record.doubted)
        self._buffer += line
        if isinstance(record, RunStart | Provenance):
            self._headers[type(record)] = line
        if isinstance(record, Row):
            self._last_step = record.step
        if not isinstance(record, Row) or self._is_due(record.step):
            self.flush()

    def flush(self) -> None:
        """Pass all buffered lines to the operating system. On a full disk, they wait for the next call."""
        try:
            self._write_buffer()
        except OSError as error:
            if not is_full_disk(error):
                raise
            if not self._has_told_full:
                self._has_told_full = True
                self.tell(
                    f"{self._path} cannot be written now ({error.strerror}), so its newest rows are kept in memory "
                    "until there is space; free some space before the run ends"
                )
            self._drop_oldest_rows()

    def close(self) -> None:
        try:
            self._write_buffer()
        except OSError as error:
            if is_full_disk(error):
                rows = self._is_line_cut + sum(line.startswith(_ROW_STARTS) for line in self._buffer.splitlines())
                why = f"{error.strerror}, so the log lacks {rows + self.lost_rows:,} rows and the end of the run"
                raise OSError(error.errno, why, str(self._path)) from error
            raise
        finally:
            self._buffer.clear()
            descriptor, self._descriptor = self._descriptor, None
            if descriptor is not None:
                os.close(descriptor)

    def _write_buffer(self) -> None:
        if not self._buffer:
            return
        if self._descriptor is None:
            self._open()
        elif not self._is_in_place(self._descriptor):
            self._recreate(self._descriptor)
        while self._buffer:
            written = os.write(cast("int", self._descriptor), self._buffer)
            self._is_line_cut = not self._buffer.endswith(b"\n", 0, written)
            del self._buffer[:written]
        self._flushed_step = self._last_step
        self._flushed_at = self._clock()

    def _drop_oldest_rows(self) -> None:
        excess = len(self._buffer) - _MOST_WAITING_BYTES
        if excess <= 0:
            return
        excess += _MOST_WAITING_BYTES // 8  # so that not every row has to look for the oldest
        kept = bytearray()
        for line in self._buffer.splitlines(keepends=True):
            if excess > 0 and line.startswith(_ROW_STARTS):
                excess -= len(line)
                self.lost_rows += 1
            elif line != self._note_of_lost_rows:
                kept += line
        message = (
            f"the disk was full for so long that {self.lost_rows:,} rows before step {self._last_step} are not in "
            f"{self._path}; the totals include their steps"
        )
        self._note_of_lost_rows = _encode(Notice(self._last_step, "warning", "log_rows_lost", message).to_json())
        start = kept.find(b"\n") + 1 if self._is_line_cut else 0
        kept[start:start] = self._note_of_lost_rows
        self._buffer = kept

    def _is_due(self, step: int) -> bool:
        if self._flushed_step is None or abs(step - self._flushed_step) >= self._flush_steps:
            return True
        return self._clock() - self._flushed_at >= self._flush_seconds

    def _open(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        binary = getattr(os, "O_BINARY", 0)  # without it Windows writes two bytes at the end of a line
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | binary, 0o666)
        self._session_start = size = os.fstat(self._descriptor).st_size
        if size:
            os.lseek(self._descriptor, size - 1, os.SEEK_SET)  # writes still go to the end
        if size and os.read(self._descriptor, 1) != b"\n":
            self._buffer[:0] = b"\n"  # ends a line that a killed session left incomplete

    def _doubt(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Change the rows of this session that have a step in the ranges to not exact."""
        if self._descriptor is None or not self._is_in_place(self._descriptor):
            return
        # A descriptor of its own: Linux appends whatever is written to one with O_APPEND, even with a position.
        with (
            suppress(FileNotFoundError),
            self._path.open("rb") as lines,
            self._path.open("r+b", buffering=0) as patched,
        ):
            start = lines.seek(self._session_start)
            for line in lines:
                for place, text in _patches(line, ranges):
                    patched.seek(start + place)
                    patched.write(text)
                start += len(line)

    def _is_in_place(self, descriptor: int) -> bool:
        try:
            there = os.stat(self._path)
        except FileNotFoundError:
            return False
        return os.path.samestat(there, os.fstat(descriptor))

    def _recreate(self, gone: int) -> None:
        """Close `gone`, the deleted or replaced log. Begin a new log with the run's start and provenance records."""
        self._descriptor = None
        os.close(gone)
        if self._is_line_cut:
            del self._buffer[: self._buffer.find(b"\n") + 1]
        notice = Notice(
            self._last_step,
            "warning",
            "log_recreated",
            f"{self._path} was deleted or replaced while the run was writing it; the new file holds only the records "
            "since the last flush. Do not delete the folder of a run before the run has ended.",
        )
        self._buffer[:0] = b"".join(self._headers.values()) + _encode(notice.to_json())
        self._open()


_ROW_STARTS = (b'{"type":"row"', b'{"type":"partial_row"')
_EXACT_WHEN_WRITTEN = b',"exact":true ,'
"""Has a space, so that `false` fits into its place. No other `true` in a line of the log is followed by a space."""
_EXACT_VALUE = re.compile(rb'(?<=[{,])"perf/exact":1(?=[,}])')
_STEPS = re.compile(rb'(?:^\{"type":"(?:partial_)?row","step":|"steps":\{"step":\[)(-?\d+(?:,-?\d+)*)')


def _patches(line: bytes, ranges: Sequence[tuple[int, int]]) -> Iterator[tuple[int, bytes]]:
    """Yield where to write what in a line, so that a row with a step in the ranges is not exact."""
    place = line.rfind(_EXACT_WHEN_WRITTEN)
    if place < 0 or not is_doubted([int(step) for found in _STEPS.findall(line) for step in found.split(b",")], ranges):
        return
    yield place + len(b',"exact":'), b"false"
    if (value := _EXACT_VALUE.search(line)) is not None:
        yield value.end() - 1, b"0"


def _encode(content: Mapping[str, Any]) -> bytes:
    try:
        text = _STRICT_JSON.encode(content)
    except (TypeError, ValueError):  # NaN, infinity, or an object that JSON cannot hold
        text = _STRICT_JSON.encode(_strict(content))
    return text.encode("ascii") + b"\n"


def _strict(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _strict(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_strict(inner) for inner in value]
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Integral):  # numpy integers are Integral but not int
        return int(value)
    if isinstance(value, Real):
        return float(value) if math.isfinite(value) else str(float(value))
    return str(value)
