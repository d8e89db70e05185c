"""What `flopwatch watch` knows of a run: fed with records as they come, of the same size however long the run is."""

from collections import deque
from math import inf, isfinite
from typing import Literal

from flopwatch.metrics import find_metric
from flopwatch.run_records import Notice, Number, Provenance, Record, Row, RunStart, Summary

State = Literal["no log", "starting", "running", "silent", "ended"]

CURVES = ("training/loss", "perf/mfu_percent", "perf/step_time")
_MOST_POINTS = 1024
_MOST_NOTICES = 20
_SHORTEST_SILENCE_SECONDS = 30.0
_WINDOWS_OF_SILENCE = 3


class ThinnedCurve:
    """A curve of any length in at most 1,024 points: when it is full, every two neighbours become their mean.

    >>> curve = ThinnedCurve(most_points=4)
    >>> for step in range(6):
    ...     curve.add(step, 10.0 * step)
    >>> curve.points()
    [(0.5, 5.0), (2.5, 25.0), (4.5, 45.0)]

    Attributes:
        ends: The first and the last step.
    """

    def __init__(self, most_points: int = _MOST_POINTS) -> None:
        self._most_points = most_points
        self._merged = 1
        self._points: list[tuple[float, float]] = []
        self._waiting: list[tuple[float, float]] = []
        self.ends = (0, 0)

    def add(self, step: int, value: float) -> None:
        """Take a point; one that is not finite is left out."""
        if not isfinite(value):
            return
        self.ends = (self.ends[0] if self._points or self._waiting else step, step)
        self._waiting.append((step, value))
        if len(self._waiting) < self._merged:
            return
        self._points.append(_mean(self._waiting))
        self._waiting = []
        if len(self._points) >= self._most_points:
            self._points = [_mean(self._points[index : index + 2]) for index in range(0, len(self._points), 2)]
            self._merged *= 2

    def drop_after(self, step: float) -> None:
        """Forget what was run again."""
        self._points = [point for point in self._points if point[0] <= step]
        self._waiting = [point for point in self._waiting if point[0] <= step]

    def points(self) -> list[tuple[float, float]]:
        return [*self._points, *([_mean(self._waiting)] if self._waiting else [])]


def _mean(points: list[tuple[float, float]]) -> tuple[float, float]:
    return sum(step for step, _ in points) / len(points), sum(value for _, value in points) / len(points)


class WatchedRun:
    """The newest of everything in a log.

    Attributes:
        start: The last session.
        sessions: How many the run has had.
        provenance: Where the newest numbers come from.
        row: The newest window.
        detailed_row: The newest window with more than the basic metrics.
        notices: The last ones.
        summary: Of the last session, once it has ended.
        curves: Metric key to its curve over the run.
        heard_unix_time: When the run last said something.
    """

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self.start: RunStart | None = None
        self.sessions = 0
        self.provenance: Provenance | None = None
        self.row: Row | None = None
        self.detailed_row: Row | None = None
        self.notices: deque[Notice] = deque(maxlen=_MOST_NOTICES)
        self.summary: Summary | None = None
        self.curves = {key: ThinnedCurve() for key in CURVES}
        self.heard_unix_time = -inf
        self._first_row: Row | None = None
        self._steps_per_row = 1

    def add(self, record: Record) -> None:
        """Take the next record of the log."""
        if isinstance(record, RunStart):
            self._begin_session(record)
        elif isinstance(record, Row):
            self._add_row(record)
        elif isinstance(record, Provenance):
            self.provenance = record
        elif isinstance(record, Notice):
            self.notices.append(record)
        else:
            self.summary = record
        if isinstance(record, RunStart | Row | Summary):
            self.heard_unix_time = record.unix_time

    def _begin_session(self, start: RunStart) -> None:
        if start.resumed_after_step is None:
            self._forget()
        else:
            for curve in self.curves.values():
                curve.drop_after(start.resumed_after_step)
        self.start, self.summary, self._first_row = start, None, None
        self.sessions += 1

    def _add_row(self, row: Row) -> None:
        if self.row is not None and row.step > self.row.step:
            self._steps_per_row = len(row.steps.get("step", ())) or row.step - self.row.step
        self.row = row
        self._first_row = self._first_row or row
        if row.detailed:
            self.detailed_row = row
        for key, curve in self.curves.items():
            if key in row.values:
                curve.add(row.step, row.values[key])

    def value(self, key: str) -> Number | None:
        """The newest value of a metric; None when it is not known now."""
        row = self.row if find_metric(key).basic else self.detailed_row
        for source in (self.row, row):
            if source is not None and key in source.values:
                return source.values[key]
        return None

    def seconds_spent(self) -> dict[str, float]:
        """By phase, since the first start: as the newest window has it, else the newest detailed one."""
        ledger = self.row.ledger.get("seconds", {}) if self.row is not None else {}
        return {
            phase: float(ledger.get(phase, 0.0) if ledger else self.value(f"time/{phase}_seconds") or 0.0)
            for phase in ("train", "input_wait", "warm_up", "eval", "checkpoint", "pause", "count")
        }

    def flops_shares(self) -> dict[str, float]:
        """What the executed FLOPs of the newest detailed window were for, in percent; empty when not known."""
        row = self.detailed_row or self.row
        columns = row.steps if row is not None else {}
        model, hardware = columns.get("model_flops", ()), columns.get("hardware_flops", ())
        known = [pair for pair in zip(model, hardware, strict=False) if None not in pair]
        executed = sum(pair[1] for pair in known)
        if row is None or not executed:
            return {}
        useful = 100 * sum(pair[0] for pair in known) / executed
        again = row.values.get("perf/recompute_percent")
        if again is None:
            return {"useful": useful, "recompute or padding": max(100 - useful, 0.0)}
        return {"useful": useful, "recompute": again, "padding": max(100 - useful - again, 0.0)}

    @property
    def wall_seconds_per_step(self) -> float | None:
        """Of this session, with everything between the steps."""
        if self.row is None or self._first_row is None or self.row.step <= self._first_row.step:
            return None
        return (self.row.unix_time - self._first_row.unix_time) / (self.row.step - self._first_row.step)

    @property
    def seconds_left(self) -> float | None:
        """Until the planned end, at the pace of this session."""
        pace = self.wall_seconds_per_step
        if pace is None or self.row is None or self.start is None or self.start.total_steps is None or self.summary:
            return None
        return max(self.start.total_steps - self.row.steps_done, 0) * pace

    def silent_seconds(self, unix_time: float) -> float:
        """Since the run last said something."""
        return max(unix_time - self.heard_unix_time, 0.0)

    def state(self, unix_time: float) -> State:
        """Silent is a run that has said nothing for much longer than a window takes: it evaluates, hangs or is dead."""
        if self.start is None and self.row is None:
            return "no log"
        if self.summary is not None:
            return "ended"
        window_seconds = (self.wall_seconds_per_step or 0.0) * self._steps_per_row
        limit_seconds = max(_SHORTEST_SILENCE_SECONDS, _WINDOWS_OF_SILENCE * window_seconds)
        if self.silent_seconds(unix_time) > limit_seconds:
            return "silent"
        return "starting" if self._first_row is None else "running"
