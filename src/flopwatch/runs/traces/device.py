"""The work of the device in a trace: its kernels and copies, and when the host launched each of them.

A kernel has the correlation id of its launch, an event of the host. All kernels of a CUDA graph have that of the
graph's launch. The events come in any order, so all are kept until the end: 37 bytes for a kernel, 140 for a launch.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any

from flopwatch.runs.traces.events import name_of, number_of
from flopwatch.runs.traces.intervals import COMPUTING, USES, Interval, union
from flopwatch.runs.traces.uses import use_of_kernel

KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
_NEVER, _BEFORE_ALL = 2**63 - 1, -(2**63)


class DeviceWork:
    """Kernels and copies, collected event by event.

    Attributes:
        has_launches: Whether the host launched kernels, of which the trace may have none.
    """

    def __init__(self) -> None:
        self.has_launches = False
        self._starts, self._ends, self._correlations = array("q"), array("q"), array("q")
        self._uses, self._streams = array("b"), array("i")
        self._launched: dict[int, int] = {}
        self._stream_numbers: dict[str, int] = {}
        self._use_of_kernel = lru_cache(4096)(use_of_kernel)

    def __bool__(self) -> bool:
        return bool(self._starts)

    def add_kernel(self, event: Mapping[str, Any], start: int, end: int) -> None:
        stream = str((event.get("pid"), event.get("tid")))
        self._streams.append(self._stream_numbers.setdefault(stream, len(self._stream_numbers)))
        self._uses.append(USES.index(self._use_of_kernel(name_of(event), event["cat"])))
        self._starts.append(start)
        self._ends.append(end)
        self._correlations.append(number_of(event, "correlation") or -1)

    def add_launch(self, event: Mapping[str, Any], start: int) -> None:
        self.has_launches |= "Launch" in name_of(event)
        correlation = number_of(event, "correlation")
        if correlation is not None:
            self._launched[correlation] = start

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

    def intervals(self, optimizer: Iterable[Interval]) -> dict[str, list[Interval]]:
        """The intervals of each use that kernels and copies have. `optimizer`: when the host was in its step."""
        found: dict[str, list[Interval]] = {use: [] for use in USES}
        edges = [edge for period in union(optimizer) for edge in period]
        works = zip(self._uses, self._starts, self._ends, self._launches, strict=True)
        for use, start, end, launch in works:
            found[USES[use]].append((start, end))
            if USES[use] in COMPUTING and bisect_right(edges, launch) % 2:
                found["optimizer"].append((start, end))
        return found

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
