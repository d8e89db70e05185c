"""Divides time among its uses, given the intervals of each, in whole nanoseconds, so that all add up exactly."""

import heapq
from collections.abc import Iterable, Iterator, Mapping

USES = ("outside", "optimizer", "matmul", "attention", "other_kernel", "communication", "copy")
"""The uses of time. If intervals overlap, the time belongs to the first of these; without any, it is `idle`.

`outside` is the time of evaluations and other phases between the traced steps, which belongs to no step.
"""
COMPUTING = ("matmul", "attention", "other_kernel")
Interval = tuple[int, int]
"""Start and end in nanoseconds."""


def union(intervals: Iterable[Interval]) -> Iterator[Interval]:
    """The intervals in order, joined where they touch.

    >>> list(union([(5, 8), (0, 2), (1, 3), (3, 4)]))
    [(0, 4), (5, 8)]
    """
    begun: Interval | None = None
    for start, end in sorted(intervals):
        if begun is not None and start <= begun[1]:
            begun = begun[0], max(begun[1], end)
        else:
            if begun is not None:
                yield begun
            begun = start, end
    if begun is not None:
        yield begun


def split_time(intervals: Mapping[str, Iterable[Interval]], begin: int, end: int, *, on_cpu: bool) -> dict[str, int]:
    """Divide the time from `begin` to `end` among the uses. All of them except `hidden_communication` add up to it.

    On a CPU all of the optimizer's step is work of the optimizer. On an accelerator only computation in it is: in the
    gaps between its kernels the device waits for Python. The intervals may come in any order and overlap.

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


def _edges(intervals: Iterable[Interval], number: int, begin: int, end: int) -> Iterator[tuple[int, int]]:
    """When the intervals start and end within the time from `begin` to `end`, each with the bit of their use."""
    for first, last in union(intervals):
        start, stop = max(first, begin), min(last, end)
        if start < stop:
            yield start, 1 << number
            yield stop, 1 << number


def _use_of(active: int, *, on_cpu: bool) -> str:
    names = [use for number, use in enumerate(USES) if active >> number & 1]
    if not on_cpu and not any(use in COMPUTING for use in names):
        names = [use for use in names if use != "optimizer"]
    return names[0] if names else "idle"
