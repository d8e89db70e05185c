"""Read the log of a run: all of it, a few logging windows, the newest rows, or new records while the run goes on.

A log is read from its end, because later sessions decide which records are valid. A session is one start of the
training script. A session that resumes after step N replaces all later steps of earlier sessions. A session that does
not resume starts a new run, so everything before it belongs to another run.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from itertools import islice
from math import inf
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from flopwatch.errors import InputError
from flopwatch.files import LineFollower
from flopwatch.language import Said
from flopwatch.records.run import PARTIAL_ROW, Notice, Provenance, Record, Row, RunStart, Summary, marked
from flopwatch.runs.log_file import TornLineError, lines_from_end, parse_object, row_step, to_record


@dataclass(frozen=True, slots=True)
class RunLog:
    """The records of one run, oldest first.

    Attributes:
        starts: One record for each session, that is, for each start or resumption of the training.
        provenances: Records that say how FLOPs and peak were determined, one for each change of that.
        rows: One record for each logging window. If a later session ran the last steps of a window again, the record
            has only the remaining steps and no metrics, because the metrics are over the whole window.
        notices: Messages that the run logged for its user.
        summary: The record at the end of the last session; None if it is still running or was killed.
        torn_lines: Number of lines that are not complete records.
        earlier_step: The last step of an earlier run in the same file, which is not read; None if there is none.
    """

    path: Path
    starts: tuple[RunStart, ...]
    provenances: tuple[Provenance, ...]
    rows: tuple[Row, ...]
    notices: tuple[Notice, ...] = ()
    summary: Summary | None = None
    torn_lines: int = 0
    earlier_step: int | None = None

    def _repr_html_(self) -> str:
        """What a notebook shows if the log is the last line of a cell: MFU, tokens/s and where the rest went."""
        # What is shown is made from this class, in a package above this one.
        table: str = import_module("flopwatch.report.run.why").log_table(self)
        return table


class _RowLine(NamedTuple):
    """A row whose JSON is parsed only when it is needed."""

    line: bytes
    step: int
    cut_after: float = inf
    """The last valid step; a later session ran the steps after it again."""
    is_partial: bool = False
    """True if the row was written early, together with a checkpoint. The session's next row has the same steps too."""
    doubts: tuple[Notice, ...] = ()
    """Later notices of the same session that doubt rows. The log says only in them why a row is not exact after all."""

    def record(self) -> Row | None:
        content = self.parse()
        record = None if content is None else to_record(content)
        for notice in self.doubts:
            record = marked(record, notice) if isinstance(record, Row) else record
        return record if isinstance(record, Row) else None

    def parse(self) -> dict[str, Any] | None:
        """Parse the row; None if a later session ran all of its steps again."""
        row = {**parse_object(self.line), "type": "row"}
        if self.is_whole:
            return row
        to_record(row)  # raises TornLineError if a value has the wrong type
        columns = row.get("steps") or {}
        kept = [index for index, step in enumerate(columns.get("step", ())) if step <= self.cut_after]
        if not kept:
            return None
        steps = {name: [column[index] for index in kept] for name, column in columns.items()}
        return {"type": "row", "step": steps["step"][-1], "unix_time": row["unix_time"], "values": {}, "steps": steps}

    @property
    def is_whole(self) -> bool:
        return self.step <= self.cut_after


_INEXACT = re.compile(rb'"exact": ?false')
_Found: TypeAlias = Record | _RowLine | int | TornLineError
"""What a line holds; a number is the last step of an earlier run in the file."""


def read_log(path: str | Path, reduce_row: Callable[[Row], Row | None] | None = None) -> RunLog:
    """Read all records of the last run in a log. For a log of gigabytes use `read_around` or `rows_from_end`.

    With `reduce_row` the memory need not grow with the length of the log: it is called with each row, the newest first,
    and returns what the result has in its place, or None for nothing. Raises InputError if the file is not the log of a
    run, or if a newer version of flopwatch wrote it.
    """
    return _as_log(Path(path), _current_run(Path(path)), reduce_row)


def read_around(path: str | Path, step: int | None = None) -> RunLog:
    """Read a log with only a few rows: the first, the last, the newest that is not exact, and those around `step`.

    Other rows are neither parsed nor kept in memory, so this works for logs of any length.
    """
    return _as_log(Path(path), _few_rows(_current_run(Path(path)), step))


def rows_from_end(path: str | Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of the last run as JSON objects, newest first; nothing if the file does not exist.

    The file is read only as far as needed, so the newest rows of a long log come at once. Rows with a step that a later
    session ran again are left out.
    """
    if not Path(path).exists():
        return
    for found in _current_run(Path(path)):
        if isinstance(found, _RowLine) and found.is_whole:
            with suppress(TornLineError):
                row = found.parse() or {}
                to_record(row)
                yield row


def _current_run(path: Path) -> Iterator[_Found]:  # noqa: C901 - what a line means depends on those after it
    """Yield the records of the last run in the file, newest first, without those that a later session replaced."""
    last_valid_step = inf
    superseded: _RowLine | None = None  # The row read last, if a later session ran some of its steps again.
    is_last_of_session = True
    has_later_row = False  # Whether a later row of the same session was found.
    doubts: tuple[Notice, ...] = ()
    lines = lines_from_end(path)
    for line in lines:
        found = _read_line(line, may_be_torn=is_last_of_session)
        is_last_of_session = isinstance(found, RunStart)
        if isinstance(found, _RowLine) and found.is_partial and has_later_row:
            continue
        has_later_row = (has_later_row or isinstance(found, _RowLine)) and not isinstance(found, RunStart)
        if isinstance(found, RunStart):
            doubts = ()
        elif isinstance(found, Notice) and found.doubted:
            doubts = (found, *doubts)
        elif isinstance(found, _RowLine) and doubts:
            found = found._replace(doubts=doubts)
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
                yield from islice((step for line in lines if (step := row_step(line)) is not None), 1)
                return
            last_valid_step = min(last_valid_step, found.resumed_after_step)
    if superseded is not None:
        yield from _with_steps_left(superseded)


def _with_steps_left(row: _RowLine) -> Iterator[_RowLine]:
    with suppress(TornLineError):
        if row.parse() is not None:
            yield row


def _read_line(line: bytes, *, may_be_torn: bool) -> _Found | None:
    """Parse a line. A row is parsed only if it may be torn (incomplete), because parsing all rows is slow."""
    step = row_step(line)
    if step is not None and not may_be_torn:
        return _RowLine(line, step)
    try:
        content = parse_object(line)
        if content.get("type") == PARTIAL_ROW:
            to_record({**content, "type": "row"})
            return _RowLine(line, content["step"], is_partial=True)
        record = to_record(content)
    except TornLineError as error:
        return error
    return _RowLine(line, record.step) if isinstance(record, Row) else record


def _few_rows(found: Iterable[_Found], step: int | None) -> Iterator[_Found]:
    newest = wanted = before = oldest = inexact = None
    for item in found:
        if not isinstance(item, _RowLine):
            yield item
            continue
        if newest is None:
            try:
                to_record({**parse_object(item.line), "type": "row"})
            except TornLineError as error:
                yield error
                continue
            newest = item
        if inexact is None and _INEXACT.search(item.line):
            inexact = item
        if step is not None and min(item.step, item.cut_after) >= step:
            wanted = item
        elif step is not None and before is None:
            before = item
        oldest = item
    chosen = {item for item in (newest, inexact, wanted, before, oldest) if item is not None}
    yield from sorted(chosen, key=lambda item: -min(item.step, item.cut_after))


def _as_log(path: Path, lines: Iterable[_Found], reduce_row: Callable[[Row], Row | None] | None = None) -> RunLog:
    records: list[Record] = []
    torn = 0
    earlier_step = None
    for item in lines:
        if isinstance(item, int):
            earlier_step = item
            continue
        try:
            record = item.record() if isinstance(item, _RowLine) else item
        except TornLineError as error:
            record = error
        if isinstance(record, TornLineError):
            torn += 1
            continue
        if reduce_row is not None and isinstance(record, Row):
            record = reduce_row(record)
        if record is not None:
            records.append(record)
    if not records:
        raise InputError(f"{str(path)!r} has no record of a run: it is not a log of flopwatch, or it is still empty")
    newest = next((record for record in records if isinstance(record, Summary | RunStart)), None)
    records.reverse()
    kinds = {"starts": RunStart, "provenances": Provenance, "rows": Row, "notices": Notice}
    found: dict[str, Any] = {name: tuple(each for each in records if isinstance(each, kinds[name])) for name in kinds}
    summary = newest if isinstance(newest, Summary) else None
    return RunLog(path, **found, summary=summary, torn_lines=torn, earlier_step=earlier_step)


def earlier_run_note(step: int | None) -> str:
    """What a reader must know about the earlier run in the same file, which ends at `step`; empty without one."""
    if step is None:
        return ""
    return Said(
        "The log also has an earlier run, up to step {step:,}, which is left out here: the newest session did not "
        "continue its steps, so it began a run of its own. Give each run a folder of its own.",
        step=step,
    )


@dataclass(frozen=True, slots=True)
class StepCells:
    """The logged values of one step.

    Attributes:
        cells: The known values by column, such as `seconds` and `model_flops`.
        row: The record of the logging window that contains the step.
        provenance: The record that says how FLOPs and peak were determined; None if the log has none.
    """

    step: int
    cells: Mapping[str, Any]
    row: Row
    provenance: Provenance | None


def step_cells(log: RunLog, step: int) -> StepCells:
    """Return the logged values of a step; raises InputError, with the steps that the log has, if it lacks this one."""
    for row in log.rows:
        numbers = row.steps.get("step", ())
        if step in numbers:
            index = numbers.index(step)
            cells = {name: column[index] for name, column in row.steps.items() if column[index] is not None}
            return StepCells(step, cells, row, provenance_at(log, step))
    raise InputError(f"step {step} is not in {str(log.path)!r}: {_which_are(log, step)}")


def provenance_at(log: RunLog, step: int) -> Provenance | None:
    """Return the record that says how the FLOPs and the peak of a step were determined; None if there is none."""
    return next((provenance for provenance in reversed(log.provenances) if provenance.step <= step), None)


def _which_are(log: RunLog, step: int) -> str:
    spans = [(numbers[0], numbers[-1]) for row in log.rows if (numbers := row.steps.get("step"))]
    if not spans:
        return "the log has no steps" + (" yet" if log.summary is None else "")
    first, last = spans[0][0], spans[-1][1]
    text = f"the log has steps {first} to {last}"
    if first < step < last:
        text += f", but step {step} is missing"
    note = earlier_run_note(log.earlier_step)
    return f"{text}. {note.rstrip('.')}" if note else text


class SteadyStep(NamedTuple):
    """A step that can be compared, because it was timed and is not warm-up. Unknown values are None.

    `seconds` includes `input_wait_seconds`, `tokens` includes padding while `real_tokens` does not, and
    `peak_flops_per_s` is the sum over all devices.
    """

    seconds: float
    input_wait_seconds: float | None
    samples: int | None
    tokens: int | None
    real_tokens: int | None
    model_flops: int | None
    hardware_flops: int | None
    peak_flops_per_s: float | None


def steady_steps(log: RunLog) -> list[SteadyStep]:
    steps = []
    for row in log.rows:
        found, nothing = provenance_at(log, row.step), [None] * len(row.steps.get("step", ()))
        peak = float(found.peak["flops_per_s"]) * found.device_count if found and found.peak else None
        columns = [row.steps.get(name, nothing) for name in ("warm_up", *SteadyStep._fields[:-1])]
        for is_warm_up, *cells in zip(*columns, [peak] * len(nothing), strict=True):
            if cells[0] and not is_warm_up:
                steps.append(SteadyStep(*cells))
    return steps


MOST_ROWS = 2000
"""Of a long log, only about this many older rows are read, because a curve on a screen has fewer columns."""
WHOLE_BYTES = 8 << 20
"""Every row in the last 8 MiB of a long log is read; `MOST_ROWS` limits only the rows before that."""


class LogFollower:
    """Reads the records that were appended to a log since the last poll. The file need not exist yet.

    Attributes:
        torn_lines: Number of complete lines that were not records.

    Example:
        >>> follower = LogFollower("outputs/training_log.jsonl")
        >>> for record in follower.poll():
        ...     print(record.type)
    """

    def __init__(self, path: str | Path) -> None:
        self.torn_lines = 0
        self._file = LineFollower(Path(path))

    @property
    def times_replaced(self) -> int:
        """How often the file was replaced or truncated; then records of earlier polls are no longer valid."""
        return self._file.times_replaced

    def poll(self) -> Iterator[Record]:
        """Return the new records, oldest first. A line that is still being written is read by the next poll.

        If many rows are new, all of the newest are returned, but only some of the older ones, evenly spaced. Records
        of other types are always returned.
        """
        return self._records(self._file.poll())  # not a generator, so that `times_replaced` is right at once

    def _records(self, lines: Iterator[bytes]) -> Iterator[Record]:
        thinned_until = self._file.size_bytes - WHOLE_BYTES
        spacing_bytes = (thinned_until - self._file.offset) // MOST_ROWS
        next_row_from = self._file.offset
        for line in lines:
            start = self._file.offset - len(line)
            if start < min(thinned_until, next_row_from) and row_step(line) is not None:
                continue
            next_row_from = start + spacing_bytes
            try:
                record = to_record(parse_object(line))
            except TornLineError:
                self.torn_lines += 1
                continue
            if record is not None:
                yield record
