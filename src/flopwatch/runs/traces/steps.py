"""Finds the steps of a trace by the annotations that the host wrote."""

import re
from array import array
from collections import Counter
from collections.abc import Collection, Iterable
from itertools import pairwise
from typing import NamedTuple

PROFILER_STEP = "ProfilerStep#N"
OPTIMIZER = "Optimizer.step#"
_NUMBER = re.compile(r"\d+")
_PROFILER_STEP = re.compile(r"ProfilerStep#\d+$")
_ITERATION = re.compile(
    r"\W*((train(ing)?[ _])?(step|iter(ation)?|batch)[ _#:=-]*\d+|"
    r"(\[pl\]\[profile\])?(run[ _])?train(ing)?[ _](step|batch|iter(ation)?))\W*$",
    re.IGNORECASE,
)
_FORWARD = re.compile(r"(DistributedDataParallel|FullyShardedDataParallel)\.forward$|\W*forward\W*$")
_ROUNDING = 2_000
"""Nanoseconds by which a step may begin before the one before it ends, if the profiler has rounded to microseconds."""
_MOST_NAMES = 1000
_TOLD_NAMES = 5


class Thread(NamedTuple):
    """A thread of the host that has written annotations, as the trace names it."""

    process: str
    number: str


class StepMarks:
    """The annotations of a trace that mark its steps.

    The first of these that a trace has: the name that the user gives, or else a part of it, `ProfilerStep#N`, an
    annotation of an iteration such as `iteration 7` or `train_step`, the optimizer's step, and the forward pass. Of all
    but `ProfilerStep#N`, which has no time between its steps, a step is the time from one to the next, so that there is
    one step less than marks. A single mark of an iteration, or of the user's name, is a step.
    """

    def __init__(self, mark: str | None = None) -> None:
        self.names: Counter[str] = Counter()
        self._mark = mark
        self._found: dict[tuple[int, str], dict[Thread, tuple[array[int], array[int]]]] = {}

    def add(self, name: str, start: int, end: int, thread: Thread) -> None:
        template = _NUMBER.sub("N", name)
        if template in self.names or len(self.names) < _MOST_NAMES:
            self.names[template] += 1
        rank = self._rank(name, template)
        if rank is not None:
            threads = self._found.setdefault((rank, template), {})
            starts, ends = threads.setdefault(thread, (array("q"), array("q")))
            starts.append(start)
            ends.append(end)

    def chosen(self) -> tuple[str, list[tuple[int, int]]]:
        """The name of the annotation, with N for a number, and start and end of its steps; no steps without one."""
        counts = {key: sum(len(starts) for starts, _ in each.values()) for key, each in self._found.items()}
        for rank, template in sorted(counts, key=lambda key: (key[0], -counts[key])):
            marks = _of_one_training([list(zip(*marks, strict=True)) for marks in self._found[rank, template].values()])
            steps = marks
            if template.startswith(OPTIMIZER):
                steps = [(before[1], end) for before, (_, end) in pairwise(marks)]
            elif template != PROFILER_STEP:
                steps = [(start, after[0]) for (start, _), after in pairwise(marks)]
            if not steps and rank not in (_OF_OPTIMIZER, _OF_FORWARD):
                steps = marks
            if steps:
                return template, steps
        return "", []

    def processes(self, marked_by: str) -> list[str]:
        """The processes that have written this annotation."""
        found = {each.process for (_, name), threads in self._found.items() if name == marked_by for each in threads}
        return sorted(found)

    def told(self) -> str:
        """The annotations that a trace has, for a message."""
        several = [f"{name!r} ({count})" for name, count in self.names.most_common(_TOLD_NAMES)]
        return ", ".join(several) + (", ..." if len(self.names) > _TOLD_NAMES else "")

    def _rank(self, name: str, template: str) -> int | None:
        if self._mark is not None:
            if self._mark in (name, template):
                return _OF_USER
            return _OF_USERS_PART if self._mark in name or self._mark in template else None
        if _PROFILER_STEP.match(name):
            return _OF_PROFILER
        if name.startswith(OPTIMIZER):
            return _OF_OPTIMIZER
        return _OF_ITERATION if _ITERATION.match(name) else _OF_FORWARD if _FORWARD.match(name) else None


_OF_USER, _OF_USERS_PART, _OF_PROFILER, _OF_ITERATION, _OF_OPTIMIZER, _OF_FORWARD = range(6)


def how_divided(marked_by: str) -> str | None:
    """What a step is in a trace that has this annotation, in a sentence; None if it is a step by definition."""
    if marked_by == PROFILER_STEP:
        return None
    if marked_by.startswith(OPTIMIZER):
        return f"A step is the time from the end of one {marked_by} to the end of the next."
    return f"A step is the time from the start of one {marked_by} to the start of the next."


_Marks = list[tuple[int, int]]


def _of_one_training(by_thread: Collection[_Marks]) -> list[tuple[int, int]]:
    """The marks in order; if threads have marked steps at the same time, those of the thread that has most."""
    found = _apart(mark for marks in by_thread for mark in marks)
    if len(by_thread) > 1 and any(after[0] < before[1] - _ROUNDING for before, after in pairwise(found)):
        most: _Marks = max(by_thread, key=len)
        return _apart(most)
    return found


def _apart(marks: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The marks in order, without those inside of another one."""
    found: list[tuple[int, int]] = []
    for start, end in sorted(marks, key=lambda mark: (mark[0], -mark[1])):
        if not found or end > found[-1][1]:
            found.append((start, end))
    return found
