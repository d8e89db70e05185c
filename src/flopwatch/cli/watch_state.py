"""What `flopwatch watch` knows of a run: fed with records as they come, of the same size however long the run is."""

from collections import deque
from math import ceil, inf, isfinite
from typing import Literal

from flopwatch.run_log.process import is_gone
from flopwatch.run_records import Notice, Number, Provenance, Record, Row, RunStart, Summary

State = Literal["no log", "starting", "running", "silent", "died", "ended", "stopped", "failed"]

CURVES = ("training/loss", "perf/mfu_percent", "perf/step_time")
_MOST_POINTS = 1024
_MOST_NOTICES = 20
_SHORTEST_SILENCE_SECONDS = 30.0
_WINDOWS_OF_SILENCE = 3
_PERCENTILE_STEPS = 512
"""As for the metric `perf/step_time_p50`."""
_TIMES = (
    *("train", "input_wait", "warm_up", "eval", "checkpoint", "pause", "count"),
    *("start_up", "restart", "rerun", "wall"),
)
_LEAST_SHARE_PERCENT = 1e-9
"""Below it, a difference of shares is what floating point leaves of nothing."""


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


def _timed_seconds(row: Row) -> list[float]:
    seconds = row.steps.get("seconds", ())
    warm_up = row.steps.get("warm_up") or [False] * len(seconds)
    return [value for value, is_warm_up in zip(seconds, warm_up, strict=False) if value is not None and not is_warm_up]


def _without_noise(share_percent: float) -> float:
    return share_percent if share_percent > _LEAST_SHARE_PERCENT else 0.0


class WatchedRun:
    """The newest of everything in a log.

    Attributes:
        start: The last session.
        sessions: How many the run has had.
        provenance: Where the newest numbers come from.
        row: The newest window.
        loss: The newest loss that is known, and its step.
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
        self.loss: tuple[int, float] | None = None
        self.notices: deque[Notice] = deque(maxlen=_MOST_NOTICES)
        self.summary: Summary | None = None
        self.curves = {key: ThinnedCurve() for key in CURVES}
        self.heard_unix_time = -inf
        self._first_row: Row | None = None
        self._steps_per_row = 1
        self._recent_seconds: deque[float] = deque(maxlen=_PERCENTILE_STEPS)

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
        if "training/loss" in row.values:
            self.loss = row.step, row.values["training/loss"]
        self._recent_seconds.extend(_timed_seconds(row))
        for key, curve in self.curves.items():
            if key in row.values:
                curve.add(row.step, row.values[key])

    def value(self, key: str) -> Number | None:
        """Of the newest window, never of an older one: what is shown together was measured together."""
        return None if self.row is None else self.row.values.get(key)

    def step_time_percentiles(self) -> dict[str, float]:
        """Of the last steps, up to the newest window; empty where no step was timed."""
        ordered = sorted(self._recent_seconds)
        ranks = {f"p{percent}": ceil(percent / 100 * len(ordered)) for percent in (50, 90, 99)}
        return {name: ordered[rank - 1] for name, rank in ranks.items() if rank}

    def seconds_spent(self) -> dict[str, float]:
        """By phase, since the first start, as the newest window has it."""
        ledger = self.row.ledger.get("seconds", {}) if self.row is not None else {}
        return {
            name: float(ledger.get(name, 0.0) if ledger else self.value(f"time/{name}_seconds") or 0.0)
            for name in _TIMES
        }

    def flops_shares(self) -> dict[str, float]:
        """What the executed FLOPs of the newest window were for, in percent; empty when not known."""
        useful, again = self._useful_percent(), self.value("perf/recompute_percent")
        if useful is None:
            return {}
        rest = _without_noise(100 - useful - (again or 0.0))
        if again is None:
            return {"useful": useful, "recompute or padding": rest}
        return {"useful": useful, "recompute": again, self._name_of_the_rest(): rest}

    def _useful_percent(self) -> float | None:
        """Of all ranks, where they have told: the columns are the logging rank's own."""
        row = self.row
        if row is None:
            return None
        if row.all_ranks:
            known = [(row.all_ranks.get("model_flops"), row.all_ranks.get("hardware_flops"))]
        else:
            columns = row.steps.get("model_flops", ()), row.steps.get("hardware_flops", ())
            known = list(zip(*columns, strict=False))
        told = [(model, hardware) for model, hardware in known if model is not None and hardware is not None]
        executed = sum(hardware for _, hardware in told)
        return 100 * sum(model for model, _ in told) / executed if executed else None

    def _name_of_the_rest(self) -> str:
        """Executed, not useful and not recomputed: positions that are padding, or pairs of two documents in a row."""
        padding = self.value("perf/padding_percent")
        if padding is None:
            return "padding"
        return "padding" if padding else "pairs across documents"

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
        """Silent is a run that has said nothing for much longer than a window takes: it evaluates, hangs or is dead.

        Died is one whose process is gone without having written an end; that can be seen on its own machine only.
        """
        if self.start is None and self.row is None:
            return "no log"
        if self.summary is not None:
            return self._state_at_the_end(self.summary)
        if self.start is not None and is_gone(self.start.environment.get("process", {})):
            return "died"
        window_seconds = (self.wall_seconds_per_step or 0.0) * self._steps_per_row
        limit_seconds = max(_SHORTEST_SILENCE_SECONDS, _WINDOWS_OF_SILENCE * window_seconds)
        if self.silent_seconds(unix_time) > limit_seconds:
            return "silent"
        return "starting" if self._first_row is None else "running"

    def _state_at_the_end(self, summary: Summary) -> State:
        if summary.ended_by is None:
            return "ended"
        return "stopped" if summary.ended_by.startswith("KeyboardInterrupt") else "failed"
