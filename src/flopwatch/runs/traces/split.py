"""Divides the time of a trace's steps by use.

Of a trace on an accelerator, the steps are those of the device, which may work long after the host: a step ends when
the host has ended it and the device has finished all work that was launched by then, and there the next one begins.
The first begins with the host's mark, or, if the device was still at work then, when it had finished what was launched
before. Work is known by the correlation of its launch. Without that, the steps are those of the host, and the last
ends with its annotation on the device.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from flopwatch.decode import Stored
from flopwatch.errors import InputError
from flopwatch.runs.traces.device import KERNELS, DeviceWork
from flopwatch.runs.traces.events import interval_of, name_of, read_events
from flopwatch.runs.traces.intervals import USES, Intervals, split_time
from flopwatch.runs.traces.steps import OPTIMIZER, PROFILER_STEP, StepMarks, Thread
from flopwatch.runs.traces.uses import use_of_op

OWN_ENTRY = "flopwatch"
"""Entry of a trace by flopwatch: its `device`, and the number of `steps`; a later mark is of one that has not ended."""
OUTSIDE = "flopwatch::outside_steps"
"""Mark of the time between traced steps that belongs to no step, such as that of an evaluation."""
_COLLECTIVE = re.compile(r"(gloo|mpi|ucc):")
_LAUNCHES = ("_runtime", "_driver")
"""Ends of the categories of launches: `cuda_runtime`, `cuda_driver`, `hip_runtime`, `xpu_runtime` and so on."""
_NANOSECONDS_PER_SECOND = 1e9
_OTHER_USES = ("idle", "hidden_communication")
_RANK = re.compile(r"rank(\d+)")
_Times = Mapping[str, Iterable[tuple[int, int]]]


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
        marked_by: The annotation of the trace that marks its steps, with N for a number.
        devices: Number of accelerators whose kernels the trace has. The time in which any of them works is not idle.
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
    marked_by: str = PROFILER_STEP
    devices: int = 1


def read_trace(path: str | Path, mark: str | None = None) -> TraceSplit:
    """Read a trace of torch's profiler, a `.json` or `.json.gz` file, without loading it into memory.

    The steps are those that `ProfilerStep#N` marks in the trace, as flopwatch and `torch.profiler.profile` with a
    schedule write them, or else another annotation that a training writes once per step. `mark` is a part of the name
    of the annotation, if it is none of these. Raises InputError if the file is no trace, is damaged, or has no steps
    or no ops.
    """
    path = Path(path).expanduser()
    found = _Collected(mark)
    about = read_events(path, found.add)
    own = about.get(OWN_ENTRY)
    own = own if isinstance(own, dict) else {}
    marked_by, steps = found.steps(own.get("steps"))
    problem = found.problem(marked_by, steps, str(own.get("device") or found.launching_kind))
    if problem:
        raise InputError(f"the trace {str(path)!r} {problem}")
    begin, end, intervals = found.window(steps)
    spent = split_time(intervals, begin, end, on_cpu=found.is_on_cpu)
    seconds = {f"{use}_seconds": spent.get(use, 0) / _NANOSECONDS_PER_SECOND for use in (*USES, *_OTHER_USES)}
    seconds["exposed_communication_seconds"] = seconds.pop("communication_seconds")
    device = "cpu" if found.is_on_cpu else found.kind
    whole = (end - begin) / _NANOSECONDS_PER_SECOND - seconds.pop("outside_seconds")
    if whole <= 0:
        raise InputError(
            f"the trace {str(path)!r} has steps that take no time; take another one with: flopwatch trace RUN_DIR"
        )
    rank, devices = _rank(about, path), max(1, found.devices)
    return TraceSplit(path.name, rank, device, len(steps), whole, **seconds, marked_by=marked_by, devices=devices)


def _rank(about: Mapping[str, Any], path: Path) -> int:
    of_job = about.get("distributedInfo")
    rank = of_job.get("rank") if isinstance(of_job, dict) else None
    named = _RANK.search(path.name)
    return rank if type(rank) is int and rank >= 0 else int(named[1]) if named else 0


class _Collected:
    """What is needed of a trace, collected event by event."""

    def __init__(self, mark: str | None) -> None:
        self.kind = "cuda"
        self._has_events = False
        self._mark = mark
        self._marks = StepMarks(mark or None)
        self._device = DeviceWork()
        self._on_host = {use: Intervals() for use in USES}
        self._annotated = {use: Intervals() for use in ("outside", "optimizer")}
        self._device_ends: dict[str, int] = {}
        self._use_of_op = lru_cache(4096)(use_of_op)

    @property
    def is_on_cpu(self) -> bool:
        return not self._device

    @property
    def launching_kind(self) -> str:
        """Of what kind the device is for which the host launched kernels, whether or not the trace has those."""
        return self.kind if self._device.has_launches else "cpu"

    @property
    def devices(self) -> int:
        return len(self._device.devices)

    def add(self, event: Mapping[str, Any]) -> None:
        self._has_events = True
        category, interval = str(event.get("cat")), interval_of(event)
        if interval is None:
            return
        if category in KERNELS:
            self._device.add_kernel(event, *interval)
        elif category == "cpu_op":
            self._add_op(event, *interval)
        elif category == "user_annotation":
            self._add_annotation(event, *interval)
        elif category == "gpu_user_annotation":
            self._add_annotation_of_device(name_of(event), *interval)
        elif category.endswith(_LAUNCHES):
            self._device.add_launch(event, interval[0])
            if category == "xpu_runtime":
                self.kind = "xpu"

    def _add_op(self, event: Mapping[str, Any], start: int, end: int) -> None:
        self._device.add_op(event)
        use = self._use_of_op(name_of(event))
        if use is not None:
            self._on_host[use].add(start, end)

    def _add_annotation(self, event: Mapping[str, Any], start: int, end: int) -> None:
        name = name_of(event)
        self._marks.add(name, start, end, Thread(str(event.get("pid")), str(event.get("tid"))))
        use = _marked_use(name)
        if use is not None:
            self._on_host[use].add(start, end)
        elif _COLLECTIVE.match(name):
            self._on_host["communication"].add(start, end)

    def _add_annotation_of_device(self, name: str, start: int, end: int) -> None:
        use = _marked_use(name)
        if use is not None:
            self._annotated[use].add(start, end)
        elif name.startswith("ProfilerStep#"):
            self._device_ends[name] = max(self._device_ends.get(name, 0), end)

    def steps(self, complete: Any) -> tuple[str, list[tuple[int, int]]]:
        """The annotation that marks the steps, and start and end of the complete ones on the host."""
        marked_by, steps = self._marks.chosen()
        if isinstance(complete, int) and complete > 0:
            return marked_by, steps[:complete]
        # `torch.profiler` marks one step more if the training ends with a call of its `step()`.
        if marked_by == PROFILER_STEP and len(steps) > 1 and self._device.is_launched_within(*steps[0]):
            has_work = self._device.is_launched_within(*steps[-1])
            return marked_by, steps if has_work else steps[:-1]
        return marked_by, steps

    def window(self, steps: list[tuple[int, int]]) -> tuple[int, int, _Times]:
        """Begin and end of the steps together, and the intervals of each use."""
        begin, end = steps[0][0], steps[-1][1]
        if self.is_on_cpu:
            return begin, end, self._on_host
        intervals = self._device.intervals()
        if not self._device.is_launched_within(begin, end):
            last = max([end, *self._device_ends.values()])
            return begin, last, {**intervals, **self._annotated}
        outside = list(self._on_host["outside"])
        begin, end, *edges = self._device.finished([begin, end, *(edge for pair in outside for edge in pair)])
        return (
            begin,
            end,
            {
                **intervals,
                "optimizer": self._device.computing_launched_within(self._on_host["optimizer"]),
                "outside": list(zip(edges[::2], edges[1::2], strict=True)),
            },
        )

    def problem(self, marked_by: str, steps: list[tuple[int, int]], device: str) -> str | None:
        if not self._has_events:
            return "has no events; take another one with: flopwatch trace RUN_DIR"
        if not steps:
            return self._without_steps()
        processes = self._marks.processes(marked_by)
        if len(processes) > 1:
            return (
                f"has steps of {len(processes)} processes, and which kernel is of which of them is unknown; "
                "pass the trace of one process"
            )
        if self.is_on_cpu and device != "cpu":
            return (
                f"is of a training on {device}, but the profiler recorded no kernels of the device; "
                "allow the training's user to profile the device (on NVIDIA: NVreg_RestrictProfilingToAdminUsers=0)"
            )
        if self.is_on_cpu and not any(self._on_host[use] for use in USES if use not in self._annotated):
            record = "record ProfilerActivity.CPU, and on an accelerator its activity too"
            return f"has steps, but neither kernels nor ops; {record}"
        return None

    def _without_steps(self) -> str:
        names = self._marks.told()
        if self._mark is not None:
            has = f"Its annotations are {names}" if names else "It has no annotations"
            return f"has no annotation with {self._mark!r} in its name. {has}"
        has = f"Its annotations are {names}: if one of them is a step, pass --mark with its name"
        has = has if names else "It has no annotations"
        return (
            "does not mark its steps with ProfilerStep#N, an iteration's own annotation or two steps of an optimizer, "
            f"so the time of a step is unknown. {has}. To take another trace, run `flopwatch trace RUN_DIR`, or pass "
            "schedule= to torch.profiler.profile and call its step()"
        )


def _marked_use(name: str) -> str | None:
    return "outside" if name == OUTSIDE else "optimizer" if name.startswith(OPTIMIZER) else None
