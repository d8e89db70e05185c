"""Reads the events of a profiler trace, tells the uses of kernels and ops, and divides time among these uses.

The format is the JSON object that torch's profiler (Kineto) writes: some entries that describe the trace, and the list
`traceEvents`. The file may be compressed with gzip. Events are read one at a time, so that a trace of gigabytes needs
little memory. Times are integers in nanoseconds, so that the uses add up exactly.
"""

import codecs
import gzip
import heapq
import json
import re
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast

from flopwatch.errors import InputError
from flopwatch.files import UnreadableError, opened_regular

_CHUNK_BYTES = 1 << 20
_LONGEST_VALUE = 1 << 24
"""Characters of one event. Without a limit, damage in the middle of a file would be read into memory up to its end."""
_LONGEST_WORD = len("-Infinity")
_GZIP_START = b"\x1f\x8b"
_CUT = "is incomplete: the file ends in the middle, as if the process that wrote it was stopped or the disk was full"
_BLANKS = re.compile(r"[ \t\r\n]*")
_EVENTS = "traceEvents"


def read_events(path: Path, take: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Give each event of a trace to `take`, in the file's order. Returns the other entries of the file."""
    try:
        with opened_regular(path) as file:
            return _read_trace(_Text(_chunks(file)), take)
    except FileNotFoundError:
        raise InputError(f"the trace {str(path)!r} does not exist: pass a file in the folder traces of a run") from None
    except UnreadableError as error:
        raise InputError(f"the trace {str(path)!r} cannot be read: {error}; pass a .json or .json.gz file") from None
    except _NotATraceError as error:
        raise InputError(
            f"{str(path)!r} is not a trace of torch's profiler: {error}; "
            "pass a .pt.trace.json or .pt.trace.json.gz file that torch.profiler or flopwatch wrote"
        ) from None
    except (EOFError, _DamagedError) as error:
        problem = _CUT if isinstance(error, EOFError) else f"is damaged: {error}"
        raise InputError(f"the trace {str(path)!r} {problem}; take another one with: flopwatch trace RUN_DIR") from None


class _NotATraceError(Exception): ...


class _DamagedError(Exception): ...


def _chunks(file: BinaryIO) -> Iterator[str]:
    start = file.read(len(_GZIP_START))
    file.seek(0)
    content = cast("BinaryIO", gzip.GzipFile(fileobj=file)) if start == _GZIP_START else file
    # Kineto copies names of kernels and annotations into the file as they are, so some bytes may not be UTF-8.
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    try:
        while chunk := content.read(_CHUNK_BYTES):
            yield decoder.decode(chunk)
    except (gzip.BadGzipFile, zlib.error) as error:
        raise _DamagedError(f"it cannot be decompressed ({error})") from None


class _Text:
    """A window on the text of a file: what is behind `position` is dropped when more is read."""

    def __init__(self, chunks: Iterator[str]) -> None:
        self._chunks = chunks
        self._text, self._position = "", 0
        self._decode = json.JSONDecoder(strict=False).raw_decode

    def _read_more(self) -> bool:
        chunk = next(self._chunks, None)
        if chunk is None:
            return False
        self._text, self._position = self._text[self._position :] + chunk, 0
        return True

    def next_character(self) -> str:
        """The next character that is not blank, without moving behind it; empty at the end of the file."""
        while True:
            blanks = _BLANKS.match(self._text, self._position)
            self._position = blanks.end() if blanks else self._position
            if self._position < len(self._text):
                return self._text[self._position]
            if not self._read_more():
                return ""

    def skip(self, characters: str) -> str:
        """Move behind the next character that is not blank, which must be one of these."""
        found = self.next_character()
        if not found:
            raise EOFError
        if found not in characters:
            raise _DamagedError(f"there is {found!r} where {' or '.join(characters)} should be")
        self._position += 1
        return found

    def value(self) -> Any:
        self.next_character()
        while True:
            try:
                value, end = self._decode(self._text, self._position)
            except (json.JSONDecodeError, RecursionError) as error:
                is_long = len(self._text) - self._position > _LONGEST_VALUE
                if is_long or not self._read_more():
                    raise self._failure(error, may_be_cut=not is_long) from None
                continue
            # A number at the end of the text may go on in the next chunk.
            if end == len(self._text) and self._read_more():
                continue
            self._position = end
            return value

    def _failure(self, error: Exception, *, may_be_cut: bool) -> Exception:
        if may_be_cut and isinstance(error, json.JSONDecodeError):
            is_at_end = error.pos >= len(self._text) - _LONGEST_WORD or error.msg.startswith("Unterminated string")
            if is_at_end:
                return EOFError()
        return _DamagedError(f"an entry is not valid JSON ({str(error)[:80]})")


def _read_trace(text: _Text, take: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    first = text.next_character()
    if first != "{":
        raise _NotATraceError("the file is empty" if not first else "it does not begin with {")
    text.skip("{")
    about: dict[str, Any] = {}
    has_events = False
    while text.next_character() != "}":
        key = text.value()
        text.skip(":")
        if key == _EVENTS and text.next_character() == "[":
            _read_list(text, take)
            has_events = True
        else:
            about[str(key)] = text.value()
        if text.next_character() != "}":
            text.skip(",")
    text.skip("}")
    if text.next_character():
        raise _DamagedError("more text follows the end of the trace")
    if not has_events:
        raise _NotATraceError(f"it has no list {_EVENTS}")
    return about


def _read_list(text: _Text, take: Callable[[dict[str, Any]], None]) -> None:
    text.skip("[")
    is_over = text.next_character() == "]" and text.skip("]") == "]"
    while not is_over:
        event = text.value()
        if not isinstance(event, dict):
            raise _NotATraceError(f"its events are of type {type(event).__name__}, not objects")
        take(event)
        is_over = text.skip(",]") == "]"


# What the time is used for

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
