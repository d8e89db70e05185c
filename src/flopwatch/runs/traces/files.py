"""The trace files of a run: requests for them, their names, the newest of each rank, and what was read from them.

A request is a small file in the run's folder of traces. Each rank of the run looks for it at the end of a logging
window. Nobody removes the file, because a rank may look late: each rank remembers which request it has seen, and does
not answer one that is older than the rank itself.
"""

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from flopwatch.errors import InputError
from flopwatch.files import read_object, write_json
from flopwatch.runs.log_file import NoLogError, find_log
from flopwatch.runs.reading import RunLog
from flopwatch.runs.traces.split import TraceSplit, read_trace
from flopwatch.text import one_line

TRACES = "traces"
"""Name of the folder with the traces of a run."""
MOST_STEPS = 10
"""A trace contains at most this many steps, because a longer one would take gigabytes."""
_REQUEST = "request.json"
_TRACE_NAME = re.compile(r"step(\d+)_rank(\d+)\.pt\.trace\.json\.gz")


def write_request(folder: Path, steps: int) -> Path:
    """Ask the run with this folder of traces for a trace of its next steps. Returns the file of the request."""
    if not 1 <= steps <= MOST_STEPS:
        raise InputError(f"--steps must be between 1 and {MOST_STEPS}, got {steps}: a longer trace takes gigabytes")
    file = folder / _REQUEST
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(file, {"steps": steps})
    except OSError as error:
        raise InputError(
            f"the request for a trace cannot be written to {str(file)!r}: {error.strerror}; "
            "run the command as the user who trains, or call monitor.capture_trace() in the training"
        ) from None
    return file


class TraceRequests:
    """Looks for new requests in a folder of traces, until it is closed. One that is there already is not new."""

    def __init__(self, folder: Path) -> None:
        self.is_closed = False
        self._file = folder / _REQUEST
        self._seen = self._look()

    def new_steps(self) -> int | None:
        """The steps that a new request asks for; None without one. Costs one `os.stat`."""
        found = self._look()
        if found is None or found == self._seen:
            return None
        self._seen = found
        steps = read_object(self._file).get("steps")
        return steps if isinstance(steps, int) and 1 <= steps <= MOST_STEPS else None

    def _look(self) -> tuple[int, int] | None:
        try:
            found = os.stat(self._file)
        except (OSError, ValueError):
            return None
        return found.st_mtime_ns, found.st_ino


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
        if name := _TRACE_NAME.fullmatch(path.name):
            rank = int(name[2])
            found[rank] = max(found.get(rank, (-1, path)), (path.stat().st_mtime_ns, path))
    return {rank: found[rank][1] for rank in sorted(found)}


def newest_traces(run_dir: str | Path) -> tuple[TraceSplit, ...]:
    """The split of the newest trace of each rank of a run, in the order of the ranks; empty without traces."""
    try:
        folder = traces_of(run_dir)
    except NoLogError:
        folder = Path(run_dir).expanduser() / TRACES
    return splits_of(newest_files(folder).values())


def splits_of(paths: Iterable[Path]) -> tuple[TraceSplit, ...]:
    return tuple(replace(read_trace(path), written_unix_time=path.stat().st_mtime) for path in paths)


def usable_traces(run_dir: str | Path, files: Sequence[str] = ()) -> tuple[tuple[TraceSplit, ...], list[str]]:
    """The traces in the files, or else the newest of the run, and what is wrong with those of the run."""
    if files:
        return tuple(read_trace(file) for file in files), []
    try:
        return newest_traces(run_dir), []
    except InputError as error:  # the waterfall is worth showing without the trace
        return (), [f"The trace of this run is not used: {error}."]


def traces_of_log(log: RunLog, traces: Sequence[TraceSplit]) -> tuple[Sequence[TraceSplit], list[str]]:
    """The traces that were not written before the run began, by an earlier run in its folder, and a note on others."""
    began = log.starts[0].unix_time if log.starts else 0.0
    used = [trace for trace in traces if trace.written_unix_time is None or trace.written_unix_time >= began]
    older = [one_line(trace.file) for trace in traces if trace not in used]
    note = f"The trace {older[0]} is older than this run and of an earlier one, so it is not used." if older else ""
    return used, [note] if note else []
