"""The work of the device in a trace: its kernels and copies, and when the host launched each of them.

A kernel has the correlation id of its launch, an event of the host. All kernels of a CUDA graph have that of the
graph's launch. The events come in any order, so all are kept until the end: 45 bytes for a kernel, 140 for a launch.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any

from flopwatch.runs.traces.events import name_of
from flopwatch.runs.traces.intervals import COMPUTING, USES, Intervals
from flopwatch.runs.traces.uses import use_of_kernel, use_of_launches

KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
_NEVER, _BEFORE_ALL = 2**63 - 1, -(2**63)
_NO_ID = -1


class DeviceWork:
    """Kernels and copies, collected event by event.

    Attributes:
        devices: The devices that ran kernels, as the trace names them.
        has_launches: Whether the host launched kernels, of which the trace may have none.
    """

    def __init__(self) -> None:
        self.devices: set[str] = set()
        self.has_launches = False
        self._starts, self._ends, self._correlations, self._ops = array("q"), array("q"), array("q"), array("q")
        self._uses, self._streams = array("b"), array("i")
        self._launched: dict[int, int] = {}
        self._launches_of: dict[str, set[int]] = {"matmul": set(), "attention": set()}
        self._stream_numbers: dict[Any, int] = {}
        self._names_launching_op = False
        self._use_of_kernel, self._use_of_op = lru_cache(4096)(use_of_kernel), lru_cache(4096)(use_of_launches)

    def __bool__(self) -> bool:
        return bool(self._starts)

    def add_kernel(self, event: Mapping[str, Any], start: int, end: int) -> None:
        category = event["cat"]
        correlation, op = _number(event, "correlation"), _number(event, "External id")
        # Kineto of before 2024 wrote the correlation id in place of the op's, whose number means another op.
        self._names_launching_op |= op not in (_NO_ID, correlation)
        stream = str((event.get("pid"), event.get("tid")))
        self._streams.append(self._stream_numbers.setdefault(stream, len(self._stream_numbers)))
        self._uses.append(USES.index(self._use_of_kernel(name_of(event), category)))
        self._starts.append(start)
        self._ends.append(end)
        self._correlations.append(correlation)
        self._ops.append(op if category == "kernel" else _NO_ID)
        if category == "kernel":
            about = event.get("args")
            device = about.get("device") if isinstance(about, dict) else None
            self.devices.add(str(event.get("pid") if device is None else device))

    def add_launch(self, event: Mapping[str, Any], start: int) -> None:
        self.has_launches |= "Launch" in name_of(event)
        correlation = _number(event, "correlation")
        if correlation > 0:
            self._launched[correlation] = start

    def add_op(self, event: Mapping[str, Any]) -> None:
        use = self._use_of_op(name_of(event))
        if use is not None:
            self._launches_of[use].add(_number(event, "External id"))

    def is_launched_within(self, start: int, end: int) -> bool:
        """Whether the trace has the launch, at that time, of any kernel."""
        return any(start <= launch < end for launch in self._launches)

    def finished(self, moments: Sequence[int]) -> list[int]:
        """When, for each moment of the host, it was there and the device had ended all work launched before."""
        ordered = sorted(moments)
        latest = [_BEFORE_ALL] * (len(ordered) + 1)
        for launch, end in zip(self._launches, self._ends, strict=True):
            place = bisect_right(ordered, launch)
            latest[place] = max(latest[place], end)
        ended = list(accumulate(latest, max))
        return [max(moment, ended[bisect_left(ordered, moment)]) for moment in moments]

    def intervals(self) -> dict[str, Intervals]:
        """The intervals of each use that kernels and copies have."""
        found = {use: Intervals() for use in USES}
        for use, start, end in self.works():
            found[use].add(start, end)
        return found

    def computing_launched_within(self, periods: Iterable[tuple[int, int]]) -> Intervals:
        """The intervals of the kernels that compute and were launched in these periods, which are in order."""
        begins, ends = array("q"), array("q")
        for begin, end in periods:
            begins.append(begin)
            ends.append(end)
        found = Intervals()
        for (use, start, end), launch in zip(self.works(), self._launches, strict=True):
            place = bisect_right(begins, launch) - 1
            if use in COMPUTING and place >= 0 and launch < ends[place]:
                found.add(start, end)
        return found

    def works(self) -> Iterator[tuple[str, int, int]]:
        """Use, start and end of each kernel and copy, in the file's order."""
        for use, start, end, op in zip(self._uses, self._starts, self._ends, self._ops, strict=True):
            yield self._use(USES[use], op), start, end

    def _use(self, by_name: str, op: int) -> str:
        if by_name != "communication" and op != _NO_ID and self._names_launching_op:
            return next((use for use, ops in self._launches_of.items() if op in ops), by_name)
        return by_name

    @cached_property
    def _launches(self) -> "array[int]":
        """When each kernel was launched. If its launch is not in the trace, it was before it, or is unknown.

        A stream works in the order of its launches. So what runs on it before its first kernel with a launch was
        launched before. An unknown launch counts as one that comes after everything.
        """
        found = array("q", (self._launched.get(each, _NEVER) for each in self._correlations))
        first: dict[int, int] = {}
        for launch, stream, start in zip(found, self._streams, self._starts, strict=True):
            if launch != _NEVER:
                first[stream] = min(start, first.get(stream, start))
        for number, launch in enumerate(found):
            if launch == _NEVER and self._starts[number] < first.get(self._streams[number], _BEFORE_ALL):
                found[number] = _BEFORE_ALL
        return found


def _number(event: Mapping[str, Any], key: str) -> int:
    about = event.get("args")
    number = about.get(key) if isinstance(about, dict) else None
    return number if isinstance(number, int) and 0 < number < _NEVER else _NO_ID
