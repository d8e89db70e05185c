"""The trace files of a run: their folder and names, the newest of each rank, and what was read from them."""

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from flopwatch.decode import read_or_none
from flopwatch.errors import InputError
from flopwatch.files import read_object, write_json
from flopwatch.runs.log_file import NoLogError, find_log
from flopwatch.runs.reading import RunLog
from flopwatch.runs.traces.split import TraceSplit, read_trace
from flopwatch.text import one_line

TRACES = "traces"
"""Name of the folder with the traces of a run."""
_NANOSECONDS_PER_SECOND = 1e9
_TRACE_NAME = re.compile(r"step(\d+)_rank(\d+)\.pt\.trace\.json\.gz")
_CACHE_FORMAT = 4


def trace_name(step: int, rank: int) -> str:
    """Name of the file with the trace of a rank that ends with a step.

    >>> trace_name(120, 0)
    'step120_rank0.pt.trace.json.gz'
    """
    return f"step{step}_rank{rank}.pt.trace.json.gz"


def traces_of(run_dir: str | Path) -> Path:
    """The folder with the traces of a run, which may not exist yet, given the folder of the run or its log file."""
    return find_log(run_dir).parent / TRACES


def newest_files(folder: Path) -> dict[int, Path]:
    found: dict[int, tuple[int, Path]] = {}
    for path in folder.glob("step*.pt.trace.json.gz"):
        name = _TRACE_NAME.fullmatch(path.name)
        written = _written(path)
        if name is not None and written is not None:
            rank = int(name[2])
            found[rank] = max(found.get(rank, (-1, path)), (written[1], path))
    return {rank: found[rank][1] for rank in sorted(found)}


def newest_traces(run_dir: str | Path) -> tuple[TraceSplit, ...]:
    """The split of the newest trace of each rank of a run, in the order of the ranks; empty without traces.

    What was read is kept beside each trace, as `<trace>.split.json`, so that a trace is read once.
    """
    try:
        folder = traces_of(run_dir)
    except NoLogError:
        folder = Path(run_dir).expanduser() / TRACES
    files = list(newest_files(folder).values())
    written = [_written(path) for path in files]
    return tuple(
        replace(split, written_unix_time=None if when is None else when[1] / _NANOSECONDS_PER_SECOND)
        for split, when in zip(splits_of(files), written, strict=True)
    )


def splits_of(paths: Iterable[Path]) -> tuple[TraceSplit, ...]:
    return tuple(map(_split_of, paths))


def usable_traces(run_dir: str | Path, files: Sequence[str] = ()) -> tuple[tuple[TraceSplit, ...], list[str]]:
    """The traces in the files, or else the newest of the run, and what is wrong with those of the run."""
    if files:
        return tuple(read_trace(file) for file in files), []
    try:
        return newest_traces(run_dir), []
    except InputError as error:  # the waterfall is worth showing without the trace
        return (), [f"The trace of this run is not used: {error}."]


def traces_of_log(log: RunLog, traces: Sequence[TraceSplit]) -> tuple[Sequence[TraceSplit], list[str]]:
    """The traces that were not written before the run began, by an earlier run in its folder, and notes on them."""
    began = log.starts[0].unix_time if log.starts else 0.0
    used = [trace for trace in traces if trace.written_unix_time is None or trace.written_unix_time >= began]
    notes = [
        f"The trace {one_line(trace.file)} is of {trace.devices} devices: time in which any of them works is not idle."
        for trace in used
        if trace.devices > 1
    ]
    older = [one_line(trace.file) for trace in traces if trace not in used]
    if older:
        notes.append(f"The trace {older[0]} is older than this run and of an earlier one, so it is not used.")
    return used, notes


def _written(path: Path) -> tuple[int, int] | None:
    """Bytes and time of a file; None if it does not exist (any more)."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns


def _split_of(path: Path) -> TraceSplit:
    beside, written = path.with_name(f"{path.name}.split.json"), _written(path)
    content = read_object(beside)
    if content.get("format") == _CACHE_FORMAT and written is not None and content.get("trace") == list(written):
        kept = read_or_none(TraceSplit, content.get("split"))
        if kept is not None:
            return kept
    split = read_trace(path)
    # If the folder belongs to somebody else or the disk is full, the trace is read again next time.
    with suppress(OSError):
        write_json(beside, {"format": _CACHE_FORMAT, "trace": written, "split": split.to_json()})
    return split
