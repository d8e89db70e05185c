"""Divides the time of a trace's steps by use.

The steps are those that `ProfilerStep#N` marks, as flopwatch and `torch.profiler.profile` with a schedule write them.
Of a trace on an accelerator they are those of the device, which may work long after the host: a step ends when the
host has ended it and the device has finished all work that was launched by then, and there the next one begins. The
first begins with the host's mark, or, if the device was still at work then, when it had finished what was launched
before. Work is known by the correlation of its launch.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from flopwatch.decode import Stored
from flopwatch.errors import InputError
from flopwatch.runs.traces.device import KERNELS, DeviceWork
from flopwatch.runs.traces.events import interval_of, name_of, read_events
from flopwatch.runs.traces.intervals import USES, Interval, split_time, union
from flopwatch.runs.traces.uses import use_of_op

OWN_ENTRY = "flopwatch"
"""Entry of a trace by flopwatch: its `device`, and the number of `steps`; a later mark is of one that has not ended."""
OUTSIDE = "flopwatch::outside_steps"
"""Mark of the time between traced steps that belongs to no step, such as that of an evaluation."""
_STEP = re.compile(r"ProfilerStep#\d+$")
_OPTIMIZER = "Optimizer.step#"
_COLLECTIVE = re.compile(r"(gloo|mpi|ucc):")
_LAUNCHES = ("_runtime", "_driver")
"""Ends of the categories of launches: `cuda_runtime`, `cuda_driver`, `hip_runtime`, `xpu_runtime` and so on."""
_NANOSECONDS_PER_SECOND = 1e9
_RANK = re.compile(r"rank(\d+)")


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


def read_trace(path: str | Path) -> TraceSplit:
    """Read a trace of torch's profiler, a `.json` or `.json.gz` file, without loading it into memory.

    Raises InputError if the file is no trace, is damaged, or has no steps or no ops.
    """
    path = Path(path).expanduser()
    found = _Collected()
    about = read_events(path, found.add)
    own = about.get(OWN_ENTRY)
    own = own if isinstance(own, dict) else {}
    device = str(own.get("device") or ("cuda" if found.device or found.device.has_launches else "cpu"))
    steps = found.steps(own.get("steps"))
    problem = found.problem(steps, device)
    if problem:
        raise InputError(f"the trace {str(path)!r} {problem}")
    begin, end, intervals = found.window(steps)
    spent = split_time(intervals, begin, end, on_cpu=not found.device)
    seconds = {f"{use}_seconds": nanoseconds / _NANOSECONDS_PER_SECOND for use, nanoseconds in spent.items()}
    seconds["exposed_communication_seconds"] = seconds.pop("communication_seconds", 0.0)
    whole = (end - begin) / _NANOSECONDS_PER_SECOND - seconds.pop("outside_seconds", 0.0)
    if whole <= 0:
        raise InputError(
            f"the trace {str(path)!r} has steps that take no time; take another one with: flopwatch trace RUN_DIR"
        )
    return TraceSplit(path.name, _rank(about, path), device if found.device else "cpu", len(steps), whole, **seconds)


def _rank(about: Mapping[str, Any], path: Path) -> int:
    of_job = about.get("distributedInfo")
    rank = of_job.get("rank") if isinstance(of_job, dict) else None
    named = _RANK.search(path.name)
    return rank if type(rank) is int and rank >= 0 else int(named[1]) if named else 0


class _Collected:
    """What is needed of a trace, collected event by event."""

    def __init__(self) -> None:
        self.device = DeviceWork()
        self._has_events = False
        self._steps: list[Interval] = []
        self._processes: set[str] = set()
        """Those that have marked steps."""
        self._on_host: dict[str, list[Interval]] = {use: [] for use in USES}
        self._use_of_op = lru_cache(4096)(use_of_op)

    def add(self, event: Mapping[str, Any]) -> None:
        self._has_events = True
        category, interval = str(event.get("cat")), interval_of(event)
        if interval is None:
            return
        if category in KERNELS:
            self.device.add_kernel(event, *interval)
        elif category == "cpu_op":
            use = self._use_of_op(name_of(event))
            if use is not None:
                self._on_host[use].append(interval)
        elif category == "user_annotation":
            self._add_annotation(event, interval)
        elif category.endswith(_LAUNCHES):
            self.device.add_launch(event, interval[0])

    def _add_annotation(self, event: Mapping[str, Any], interval: Interval) -> None:
        name = name_of(event)
        if _STEP.match(name):
            self._steps.append(interval)
            self._processes.add(str(event.get("pid")))
        elif name == OUTSIDE:
            self._on_host["outside"].append(interval)
        elif name.startswith(_OPTIMIZER):
            self._on_host["optimizer"].append(interval)
        elif _COLLECTIVE.match(name):
            self._on_host["communication"].append(interval)

    def steps(self, complete: Any) -> list[Interval]:
        """Start and end of the complete steps on the host."""
        steps = sorted(self._steps)
        if isinstance(complete, int) and complete > 0:
            return steps[:complete]
        # `torch.profiler` marks one step more if the training ends with a call of its `step()`.
        has_more = len(steps) > 1 and self.device.is_launched_within(*steps[0])
        return steps[:-1] if has_more and not self.device.is_launched_within(*steps[-1]) else steps

    def window(self, steps: list[Interval]) -> tuple[int, int, Mapping[str, list[Interval]]]:
        """Begin and end of the steps together, and the intervals of each use."""
        begin, end = steps[0][0], steps[-1][1]
        if not self.device:
            return begin, end, self._on_host
        outside = [edge for pair in union(self._on_host["outside"]) for edge in pair]
        begin, end, *edges = self.device.finished([begin, end, *outside])
        left_out = list(zip(edges[::2], edges[1::2], strict=True))
        return begin, end, {**self.device.intervals(self._on_host["optimizer"]), "outside": left_out}

    def problem(self, steps: list[Interval], device: str) -> str | None:
        if not self._has_events:
            return "has no events; take another one with: flopwatch trace RUN_DIR"
        if not steps:
            return (
                "does not mark its steps with ProfilerStep#N, so the time of a step is unknown. To take another trace, "
                "run `flopwatch trace RUN_DIR`, or pass schedule= to torch.profiler.profile and call its step()"
            )
        if len(self._processes) > 1:
            return f"has steps of {len(self._processes)} processes; pass the trace of one process"
        if not self.device and device != "cpu":
            return (
                f"is of a training on {device}, but the profiler recorded no kernels of the device; "
                "allow the training's user to profile the device (on NVIDIA: NVreg_RestrictProfilingToAdminUsers=0)"
            )
        if self.device and not self.device.is_launched_within(steps[0][0], steps[-1][1]):
            return "does not say which kernels the steps have launched; record ProfilerActivity.CPU too"
        if not self.device and not any(intervals for use, intervals in self._on_host.items() if use != "optimizer"):
            return "has steps, but neither kernels nor ops; record ProfilerActivity.CPU, and the device's activity too"
        return None
