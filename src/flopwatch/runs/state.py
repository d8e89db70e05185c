"""The state of a run: the records logged so far, and whether the training process is still alive."""

from collections import deque
from collections.abc import Callable
from math import inf, isfinite
from typing import Literal

from flopwatch.process import is_alive
from flopwatch.records.run import Notice, Number, Provenance, Record, Row, RunStart, Summary, marked
from flopwatch.runs.given_peak import ChoosePeak, PeakGiver
from flopwatch.runs.log_file import NoLogError, find_log
from flopwatch.runs.reading import LogFollower
from flopwatch.stats import Thinned


class WatchFeed:
    """Follows the log of a run. The folder, the log and its first record need not exist yet."""

    def __init__(self, run_dir: str, unix_time: Callable[[], float], choose_peak: ChoosePeak | None = None) -> None:
        self.place, self.unix_time, self._choose_peak = run_dir, unix_time, choose_peak
        self._follower: LogFollower | None = None
        self._replaced = 0
        self._has_looked = False
        self._begin()

    def _begin(self) -> None:
        self.run = WatchedRun()
        self._giver = None if self._choose_peak is None else PeakGiver(self._choose_peak)

    def look(self, *, must_exist: bool = False) -> None:
        if self._follower is None:
            try:
                self._follower = LogFollower(find_log(self.place))
            except NoLogError:
                if must_exist:
                    raise
                return
        records = self._follower.poll()
        if self._follower.times_replaced > self._replaced:
            self._replaced = self._follower.times_replaced
            self._begin()
        is_new = False
        for record in records:
            self.run.add(record if self._giver is None else self._giver(record))
            is_new = True
        if self._giver is not None:
            self.run.drop_notices(self._giver.is_out_of_date)
        if is_new and self._has_looked:
            # Use the clock of this machine, because the clock of the training machine may differ.
            self.run.heard_unix_time = self.unix_time()
        self._has_looked = True


Standing = Literal["running", "running or killed", "killed", "ended", "stopped", "failed"]
State = Standing | Literal["no log", "starting", "silent"]
OVER: tuple[State, ...] = ("killed", "ended", "stopped", "failed")
"""States in which nothing more will be logged."""


def standing(start: RunStart | None, summary: Summary | None) -> Standing:
    """How a run stands, by the records at the start and at the end of its last session.

    `killed`: the process no longer exists and its log has no end. Either it was killed, or it could not write the end,
    for example because the disk was full. Only Linux shows this, on the same machine.
    """
    if summary is not None:
        if summary.ended_by is None:
            return "ended"
        return "stopped" if summary.ended_by.startswith("KeyboardInterrupt") else "failed"
    alive = None if start is None else is_alive(start.environment.get("process", {}))
    return "running or killed" if alive is None else "running" if alive else "killed"


CURVES = ("training/loss", "perf/mfu_percent", "perf/step_time")
_MOST_POINTS = 1024
_MOST_NOTICES = 20
_SHORTEST_SILENCE_SECONDS = 30.0
_WINDOWS_OF_SILENCE = 3


def _mean(points: list[tuple[float, float]]) -> tuple[float, float]:
    return sum(step for step, _ in points) / len(points), sum(value for _, value in points) / len(points)


class WatchedRun:
    """The state of a run according to the records read so far. Its memory does not grow with the length of the run.

    `start` and `summary` are of the last session, and `loss` is the step and value of the newest logged one.
    """

    def __init__(self) -> None:
        self.earlier_step: int | None = None
        self._forget()

    def _forget(self) -> None:
        self.start: RunStart | None = None
        self.sessions = 0
        self.provenance: Provenance | None = None
        self.row: Row | None = None
        self.loss: tuple[int, float] | None = None
        self.notices: deque[Notice] = deque(maxlen=_MOST_NOTICES)
        self.summary: Summary | None = None
        self.curves: dict[str, Thinned[tuple[float, float]]] = {key: Thinned(_MOST_POINTS, _mean) for key in CURVES}
        self.heard_unix_time = -inf
        self._first_row: Row | None = None

    def add(self, record: Record) -> None:
        if isinstance(record, RunStart):
            if record.resumed_after_step is None:
                earlier_step = self.row.step if self.row is not None else self.earlier_step
                self._forget()
                self.earlier_step = earlier_step
            kept = record.resumed_after_step or 0  # the session repeats the steps after it
            for curve in self.curves.values():
                curve.keep(lambda point: point[0] <= kept)
            self.start, self.summary, self._first_row = record, None, None
            self.sessions += 1
        elif isinstance(record, Row):
            self._add_row(record)
        elif isinstance(record, Provenance):
            self.provenance = record
        elif isinstance(record, Notice):
            self.notices.append(record)
            self.row = None if self.row is None else marked(self.row, record)  # it may have been read before the patch
        else:
            self.summary = record
        if isinstance(record, RunStart | Row | Summary):
            self.heard_unix_time = record.unix_time

    def _add_row(self, row: Row) -> None:
        self.row = row
        self._first_row = self._first_row or row
        if "training/loss" in row.values:
            self.loss = row.step, row.values["training/loss"]
        for key, curve in self.curves.items():
            if key in row.values and isfinite(row.values[key]):
                curve.add((row.step, row.values[key]))

    def drop_notices(self, is_out_of_date: Callable[[Notice], bool]) -> None:
        for notice in [notice for notice in self.notices if is_out_of_date(notice)]:
            self.notices.remove(notice)

    def value(self, key: str) -> Number | None:
        """A metric of the newest window only, so that all values on the screen belong to the same steps."""
        return None if self.row is None else self.row.values.get(key)

    @property
    def wall_seconds_per_step(self) -> float | None:
        """Wall time per step in the current session, including the time between steps; None before the second row."""
        if self.row is None or self._first_row is None or self.row.step <= self._first_row.step:
            return None
        return (self.row.unix_time - self._first_row.unix_time) / (self.row.step - self._first_row.step)

    @property
    def seconds_left(self) -> float | None:
        """Estimated time until the planned last step, at the pace of the current session; None if unknown."""
        pace = self.wall_seconds_per_step
        if pace is None or self.row is None or self.start is None or self.start.total_steps is None or self.summary:
            return None
        return max(self.start.total_steps - self.row.steps_done, 0) * pace

    def silent_seconds(self, unix_time: float) -> float:
        return max(unix_time - self.heard_unix_time, 0.0)

    def state(self, unix_time: float) -> State:
        """`silent`: nothing was logged for much longer than a window; the run may be evaluating, hung or dead."""
        if self.start is None and self.row is None:
            return "no log"
        known = standing(self.start, self.summary)
        if known in OVER:
            return known
        steps = len(self.row.steps.get("step", ())) if self.row is not None else 0
        window_seconds = (self.wall_seconds_per_step or 0.0) * (steps or 1)
        limit_seconds = max(_SHORTEST_SILENCE_SECONDS, _WINDOWS_OF_SILENCE * window_seconds)
        if self.silent_seconds(unix_time) > limit_seconds:
            return "silent"
        return "starting" if self._first_row is None else "running"
