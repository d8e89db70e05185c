"""What the report of a run contains, collected in one pass over its log. No part grows with the length of the log."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

from flopwatch.records.metrics import METRICS, Goodput, find_metric, goodput_of
from flopwatch.records.run import Notice, Number, Provenance, Row, RunStart
from flopwatch.runs.advice import Conclusion, Times, conclusion_of, times_of
from flopwatch.runs.counters import Counters, counters_of
from flopwatch.runs.given_peak import ChoosePeak, giver_of, with_peak
from flopwatch.runs.log_file import find_log
from flopwatch.runs.reading import RunLog, read_around, read_log
from flopwatch.runs.state import standing
from flopwatch.runs.traces import TraceSplit
from flopwatch.runs.waterfall import Waterfall, exactness_of, seconds_of, waterfall_of
from flopwatch.stats import Thinned

MAIN_KEYS = (
    "perf/mfu_percent",
    "perf/hfu_percent",
    "training/loss",
    "perf/tokens_per_second",
    "perf/samples_per_second",
    "perf/step_time",
)
"""The metrics of flopwatch whose curves are drawn. Metrics of the user are drawn too."""
MOST_POINTS = 600
MOST_USER_CURVES = 12
USER_CURVE_POINTS = 200
MOST_NOTES = 20
MOST_NOTICES = 200
MOST_VALUES = 200


@dataclass(frozen=True, slots=True)
class Point:
    """The values of a metric in one or several logging windows.

    Attributes:
        unix_time: When the last window ended.
        low: The least value of a step, or of a window if the log has no value for each step.
        mean: The mean, weighted by the time of the windows for a rate or share, or else by their steps.
        high: The largest value of a step or window.
        weight: What the mean is weighted by, in seconds or steps.
    """

    first_step: int
    last_step: int
    unix_time: float
    low: float
    mean: float
    high: float
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Curve:
    """A metric over the run, oldest point first.

    Attributes:
        mean: The weighted mean of all windows (see `Point.mean`).
        broken_windows: Number of windows whose value is nan or infinite. They are in no point.
        broken_at_step: The first step at which the value is nan or infinite.
    """

    key: str
    points: tuple[Point, ...]
    mean: float | None
    broken_windows: int = 0
    broken_at_step: int | None = None


@dataclass(frozen=True, slots=True)
class RunReport:
    """Everything that the report of a run shows.

    Attributes:
        log: Path of the log.
        state: How the run stands, such as "ended" or "failed".
        ended_by: The exception that ended the last session; None if there was none.
        starts: One record for each start or resumption.
        first_step: First and `last_step` last step in the log; None without steps.
        steps: Number of steps done since the first start.
        wall_seconds: From the start of the first process to the last record; None if it is unknown.
        curves: By metric, those that have at least one value.
        values: The newest value of each metric, and the step of its window.
        notices: The newest 200, oldest first.
        times: Where the wall time went, with the uses inside of steps; None if the waterfall says it.
        conclusion: What the log says in words; `flopwatch why` says the same.
        exact: Whether the FLOPs of all windows are exact; None if no window has FLOPs.
        provenances: How FLOPs and peak were found, one record for each change.
        torn_lines: Number of lines of the log that could not be read.
        earlier_step: The last step of an earlier run in the same log, which is left out; None if there is none.
        counters: What hardware counters have shown; None if the run has read none.
    """

    log: str
    state: str
    ended_by: str | None
    starts: tuple[RunStart, ...]
    first_step: int | None
    last_step: int | None
    steps: int
    windows: int
    wall_seconds: float | None
    curves: Mapping[str, Curve]
    values: Mapping[str, tuple[Number, int]]
    notices: tuple[Notice, ...]
    goodput: Goodput | None
    waterfall: Waterfall | None
    times: Times | None
    conclusion: Conclusion
    exact: bool | None
    why_not_exact: tuple[str, ...]
    provenances: tuple[Provenance, ...]
    torn_lines: int = 0
    earlier_step: int | None = None
    counters: Counters | None = None

    @property
    def start(self) -> RunStart | None:
        return self.starts[-1] if self.starts else None

    @property
    def provenance(self) -> Provenance | None:
        return self.provenances[-1] if self.provenances else None

    def mean(self, key: str) -> float | None:
        return self.curves[key].mean if key in self.curves else None

    def last(self, key: str) -> Number | None:
        return self.values[key][0] if key in self.values else None


def read_report(
    run_dir: str | Path, traces: Sequence[TraceSplit] = (), choose_peak: ChoosePeak | None = None
) -> RunReport:
    """Read what the report of a run shows from its log, as if it had another peak if `choose_peak` is given."""
    collector = _Collector()
    path = find_log(run_dir)
    giver = None if choose_peak is None else giver_of(read_around(path), choose_peak)
    log = with_peak(read_log(path, lambda row: collector.take(row if giver is None else giver.row(row))), choose_peak)
    collector.finish(log)
    waterfall, start = waterfall_of(log, traces), log.starts[-1] if log.starts else None
    seconds = seconds_of(log)
    newest, (is_exact, reasons) = collector.newest, exactness_of(log)
    return RunReport(
        log=str(log.path),
        state=standing(start, log.summary),
        ended_by=log.summary.ended_by if log.summary else None,
        starts=log.starts,
        first_step=collector.first_step,
        last_step=newest.step if newest is not None else None,
        steps=collector.steps,
        windows=collector.windows,
        wall_seconds=seconds.get("wall"),
        curves=collector.curves(),
        values=collector.values,
        notices=log.notices[-MOST_NOTICES:],
        goodput=goodput_of(seconds),
        waterfall=waterfall,
        times=times_of(log, traces) if waterfall is None else None,
        conclusion=conclusion_of(log, waterfall),
        exact=is_exact,
        why_not_exact=reasons[:MOST_NOTES],
        provenances=log.provenances,
        torn_lines=log.torn_lines,
        earlier_step=log.earlier_step,
        counters=counters_of(log),
    )


class CurveMaker:
    """Collects the points of a curve, newest first, in bounded memory.

    >>> maker = CurveMaker("perf/step_time", most_points=2)
    >>> for step in (4, 3, 2, 1):
    ...     maker.add(Point(step, step, 100.0 + step, step, step, step))
    >>> [(point.first_step, point.last_step, point.low, point.mean) for point in maker.curve().points]
    [(1, 2, 1, 1.5), (3, 4, 3, 3.5)]
    """

    def __init__(self, key: str, most_points: int = MOST_POINTS) -> None:
        self.key = key
        self._most_points = most_points
        self._points = Thinned(2 * most_points, merged)
        self._broken_windows = 0
        self._broken_at_step: int | None = None

    def add(self, point: Point) -> None:
        if not (isfinite(point.low) and isfinite(point.mean) and isfinite(point.high)):
            self._broken_windows += 1
            self._broken_at_step = point.first_step
            return
        self._points.add(point)

    def curve(self) -> Curve:
        points = self._points.items(self._most_points)
        mean, broken = merged(points).mean if points else None, (self._broken_windows, self._broken_at_step)
        return Curve(self.key, tuple(reversed(points)), mean, *broken)


def merged(points: list[Point]) -> Point:
    if len(points) == 1:
        return points[0]
    weight = sum(point.weight for point in points)
    # Without any weight all windows count alike.
    weights = [point.weight if weight else 1.0 for point in points]
    mean = sum(point.mean * share for point, share in zip(points, weights, strict=True)) / sum(weights)
    return Point(
        min(point.first_step for point in points),
        max(point.last_step for point in points),
        max(point.unix_time for point in points),
        min(point.low for point in points),
        mean,
        max(point.high for point in points),
        weight,
    )


class _Collector:
    """Takes the rows of a log, newest first, and keeps what the report needs of them."""

    def __init__(self) -> None:
        self.newest: Row | None = None
        self.steps = 0
        self.first_step: int | None = None
        self.values: dict[str, tuple[Number, int]] = {}
        self._makers: dict[str, CurveMaker] = {}
        self.windows = 0
        self._has_inexact = False

    def take(self, row: Row) -> Row | None:
        """Add a row; returns it if it is the newest or the newest that is not exact, which the waterfall needs."""
        numbers = row.steps.get("step") or (row.step,)
        is_newest, self.newest = self.newest is None, self.newest or row
        self.steps = max(self.steps, row.steps_done)
        self.first_step = numbers[0]
        self._add_points(row, numbers)
        self.windows += 1
        is_newest_inexact = row.exact is False and not self._has_inexact
        self._has_inexact = self._has_inexact or is_newest_inexact
        return row if is_newest or is_newest_inexact else None

    def _add_points(self, row: Row, numbers: Sequence[int]) -> None:
        times = _timed_seconds(row)
        together = sum(times)
        for key, value in row.values.items():
            if len(self.values) < MOST_VALUES or key in METRICS:
                self.values.setdefault(key, (value, row.step))
            maker = self._maker(key)
            if maker is None or not isinstance(value, int | float):
                continue
            of_steps = times if key == "perf/step_time" else row.steps.get("loss", ()) if key == "training/loss" else ()
            values = [value, *(each for each in of_steps if each is not None)]
            is_rate = key.startswith("perf/") and find_metric(key).unit != "GiB" and times
            weight = len(numbers) if not is_rate else len(times) if key == "perf/step_time" else together
            maker.add(Point(numbers[0], row.step, row.unix_time, min(values), value, max(values), float(weight)))

    def _maker(self, key: str) -> CurveMaker | None:
        if key in MAIN_KEYS and key not in self._makers:
            self._makers[key] = CurveMaker(key)
        elif _is_of_user(key) and sum(map(_is_of_user, self._makers)) < MOST_USER_CURVES:
            self._makers.setdefault(key, CurveMaker(key, USER_CURVE_POINTS))
        return self._makers.get(key)

    def finish(self, log: RunLog) -> None:
        if log.summary is None:
            return
        for key, value in log.summary.values.items():
            if key in METRICS:
                self.values.setdefault(key, (value, log.summary.step or 0))

    def curves(self) -> dict[str, Curve]:
        order = [*(key for key in MAIN_KEYS if key in self._makers), *sorted(set(self._makers) - set(MAIN_KEYS))]
        curves = {key: self._makers[key].curve() for key in order}
        return {key: curve for key, curve in curves.items() if curve.points or curve.broken_windows}


def _is_of_user(key: str) -> bool:
    return key not in METRICS or key in ("training/lr", "training/grad_norm")


def _timed_seconds(row: Row) -> list[float]:
    """The times of the row's steps, without warm-up."""
    seconds = row.steps.get("seconds", ())
    warm_up = row.steps.get("warm_up") or [False] * len(seconds)
    return [value for value, is_warm_up in zip(seconds, warm_up, strict=False) if value is not None and not is_warm_up]
