"""Read the current run of a log: all of it, a few windows, from its end, or while it grows.

A log is read from its end, because later sessions decide what counts: a session that resumes after step N replaces
every later step of the sessions before it, and everything before a fresh start belongs to another run.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from flopwatch.errors import InputError
from flopwatch.records.run import PARTIAL_ROW, Notice, Provenance, Record, Row, RunStart, Summary
from flopwatch.runs.lines import TornLineError, lines_from_end, parse_object, row_step, to_record


@dataclass(frozen=True, slots=True)
class RunLog:
    """The records of one run, oldest first.

    Attributes:
        path: The file.
        starts: Its sessions.
        provenances: Where the numbers come from, whenever that changed.
        rows: Its logging windows. A window whose last steps were replaced keeps only the others and has no values,
            because those belonged to the whole window.
        notices: The notices of every session.
        summary: The end of the last session; None while it runs, or when it was killed.
        torn_lines: Lines that are not complete records.
    """

    path: Path
    starts: tuple[RunStart, ...]
    provenances: tuple[Provenance, ...]
    rows: tuple[Row, ...]
    notices: tuple[Notice, ...] = ()
    summary: Summary | None = None
    torn_lines: int = 0


class _RowLine(NamedTuple):
    """A row that is not parsed yet, because not every reader needs it."""

    line: bytes
    step: int
    cut_after: float = inf
    """Later steps were replaced by another session."""
    is_partial: bool = False
    """Written with a checkpoint; the next row of the session repeats its steps."""

    def parse(self) -> dict[str, Any] | None:
        """The row; None if all of its steps were replaced."""
        row = {**parse_object(self.line), "type": "row"}
        return row if self.is_whole else _cut(row, self.cut_after)

    @property
    def is_whole(self) -> bool:
        return self.step <= self.cut_after


class _Torn(NamedTuple):
    """A line that is not a record."""


_Found: TypeAlias = Record | _RowLine | _Torn


def read_log(path: str | Path) -> RunLog:
    """All records of the current run in memory. For a log of gigabytes use `read_around` or `rows_from_end`.

    Raises:
        InputError: The file is not the log of a run, or its format is newer.
    """
    return _as_log(Path(path), _current_run(Path(path)))


def read_around(path: str | Path, step: int | None = None) -> RunLog:
    """The log with a few of its rows: the first, the last, the one with this step and the one before it.

    Only those are parsed and kept, so the log may have any length.
    """
    return _as_log(Path(path), _few_rows(_current_run(Path(path)), step))


def rows_from_end(path: str | Path) -> Iterator[dict[str, Any]]:
    """The rows of the current run as JSON objects, newest first; none if the file does not exist.

    Reads lazily, so the newest rows of a log of any length come at once. Rows with a replaced step are left out.
    """
    if not Path(path).exists():
        return
    for found in _current_run(Path(path)):
        if isinstance(found, _RowLine) and found.is_whole:
            with suppress(TornLineError):
                yield found.parse() or {}


def _current_run(path: Path) -> Iterator[_Found]:
    """The records of the last run in the file that still count, newest first."""
    last_valid_step = inf
    superseded: _RowLine | None = None  # the oldest replaced row so far, whose first steps may still count
    is_last_of_session = True
    has_later_row = False  # of the same session
    for line in lines_from_end(path):
        found = _read_line(line, may_be_torn=is_last_of_session)
        is_last_of_session = isinstance(found, RunStart)
        if isinstance(found, _RowLine) and found.is_partial and has_later_row:
            continue
        has_later_row = (has_later_row or isinstance(found, _RowLine)) and not isinstance(found, RunStart)
        if isinstance(found, _RowLine) and found.step > last_valid_step:
            superseded = found._replace(cut_after=last_valid_step)
            continue
        if isinstance(found, Provenance) and found.step > last_valid_step:
            continue
        if superseded is not None and isinstance(found, _RowLine | RunStart):
            yield from _with_steps_left(superseded)
            superseded = None
        if found is not None:
            yield found
        if isinstance(found, RunStart):
            if found.resumed_after_step is None:
                return
            last_valid_step = min(last_valid_step, found.resumed_after_step)
    if superseded is not None:
        yield from _with_steps_left(superseded)


def _with_steps_left(row: _RowLine) -> Iterator[_RowLine]:
    with suppress(TornLineError):
        if row.parse() is not None:
            yield row


def _read_line(line: bytes, *, may_be_torn: bool) -> _Found | None:
    """Parse a line, but a row only if a kill may have cut it off: that makes long logs quick to read."""
    step = row_step(line)
    if step is not None and not may_be_torn:
        return _RowLine(line, step)
    try:
        content = parse_object(line)
        if content.get("type") == PARTIAL_ROW:
            return _RowLine(line, int(content["step"]), is_partial=True)
        record = to_record(content)
    except (TornLineError, KeyError):
        return _Torn()
    return _RowLine(line, record.step) if isinstance(record, Row) else record


def _cut(row: dict[str, Any], last_step: float) -> dict[str, Any] | None:
    columns = row.get("steps") or {}
    kept = [index for index, step in enumerate(columns.get("step", ())) if step <= last_step]
    if not kept:
        return None
    steps = {name: [column[index] for index in kept] for name, column in columns.items()}
    return {"type": "row", "step": steps["step"][-1], "unix_time": row["unix_time"], "values": {}, "steps": steps}


def _few_rows(found: Iterable[_Found], step: int | None) -> Iterator[_Found]:
    newest = wanted = before = oldest = None
    for item in found:
        if not isinstance(item, _RowLine):
            yield item
            continue
        newest = newest or item
        if step is not None and min(item.step, item.cut_after) >= step:
            wanted = item
        elif step is not None and before is None:
            before = item
        oldest = item
    chosen = (item for item in (newest, wanted, before, oldest) if item is not None)
    yield from dict.fromkeys(chosen)


def _as_log(path: Path, found: Iterable[_Found]) -> RunLog:
    records: list[Record] = []
    torn = 0
    for item in found:
        try:
            records.extend(_records_of(item))
        except TornLineError:
            torn += 1
    if not records:
        raise InputError(f"{str(path)!r} has no record of a run: it is not a log of flopwatch, or nothing is in it yet")
    records.reverse()
    return RunLog(
        path,
        tuple(record for record in records if isinstance(record, RunStart)),
        tuple(record for record in records if isinstance(record, Provenance)),
        tuple(record for record in records if isinstance(record, Row)),
        tuple(record for record in records if isinstance(record, Notice)),
        _end_of_last_session(records),
        torn,
    )


def _records_of(item: _Found) -> Iterator[Record]:
    """The record of an item; none if all steps of a row were replaced."""
    if isinstance(item, _Torn):
        raise TornLineError
    if not isinstance(item, _RowLine):
        yield item
        return
    row = item.parse()
    record = to_record(row) if row is not None else None
    if record is not None:
        yield record


def _end_of_last_session(records: list[Record]) -> Summary | None:
    for record in reversed(records):
        if isinstance(record, Summary):
            return record
        if isinstance(record, RunStart):
            return None
    return None


@dataclass(frozen=True, slots=True)
class StepCells:
    """What the log says about one step.

    Attributes:
        step: Its number.
        cells: Its values by column, such as `seconds` and `model_flops`, without unknown ones.
        row: Its window.
        provenance: How its numbers were found; None when the log does not say.
    """

    step: int
    cells: Mapping[str, Any]
    row: Row
    provenance: Provenance | None


def step_cells(log: RunLog, step: int) -> StepCells:
    """Find a step in a log.

    Raises:
        InputError: The step is not in the log; the message says which are.
    """
    for row in log.rows:
        numbers = row.steps.get("step", ())
        if step in numbers:
            return StepCells(step, _cells(row.steps, numbers.index(step)), row, provenance_at(log, step))
    raise InputError(f"step {step} is not in {str(log.path)!r}: {_which_are(log, step)}")


def provenance_at(log: RunLog, step: int) -> Provenance | None:
    """The provenance of a step: the last one that begins at it or before it."""
    holding = [provenance for provenance in log.provenances if provenance.step <= step]
    return holding[-1] if holding else None


def _cells(columns: Mapping[str, Sequence[Any]], index: int) -> dict[str, Any]:
    cells = {name: column[index] for name, column in columns.items() if index < len(column)}
    return {name: cell for name, cell in cells.items() if cell is not None}


def _which_are(log: RunLog, step: int) -> str:
    spans = [(numbers[0], numbers[-1]) for row in log.rows if (numbers := row.steps.get("step"))]
    if not spans:
        return "it has no steps" + (" yet" if log.summary is None else "")
    first, last = spans[0][0], spans[-1][1]
    text = f"it has steps {first} to {last}"
    if first < step < last:
        before = max((span for span in spans if span[1] < step), default=None)
        after = min((span for span in spans if span[0] > step), default=None)
        nearest = " and ".join(f"{span[0]} to {span[1]}" for span in (before, after) if span)
        text += f", but not this one; the windows next to it are {nearest}"
    return text


MOST_ROWS = 2000
"""Rows to read of a backlog; more than a screen has columns."""
WHOLE_BYTES = 8 << 20
"""The end of a backlog in which every row is read."""


class LogFollower:
    """Reads what was appended to a log since the last poll. The file need not exist yet.

    The file is opened for each poll, because over NFS a handle goes stale when the file is replaced.

    Attributes:
        torn_lines: Complete lines that were not records.
        times_replaced: How often the file was replaced or truncated. What was read before is then void, and the next
            poll begins at the start of the new file.

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
        """The new records, oldest first. A line that is still being written is left for the next poll.

        Rows of a large backlog are thinned evenly, except for the newest ones. All other records are returned.
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
            # Deleted or replaced between the two calls: the next poll notices.
            return
