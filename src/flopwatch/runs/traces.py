"""Requests profiler traces, and reads them: the time of the traced steps by use, per rank.

A trace has an interval for each kernel on an accelerator, or for each op on the CPU. Of each use only the union of its
intervals is kept, so that a trace of gigabytes needs little memory.
"""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from flopwatch.decode import Stored, read_or_none
from flopwatch.errors import InputError
from flopwatch.files import read_object, write_json
from flopwatch.runs.log_file import NoLogError, find_log
from flopwatch.runs.reading import RunLog
from flopwatch.runs.trace_events import USES, Intervals, read_events, split_time, use_of_kernel, use_of_op
from flopwatch.text import one_line

TRACES = "traces"
"""Name of the folder with the traces of a run."""
OWN_ENTRY = "flopwatch"
"""Entry of a trace by flopwatch: its `device`, and the number of `steps`; a later mark is of one that has not ended."""
OUTSIDE = "flopwatch::outside_steps"
"""Mark of the time between traced steps that belongs to no step, such as that of an evaluation."""
_OPTIMIZER = "Optimizer.step#"
_STEP = re.compile(r"ProfilerStep#\d+$")
_COLLECTIVE = re.compile(r"(gloo|mpi|ucc):")
_MARKED = ("outside", "optimizer")
_ANNOTATIONS = ("user_annotation", "gpu_user_annotation")
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_NANOSECONDS_PER_SECOND = 1e9
_OTHER_USES = ("idle", "hidden_communication")
_MOST_MICROSECONDS = 2**63 / 1e4
"""Beyond this, nanoseconds do not fit in 8 bytes; a trace with such a time is damaged."""
_TRACE_NAME = re.compile(r"step(\d+)_rank(\d+)\.pt\.trace\.json\.gz")
_RANK = re.compile(r"rank(\d+)")
_CACHE_FORMAT = 2


@dataclass(frozen=True, slots=True)
class TraceSplit(Stored):
    """The time of one rank's traced steps by use. All uses except `hidden_communication_seconds` add up to `seconds`.

    On an accelerator the uses are those of the device: kernels, copies and the time in which it has no work. On a CPU
    they are ops of any thread of the process.

    Attributes:
        file: Name of the trace file.
        rank: The rank that was traced.
        device: `cpu`, or the kind of accelerator such as `cuda`.
        steps: Number of traced steps.
        seconds: Time of the traced steps, from the start of the first to the end of the last.
        matmul_seconds: Matrix products and convolutions.
        attention_seconds: Fused attention.
        other_kernel_seconds: All other computation of forward and backward pass: norms, activations, element-wise ops.
        optimizer_seconds: Work of the optimizer's step.
        exposed_communication_seconds: Communication while the device computes nothing.
        hidden_communication_seconds: Communication behind computation; it costs no time and is part of no sum.
        copy_seconds: Copies between host and device while the device computes nothing.
        idle_seconds: Time in which the device has no work: waiting for input, for the host, or for Python.
        written_unix_time: When the file was written; None if it does not matter, because the user has named the file.
    """

    file: str
    rank: int
    device: str
    steps: int
    seconds: float
    matmul_seconds: float = 0.0
    attention_seconds: float = 0.0
    other_kernel_seconds: float = 0.0
    optimizer_seconds: float = 0.0
    exposed_communication_seconds: float = 0.0
    hidden_communication_seconds: float = 0.0
    copy_seconds: float = 0.0
    idle_seconds: float = 0.0
    written_unix_time: float | None = None


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
    """The traces that were not written before the run began, by an earlier run in its folder, and a note on others."""
    began = log.starts[0].unix_time if log.starts else 0.0
    used = [trace for trace in traces if trace.written_unix_time is None or trace.written_unix_time >= began]
    older = [one_line(trace.file) for trace in traces if trace not in used]
    if not older:
        return traces, []
    return used, [f"The trace {older[0]} is older than this run and of an earlier one, so it is not used."]


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


def read_trace(path: str | Path) -> TraceSplit:
    """Read a trace of torch's profiler, a `.json` or `.json.gz` file, without loading it into memory.

    The steps are those that `ProfilerStep#N` marks in the trace, as flopwatch and `torch.profiler.profile` with a
    schedule write them. Raises InputError if the file is no trace, is damaged, or has no steps or no ops.
    """
    path = Path(path).expanduser()
    found = _Collected()
    about = read_events(path, found.add)
    own = about.get(OWN_ENTRY)
    own = own if isinstance(own, dict) else {}
    on_cpu = not any(found.on_device[use] for use in USES if use not in _MARKED)
    intervals = found.on_host if on_cpu else found.on_device
    problem = _problem(found, intervals, str(own.get("device", "cpu")) if on_cpu else "cpu")
    if problem:
        raise InputError(f"the trace {str(path)!r} {problem}")
    steps = found.ordered_steps(own.get("steps"))
    begin, end = steps[0][0], max(last for _, last in steps)
    spent = split_time(intervals, begin, end, on_cpu=on_cpu)
    seconds = {f"{use}_seconds": spent.get(use, 0) / _NANOSECONDS_PER_SECOND for use in (*USES, *_OTHER_USES)}
    seconds["exposed_communication_seconds"] = seconds.pop("communication_seconds")
    device = "cpu" if on_cpu else found.kind
    whole = (end - begin) / _NANOSECONDS_PER_SECOND - seconds.pop("outside_seconds")
    return TraceSplit(path.name, _rank(about, path), device, len(steps), whole, **seconds)


def _problem(found: "_Collected", intervals: Mapping[str, Intervals], device_without_kernels: str) -> str | None:
    if not found.has_events:
        return "has no events; take another one with: flopwatch trace RUN_DIR"
    if not found.steps:
        return (
            "does not mark its steps with ProfilerStep#N, so the time of a step is unknown; take one with "
            "`flopwatch trace RUN_DIR`, or pass schedule= to torch.profiler.profile and call its step()"
        )
    if device_without_kernels != "cpu":
        return (
            f"is of a training on {device_without_kernels}, but the profiler recorded no kernels of the device; "
            "allow the training's user to profile the device (on NVIDIA: NVreg_RestrictProfilingToAdminUsers=0)"
        )
    if not any(intervals.values()):
        record = "record ProfilerActivity.CPU, and on an accelerator its activity too"
        return f"has steps, but neither kernels nor ops; {record}"
    return None


def _rank(about: Mapping[str, Any], path: Path) -> int:
    of_job = about.get("distributedInfo")
    rank = of_job.get("rank") if isinstance(of_job, dict) else None
    named = _RANK.search(path.name)
    return rank if isinstance(rank, int) else int(named[1]) if named else 0


class _Collected:
    """The intervals of a trace, collected event by event."""

    def __init__(self) -> None:
        self.on_device = {use: Intervals() for use in USES}
        self.on_host = {use: Intervals() for use in USES}
        self.steps: dict[str, tuple[int, int]] = {}
        self.has_events = False
        self.kind = "cuda"
        self._device_ends: dict[str, int] = {}
        self._use_of_kernel, self._use_of_op = lru_cache(4096)(use_of_kernel), lru_cache(4096)(use_of_op)

    def ordered_steps(self, complete: Any) -> list[tuple[int, int]]:
        """Start and end of the complete steps. The device may end a step after the host has ended it."""
        steps = sorted((start, max(end, self._device_ends.get(name, end))) for name, (start, end) in self.steps.items())
        return steps[:complete] if isinstance(complete, int) and complete > 0 else steps

    def add(self, event: Mapping[str, Any]) -> None:
        self.has_events = True
        category = event.get("cat")
        if category == "cpu_op" or category in _ON_DEVICE or category in _ANNOTATIONS:
            interval = _interval_of(event)
            if interval is not None:
                self._add(str(category), str(event.get("name", "")), *interval)
        elif category == "xpu_runtime":
            self.kind = "xpu"

    def _add(self, category: str, name: str, start: int, end: int) -> None:
        if category in _ON_DEVICE:
            self.on_device[self._use_of_kernel(name, category)].add(start, end)
        elif name.startswith(_OPTIMIZER) or name == OUTSIDE:
            use = "outside" if name == OUTSIDE else "optimizer"
            (self.on_device if category == "gpu_user_annotation" else self.on_host)[use].add(start, end)
        elif category == "cpu_op":
            of_op = self._use_of_op(name)
            if of_op is not None:
                self.on_host[of_op].add(start, end)
        elif category == "user_annotation" and _COLLECTIVE.match(name):
            self.on_host["communication"].add(start, end)
        elif category == "user_annotation" and _STEP.match(name):
            self.steps[name] = start, end
        elif _STEP.match(name):
            self._device_ends[name] = max(self._device_ends.get(name, 0), end)


def _interval_of(event: Mapping[str, Any]) -> tuple[int, int] | None:
    start, length = event.get("ts"), event.get("dur")
    if event.get("ph") != "X" or not isinstance(start, int | float) or not isinstance(length, int | float):
        return None
    if not (abs(start) < _MOST_MICROSECONDS and 0 <= length < _MOST_MICROSECONDS):  # it is neither of NaN
        return None
    begin = round(start * 1000)
    return begin, begin + round(length * 1000)


# A request for a trace of a training that runs in another process is a small file in the run's folder. Each rank of the
# run looks for it at the end of a logging window. Nobody removes the file, because a rank may look late: each rank
# remembers which request it has seen, and does not answer one that is older than the rank itself.

MOST_STEPS = 10
"""A trace contains at most this many steps, because a longer one would take gigabytes."""
_REQUEST = "request.json"


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
