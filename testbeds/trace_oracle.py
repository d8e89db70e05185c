"""An independent reading of a GPU trace: it loads the whole file, adds up by brute force, and knows ops by name.

It shares no code with flopwatch and must not import it. Times are whole nanoseconds.

- A step ends when the host's mark has ended and everything launched before that has ended on the device.
- The first step begins with the host's mark, or when everything launched before that has ended on the device, if later.
- What a kernel is, its op says: the innermost op around its launch, on the thread that launched it.
"""

import gzip
import json
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

MATMUL_OPS = {
    f"aten::{name}"
    for name in (
        *("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "_scaled_mm", "_grouped_mm", "_addmm_activation"),
        *("convolution", "_convolution", "cudnn_convolution", "cudnn_convolution_relu", "convolution_backward"),
        *("miopen_convolution", "miopen_depthwise_convolution", "thnn_conv2d", "_slow_conv2d_forward"),
    )
}
ATTENTION_OPS = {
    "aten::_flash_attention_forward",
    "aten::_flash_attention_backward",
    "aten::_efficient_attention_forward",
    "aten::_efficient_attention_backward",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_cudnn_attention_forward",
    "vllm::unified_attention_with_output",
}
COMMUNICATION_OPS = re.compile(r"record_param_comms|symm_mem::multimem_all_reduce_|c10d::")
MIXED_OPS = re.compile(r"torch::autograd::CppNode|CompiledFunction|autograd::engine|vllm::moe_forward|\w+Backward\d*$")
"""Ops that launch products and other kernels alike, so that they do not tell what a kernel is."""
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_COLLECTIVE = re.compile(r"nccl|rccl|multimem_all_reduce", re.IGNORECASE)


@dataclass(frozen=True)
class Kernel:
    """A kernel or copy; `launch` is None if its launch is not in the trace, `op` if no op surrounds it."""

    category: str
    name: str
    stream: tuple[Any, Any]
    start: int
    end: int
    launch: int | None
    op: str | None

    @property
    def kind(self) -> str:
        if _COLLECTIVE.search(self.name):
            return "communication"
        return "copy" if self.category == "gpu_memcpy" and "DtoD" not in self.name else "compute"


@dataclass(frozen=True)
class Truth:
    """Of all steps together: from when to when, and how long the device did nothing, or only communicated."""

    steps: int
    begin: int
    end: int
    idle: int
    exposed_communication: int
    hidden_communication: int
    first_kernel_begin: int
    """Start of the first kernel that was launched in the steps."""

    @property
    def length(self) -> int:
        return self.end - self.begin


class Trace:
    """A trace in memory."""

    def __init__(self, path: Path) -> None:
        with gzip.open(path, "rt", errors="replace") as file:
            content = json.load(file, parse_float=Decimal)
        self._events = [each for each in content["traceEvents"] if each.get("ph") == "X"]
        self.kernels = self._kernels()

    def truth(self) -> Truth:
        """What the steps are like that `ProfilerStep#N` marks."""
        steps = self._with_work(self._marks())
        first, last = steps[0][0], steps[-1][1]
        begin = max([first, *(kernel.end for kernel in self.kernels if self._is_before(kernel, first))])
        end = max([last, *(kernel.end for kernel in self.kernels if self._is_before(kernel, last))])
        compute, communication, copies = (
            _covered(((each.start, each.end) for each in self.kernels if each.kind == kind), begin, end)
            for kind in ("compute", "communication", "copy")
        )
        busy = _length(compute + communication + copies)
        exposed = _length(compute + communication) - _length(compute)
        launched = [each.start for each in self.kernels if each.launch is not None and first <= each.launch < last]
        hidden = _length(communication) - exposed
        return Truth(len(steps), begin, end, end - begin - busy, exposed, hidden, min(launched))

    def _with_work(self, steps: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Without a last mark in which nothing was launched: the profiler opens one more than there are steps."""
        start, end = steps[-1]
        has_work = any(each.launch is not None and start <= each.launch < end for each in self.kernels)
        return steps if has_work else steps[:-1]

    def _marks(self) -> list[tuple[int, int]]:
        annotations = [each for each in self._events if each.get("cat") == "user_annotation"]
        found = [each for each in annotations if re.match(r"ProfilerStep#\d+$", each["name"])]
        return sorted((_start(each), _end(each)) for each in found)

    def _kernels(self) -> list[Kernel]:
        launches = {
            each["args"]["correlation"]: each
            for each in self._events
            if str(each.get("cat")).endswith(("_runtime", "_driver")) and "correlation" in each.get("args", {})
        }
        ops = self._launching_ops(launches)
        found = []
        for each in self._events:
            if each.get("cat") in _DEVICE:
                correlation = each["args"].get("correlation")
                launch = launches.get(correlation)
                when = None if launch is None else _start(launch)
                stream = (each["pid"], each["tid"])
                op = ops.get(correlation)
                found.append(Kernel(each["cat"], each["name"], stream, _start(each), _end(each), when, op))
        return found

    def _launching_ops(self, launches: dict[int, Any]) -> dict[int, str]:
        """The innermost op around each launch, by correlation: of those that have begun, the one that begun last."""
        by_thread: dict[Any, list[tuple[int, int, int, Any]]] = defaultdict(list)
        for each in self._events:
            if each.get("cat") == "cpu_op":
                by_thread[each["pid"], each["tid"]].append((_start(each), 0, -_end(each), each["name"]))
        for correlation, launch in launches.items():
            by_thread[launch["pid"], launch["tid"]].append((_start(launch), 1, 0, correlation))
        found = {}
        for entries in by_thread.values():
            open_ops: list[tuple[int, str]] = []
            for start, is_launch, minus_end, name in sorted(entries, key=lambda entry: entry[:3]):
                open_ops = [op for op in open_ops if op[0] > start or (is_launch and op[0] == start)]
                if not is_launch:
                    open_ops.append((-minus_end, name))
                elif open_ops:
                    found[name] = open_ops[-1][1]
        return found

    def _is_before(self, kernel: Kernel, moment: int) -> bool:
        if kernel.launch is not None:
            return kernel.launch < moment
        same_stream = self._first_with_launch.get(kernel.stream)
        return same_stream is not None and kernel.start < same_stream

    @property
    def _first_with_launch(self) -> dict[Any, int]:
        if not hasattr(self, "_first"):
            known = sorted((each for each in self.kernels if each.launch is not None), key=lambda each: -each.start)
            self._first = {each.stream: each.start for each in known}
        return self._first


def use_by_op(kernel: Kernel) -> str | None:
    """What a kernel is by the op that launched it; None if no op tells. A collective is what NCCL or RCCL runs."""
    op = kernel.op
    if op == "vllm::moe_forward":  # looked at by hand: its products are the kernels of TensorRT-LLM named bmm_
        return "matmul" if kernel.name.startswith("bmm_") else "other_kernel"
    if op is None or MIXED_OPS.match(op):
        return None
    if COMMUNICATION_OPS.match(op):
        return "communication" if kernel.kind == "communication" else "other_kernel"
    return "matmul" if op in MATMUL_OPS else "attention" if op in ATTENTION_OPS else "other_kernel"


def _covered(intervals: Iterable[tuple[int, int]], begin: int, end: int) -> list[tuple[int, int]]:
    clipped = ((max(start, begin), min(stop, end)) for start, stop in intervals)
    return [(start, stop) for start, stop in clipped if start < stop]


def _length(intervals: list[tuple[int, int]]) -> int:
    """The time in which at least one is open, by counting how many are."""
    changes: dict[int, int] = defaultdict(int)
    for start, stop in intervals:
        changes[start] += 1
        changes[stop] -= 1
    total, count, before = 0, 0, 0
    for moment in sorted(changes):
        total += moment - before if count else 0
        count, before = count + changes[moment], moment
    return total


def _start(event: dict[str, Any]) -> int:
    return int(event["ts"] * 1000)


def _end(event: dict[str, Any]) -> int:
    return int(event["ts"] * 1000) + int(event["dur"] * 1000)
