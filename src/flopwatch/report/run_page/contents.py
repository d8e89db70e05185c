"""What the report of a run contains. No part of it grows with the length of the log."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from flopwatch.records.metrics import Goodput
from flopwatch.records.run import Number, Provenance, RunStart
from flopwatch.runs.advice import Conclusion, Times
from flopwatch.runs.waterfall import Waterfall

MAIN_KEYS = (
    "perf/mfu_percent",
    "perf/hfu_percent",
    "training/loss",
    "perf/tokens_per_second",
    "perf/samples_per_second",
    "perf/step_time",
    "perf/input_wait_percent",
    "perf/memory_allocated_gib",
    "perf/memory_reserved_gib",
    "ranks/waiting_percent",
)
"""The metrics of flopwatch whose curves are drawn. Metrics of the user are drawn too."""
MOST_POINTS = 600
Kind = Literal["evaluation", "checkpoint", "restart", "notice"]


@dataclass(frozen=True, slots=True)
class Point:
    """The values of a metric in one or several logging windows.

    Attributes:
        first_step: The first step of the windows.
        last_step: The last step of the windows.
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
        key: Its key in the log, such as `perf/mfu_percent`.
        windows: Number of logging windows that have a value.
        last: The value of the newest window.
        mean: The weighted mean of all windows (see `Point.mean`).
        broken_windows: Number of windows whose value is nan or infinite. They are in no point.
        broken_at_step: The first step at which the value is nan or infinite.
    """

    key: str
    points: tuple[Point, ...]
    windows: int
    last: float | None
    mean: float | None
    broken_windows: int = 0
    broken_at_step: int | None = None


@dataclass(frozen=True, slots=True)
class Moment:
    """Something that happened at a known place of the run.

    Attributes:
        kind: What it was.
        first_step: The last step that was certainly before it; None if it was before the first step.
        last_step: The first logged step that was certainly after it.
        unix_time: When the log first shows it.
        seconds: How long it took.
        words: What to say about it, such as the text of a notice.
        level: Level of a notice.
    """

    kind: Kind
    first_step: int | None
    last_step: int | None
    unix_time: float | None = None
    seconds: float | None = None
    words: str = ""
    level: str = "info"

    @property
    def step(self) -> float | None:
        """Where it is drawn: in the middle of the steps between which it happened."""
        if self.first_step is None or self.last_step is None:
            return self.last_step if self.first_step is None else self.first_step
        return (self.first_step + self.last_step) / 2


@dataclass(frozen=True, slots=True)
class Exactness:
    """How many logging windows have exact FLOPs, and why the others do not.

    Attributes:
        exact_windows: Windows whose FLOPs are exact.
        inexact_windows: Windows whose FLOPs are a bound, an estimate, or depend on a random draw.
        unknown_windows: Windows without FLOPs.
        notes: Each reason, and in how many windows it was given.
    """

    exact_windows: int = 0
    inexact_windows: int = 0
    unknown_windows: int = 0
    notes: Mapping[str, int] = field(default_factory=dict)


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
        moments: Evaluations, checkpoints, restarts and notices, oldest first; at most 200 of each kind.
        moment_counts: How many there were of each kind.
        times: Where the wall time went, with the uses inside of steps; None if the waterfall says it.
        conclusion: What the log says in words; `flopwatch why` says the same.
        stragglers: In how many windows each rank was the straggler.
        provenances: How FLOPs and peak were found, one record for each change.
        torn_lines: Number of lines of the log that could not be read.
        left_out: Names of the user's metrics that have no curve here because there are too many.
    """

    log: str
    state: str
    ended_by: str | None
    starts: tuple[RunStart, ...]
    first_step: int | None
    last_step: int | None
    steps: int
    windows: int
    last_unix_time: float | None
    wall_seconds: float | None
    curves: Mapping[str, Curve]
    values: Mapping[str, tuple[Number, int]]
    moments: tuple[Moment, ...]
    moment_counts: Mapping[str, int]
    goodput: Goodput | None
    waterfall: Waterfall | None
    times: Times | None
    conclusion: Conclusion
    stragglers: Mapping[int, int]
    exactness: Exactness
    provenances: tuple[Provenance, ...]
    torn_lines: int = 0
    left_out: tuple[str, ...] = ()

    @property
    def start(self) -> RunStart | None:
        """The record of the newest session."""
        return self.starts[-1] if self.starts else None

    @property
    def provenance(self) -> Provenance | None:
        """The newest record that says how FLOPs and peak were found."""
        return self.provenances[-1] if self.provenances else None

    # None for a metric that was never logged.

    def mean(self, key: str) -> float | None:
        return self.curves[key].mean if key in self.curves else None

    def last(self, key: str) -> Number | None:
        return self.values[key][0] if key in self.values else None
