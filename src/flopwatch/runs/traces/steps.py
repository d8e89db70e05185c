"""Finds the steps of a trace by the annotations that the host wrote."""

import re
from array import array
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

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
_MOST_NAMES = 1000
_TOLD_NAMES = 5


class StepMarks:
    """The annotations of a trace that mark its steps.

    The first of these that a trace has: the name that the user gives, `ProfilerStep#N`, an annotation of an iteration
    such as `iteration 7` or `train_step`, the optimizer's step, and the forward pass. Of the last two, a step is the
    time from one to the next, so that there is one step less than marks.
    """

    def __init__(self, mark: str | None = None) -> None:
        self.names: Counter[str] = Counter()
        self._mark = mark
        self._found: dict[tuple[int, str], tuple[array[int], array[int]]] = {}

    def add(self, name: str, start: int, end: int) -> None:
        template = _NUMBER.sub("N", name)
        if template in self.names or len(self.names) < _MOST_NAMES:
            self.names[template] += 1
        rank = self._rank(name, template)
        if rank is not None:
            starts, ends = self._found.setdefault((rank, template), (array("q"), array("q")))
            starts.append(start)
            ends.append(end)

    def chosen(self) -> tuple[str, list[tuple[int, int]]]:
        """The name of the annotation, with N for a number, and start and end of its steps; no steps without one."""
        for rank, template in sorted(self._found, key=lambda key: (key[0], -len(self._found[key][0]))):
            marks = _apart(*self._found[rank, template])
            steps = marks
            if rank == _OF_OPTIMIZER:
                steps = [(before[1], end) for before, (_, end) in pairwise(marks)]
            elif rank == _OF_FORWARD:
                steps = [(start, after[0]) for (start, _), after in pairwise(marks)]
            if steps:
                return (PROFILER_STEP if rank == _OF_PROFILER else template), steps
        return "", []

    def told(self) -> str:
        """The annotations that a trace has, for a message."""
        several = [f"{name!r} ({count})" for name, count in self.names.most_common(_TOLD_NAMES)]
        return ", ".join(several) + (", ..." if len(self.names) > _TOLD_NAMES else "")

    def _rank(self, name: str, template: str) -> int | None:
        if self._mark is not None:
            return _OF_USER if self._mark in name or self._mark in template else None
        if _PROFILER_STEP.match(name):
            return _OF_PROFILER
        if name.startswith(OPTIMIZER):
            return _OF_OPTIMIZER
        return _OF_ITERATION if _ITERATION.match(name) else _OF_FORWARD if _FORWARD.match(name) else None


_OF_USER, _OF_PROFILER, _OF_ITERATION, _OF_OPTIMIZER, _OF_FORWARD = range(5)


def how_divided(marked_by: str) -> str | None:
    """What a step is in a trace that has this annotation, in a sentence; None if it is a step by definition."""
    if marked_by == PROFILER_STEP:
        return None
    if marked_by.startswith(OPTIMIZER):
        return f"A step is the time from the end of one {marked_by} to the end of the next."
    if _FORWARD.match(marked_by):
        return f"A step is the time from the start of one {marked_by} to the start of the next."
    return f"Each annotation {marked_by} of the trace is a step."


def _apart(starts: Sequence[int], ends: Sequence[int]) -> list[tuple[int, int]]:
    """The marks in order, without those inside of another one."""
    found: list[tuple[int, int]] = []
    for start, end in sorted(zip(starts, ends, strict=True)):
        if not found or start >= found[-1][1]:
            found.append((start, end))
    return found
