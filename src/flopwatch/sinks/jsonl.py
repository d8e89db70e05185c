"""Writes the local log of a run as JSON Lines that stay readable after `kill -9`."""

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from flopwatch.files import is_full_disk
from flopwatch.records.run import Notice, Provenance, Record, Row, RunStart, is_doubted

_MOST_WAITING_BYTES = 8 << 20
"""While the disk is full, this many bytes of lines wait in memory. If there are more, the oldest rows are dropped."""

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
        describe: Callable[[], Mapping[str, Any]] | None = None,
    ) -> None:
        """Create a sink; the file is opened with the first record.

        `describe` returns what runs, for `RunStart.what_ran`. It is called in the sink's thread, so it may take a
        moment, and by this sink alone, so no other sink gets it.
        """
        self.gather_seconds = flush_seconds
        self._flush_steps = flush_steps
        self._describe = describe
        self.tell: Callable[[str], None] = lambda message: None
        self.lost_rows = 0
        """Rows that were dropped because the disk was full for too long."""
        self._has_told_full = False
        self._file = _AppendedFile(Path(path))
        self._buffer = bytearray()
        self._last_step: int | None = None
        self._flushed_step: int | None = None
        self._headers: dict[type, bytes] = {}
        """The lines with the run's start and provenance. They are written again if the log must be created anew."""

    def write(self, record: Record) -> None:
        if isinstance(record, RunStart) and self._describe is not None:
            record = replace(record, what_ran=self._describe())
        line = _encode(record.to_json())
        if isinstance(record, Row):
            self._last_step = record.step
            if record.exact:
                line = _EXACT_WHEN_WRITTEN.join(line.rsplit(b',"exact":true,', 1))
        elif isinstance(record, RunStart | Provenance):
            self._headers[type(record)] = line
        elif isinstance(record, Notice) and record.doubted:
            self.flush()
            self._file.patch(lambda line: _patches(line, record.doubted))
        self._buffer += line
        flushed = self._flushed_step
        if not isinstance(record, Row) or flushed is None or abs(record.step - flushed) >= self._flush_steps:
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
                    f"{self._file.path} cannot be written now ({error.strerror}), so its newest rows are kept in "
                    "memory until there is space; free some space before the run ends"
                )
            self._drop_oldest_rows()

    def close(self) -> None:
        try:
            self._write_buffer()
        except OSError as error:
            if not is_full_disk(error):
                raise
            rows = self._file.is_line_cut + sum(line.startswith(_ROW_STARTS) for line in self._buffer.splitlines())
            why = f"{error.strerror}, so the log lacks {rows + self.lost_rows:,} rows and the end of the run"
            raise OSError(error.errno, why, str(self._file.path)) from error
        finally:
            self._buffer.clear()
            self._file.close()

    def _write_buffer(self) -> None:
        if not self._buffer:
            return
        if self._file.was_removed():
            if self._file.is_line_cut:
                del self._buffer[: self._buffer.find(b"\n") + 1]
            self._file.close()
            message = (
                f"{self._file.path} was deleted or replaced while the run was writing it; the new file holds only the "
                "records since the last flush. Do not delete the folder of a run before the run has ended."
            )
            notice = Notice(self._last_step, "warning", "log_recreated", message)
            self._buffer[:0] = b"".join(self._headers.values()) + _encode(notice.to_json())
        self._file.append(self._buffer)
        self._flushed_step = self._last_step

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
            elif _ROWS_LOST not in line:
                kept += line
        message = (
            f"the disk was full for so long that {self.lost_rows:,} rows before step {self._last_step} are not in "
            f"{self._file.path}; the totals include their steps"
        )
        start = kept.find(b"\n") + 1 if self._file.is_line_cut else 0
        kept[start:start] = _encode(Notice(self._last_step, "warning", "log_rows_lost", message).to_json())
        self._buffer = kept


class _AppendedFile:
    """A file to which one session appends lines, and in which it changes some of them.

    Attributes:
        is_line_cut: Whether a full disk has cut the last line. If so, its rest is the first of the waiting lines.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_line_cut = False
        self._descriptor: int | None = None
        self._session_start = 0
        """Where the lines of this session begin."""

    def append(self, lines: bytearray) -> None:
        """Write lines, and remove from `lines` what is written, also if the disk is full before the end."""
        if self._descriptor is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            binary = getattr(os, "O_BINARY", 0)  # without it Windows writes two bytes at the end of a line
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | binary, 0o666)
            self._session_start = size = os.fstat(self._descriptor).st_size
            if size:
                os.lseek(self._descriptor, size - 1, os.SEEK_SET)  # writes still go to the end
                if os.read(self._descriptor, 1) != b"\n":
                    lines[:0] = b"\n"  # ends a line that a killed session left incomplete
        while lines:
            written = os.write(self._descriptor, lines)
            self.is_line_cut = not lines.endswith(b"\n", 0, written)
            del lines[:written]

    def patch(self, patches: Callable[[bytes], Iterable[tuple[int, bytes]]]) -> None:
        """Change the lines of this session. `patches` yields, for a line, positions and the text to write there."""
        if self._descriptor is None or self.was_removed():
            return
        # A descriptor of its own: Linux appends whatever is written to one with O_APPEND, even with a position.
        with suppress(FileNotFoundError), self.path.open("rb") as lines, self.path.open("r+b", buffering=0) as patched:
            start = lines.seek(self._session_start)
            for line in lines:
                for place, text in patches(line):
                    patched.seek(start + place)
                    patched.write(text)
                start += len(line)

    def was_removed(self) -> bool:
        """Whether the path no longer leads to the file that is open."""
        if self._descriptor is None:
            return False
        try:
            return not os.path.samestat(self.path.stat(), os.fstat(self._descriptor))
        except FileNotFoundError:
            return True

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


_ROW_STARTS = (b'{"type":"row"', b'{"type":"partial_row"')
_ROWS_LOST = b'"code":"log_rows_lost"'
_EXACT_WHEN_WRITTEN = b',"exact":true ,'
"""The space makes room for `false`. No other `true` in a line of the log is followed by a space."""
_EXACT_VALUE = re.compile(rb'(?<=[{,])"perf/exact":1(?=[,}])')
_STEPS = re.compile(rb'(?:^\{"type":"(?:partial_)?row","step":|"steps":\{"step":\[)(-?\d+(?:,-?\d+)*)')


def _patches(line: bytes, ranges: Sequence[tuple[int, int]]) -> Iterator[tuple[int, bytes]]:
    """Yield position and text of each change that makes a row with a step in the ranges not exact."""
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
        loose = json.dumps(content, default=_plain, skipkeys=True)
        text = _STRICT_JSON.encode(json.loads(loose, parse_constant=lambda name: str(float(name))))
    return text.encode("ascii") + b"\n"


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): inner for key, inner in value.items()}
    if isinstance(value, set | frozenset):
        return list(value)
    if isinstance(value, Integral):  # numpy integers are Integral but not int
        return int(value)
    return float(value) if isinstance(value, Real) else str(value)
