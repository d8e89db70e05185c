"""What a kernel or an op is used for, and how the time of some steps divides among these uses.

Times are integers in nanoseconds, so that the uses add up exactly.
"""

import heapq
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping

USES = ("outside", "optimizer", "matmul", "attention", "other_kernel", "communication", "copy")
"""The uses of time. If intervals overlap, the time belongs to the first of these; without any, it is `idle`.

`outside` is the time of evaluations and other phases between the traced steps, which belongs to no step.
"""
_COMPUTING = ("matmul", "attention", "other_kernel")
_COMMUNICATION = re.compile(
    r"nccl|rccl|nvshmem|multimem|c10d::|gloo:|mpi:|ucc:|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|"
    r"symm_mem|_c10d_functional::",
    re.IGNORECASE,
)
_ATTENTION = re.compile(r"flash|fmha|attention|sdpa|mha_fwd|mha_bwd|attn", re.IGNORECASE)
_FUSED_KERNEL = re.compile(r"triton_(poi|red|per|for)_")
"""Element-wise kernels and reductions of torch.compile. They are named after the ops around them, such as a matmul."""
_MATMUL_KERNEL = re.compile(
    r"gemm|gemv|cutlass|cublas|xmma|nvjet|wgmma|splitkreduce|cijk_|conv(?!ert)|wgrad|dgrad|fprop|winograd|triton_tem_|"
    r"triton\w*_mm_|matmul",
    re.IGNORECASE,
)
_MATMUL_OP = re.compile(
    r"aten::_?(mm|addmm|bmm|baddbmm|addbmm|addmv|mv|dot|vdot|scaled_mm|grouped_mm|scaled_grouped_mm|int_mm|"
    r"addmm_activation)_?$|aten::\w*conv|aten::mkldnn_\w*linear|aten::mkldnn_rnn|mkl_linear|mkldnn::|mkl::|"
    r"onednn::\w*(linear|conv)"
)
_WRAPPER_OP = re.compile(
    r"autograd::engine::|torch::autograd::|\w*Backward\d*$|Torch-Compiled Region|## Call CompiledFxGraph|TorchDynamo"
)
"""Ops that only call others. Time in them in which no other op runs is spent in Python or in the autograd engine."""
_BLOCK_INTERVALS = 1 << 16


def use_of_kernel(name: str, category: str) -> str:
    """The use of an accelerator's time by a kernel or copy.

    >>> use_of_kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "kernel")
    'communication'
    >>> use_of_kernel("pytorch_flash::flash_fwd_kernel<cutlass::bfloat16_t>", "kernel")
    'attention'
    >>> use_of_kernel("Memcpy HtoD (Pinned -> Device)", "gpu_memcpy")
    'copy'
    >>> use_of_kernel("triton_poi_fused_convolution_relu_0", "kernel"), use_of_kernel("triton_tem_fused_mm_5", "kernel")
    ('other_kernel', 'matmul')
    """
    # In a memset and in a copy within the device, the device works and the host does not take part.
    if category == "gpu_memset" or "DtoD" in name or _FUSED_KERNEL.match(name):
        return "other_kernel"
    if category == "gpu_memcpy":
        return "copy"
    uses = ((_COMMUNICATION, "communication"), (_ATTENTION, "attention"), (_MATMUL_KERNEL, "matmul"))
    return next((use for pattern, use in uses if pattern.search(name)), "other_kernel")


def use_of_op(name: str) -> str | None:
    """The use of a CPU's time by an op; None for an op that only calls others.

    A CPU has no copies from the host to itself: an op that copies is a computation like any other.

    >>> use_of_op("aten::addmm"), use_of_op("aten::layer_norm"), use_of_op("AddmmBackward0")
    ('matmul', 'other_kernel', None)
    """
    if _WRAPPER_OP.match(name):
        return None
    uses = ((_COMMUNICATION, "communication"), (_MATMUL_OP, "matmul"), (_ATTENTION, "attention"))
    return next((use for pattern, use in uses if pattern.search(name)), "other_kernel")


class Intervals:
    """The union of many intervals in nanoseconds, in 16 bytes for each. They may come in any order and overlap."""

    def __init__(self) -> None:
        self._blocks: list[tuple[array[int], array[int]]] = []
        self._newest: list[tuple[int, int]] = []

    def add(self, start: int, end: int) -> None:
        self._newest.append((start, end))
        if len(self._newest) >= _BLOCK_INTERVALS:
            self._pack()

    def __bool__(self) -> bool:
        return bool(self._newest or self._blocks)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """The union, as intervals that are in order and do not touch."""
        self._pack()
        return _union(heapq.merge(*(zip(*block, strict=True) for block in self._blocks)))

    def _pack(self) -> None:
        if self._newest:
            starts, ends = array("q"), array("q")
            for start, end in _union(sorted(self._newest)):
                starts.append(start)
                ends.append(end)
            self._blocks.append((starts, ends))
            self._newest = []


def _union(ordered: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    begun: tuple[int, int] | None = None
    for start, end in ordered:
        if begun is not None and start <= begun[1]:
            begun = begun[0], max(begun[1], end)
        else:
            if begun is not None:
                yield begun
            begun = start, end
    if begun is not None:
        yield begun


def split_time(
    intervals: Mapping[str, Iterable[tuple[int, int]]], begin: int, end: int, *, on_cpu: bool
) -> dict[str, int]:
    """Divide the time from `begin` to `end` among the uses. All of them except `hidden_communication` add up to it.

    On a CPU all of the optimizer's step is work of the optimizer. On an accelerator only computation in it is: in the
    gaps between its kernels the device waits for Python. The intervals of each use are in order and do not overlap.

    >>> split_time({"matmul": [(0, 6)], "communication": [(4, 9)]}, 0, 10, on_cpu=False)
    {'matmul': 6, 'communication': 3, 'idle': 1, 'hidden_communication': 2}
    """
    edges = heapq.merge(*(_edges(intervals.get(use, ()), number, begin, end) for number, use in enumerate(USES)))
    uses = [_use_of(active, on_cpu=on_cpu) for active in range(1 << len(USES))]
    spent: dict[str, int] = {}
    communicating = 1 << USES.index("communication")
    hidden, active, before = 0, 0, begin
    for when, change in edges:
        if when > before:
            use = uses[active]
            spent[use] = spent.get(use, 0) + when - before
            if active & communicating and use not in ("communication", "outside"):
                hidden += when - before
            before = when
        active ^= change
    spent["idle"] = spent.get("idle", 0) + end - before
    return {**spent, "hidden_communication": hidden}


def _edges(ordered: Iterable[tuple[int, int]], number: int, begin: int, end: int) -> Iterator[tuple[int, int]]:
    """When the intervals start and end within the time from `begin` to `end`, each with the bit of their use."""
    for first, last in ordered:
        start, stop = max(first, begin), min(last, end)
        if start < stop:
            yield start, 1 << number
            yield stop, 1 << number


def _use_of(active: int, *, on_cpu: bool) -> str:
    names = [use for number, use in enumerate(USES) if active >> number & 1]
    if not on_cpu and not any(use in _COMPUTING for use in names):
        names = [use for use in names if use != "optimizer"]
    return names[0] if names else "idle"
