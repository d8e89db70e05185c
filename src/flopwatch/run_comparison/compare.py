"""The comparison itself: every measure in both runs, its change, and whether the change can be told from noise."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from flopwatch.run_comparison.bootstrap import cut, draws, interval, thinned
from flopwatch.run_comparison.differences import Difference, find_differences
from flopwatch.run_comparison.measures import MEASURES, SPEED, Measure
from flopwatch.run_comparison.steady import SteadyStep, steady_steps, step_count
from flopwatch.run_comparison.totals import TOTALS, recompute_percent, total
from flopwatch.run_log import RunLog

NOT_TOLD = "no difference that can be told"
TOO_FEW = "too few steps to tell"
_LEAST = 0.05
"""Percent or points: what is printed as 0.0 is not called a difference."""


@dataclass(frozen=True, slots=True)
class Line:
    """One measure of both runs. Unknown is None.

    Attributes:
        key: Its name.
        label: Its name on the screen.
        unit: `s`, `tokens/s`, `samples/s`, `steps/s`, `%`, `% of peak`, `x`, `per step`, `steps`, `tokens`,
            `FLOP` or `duration` (seconds).
        a: The value of run A.
        b: The value of run B.
        change: From A to B, in percent of A; where the unit is `%`, in points, since such a share may be 0.
        low: Lower end of the 99 % interval of the change.
        high: Its upper end.
        verdict: `faster`, `slower`, `higher`, `lower`, ... is B, or why that cannot be told; None where nothing is
            judged.
    """

    key: str
    label: str
    unit: str
    a: float | None
    b: float | None
    change: float | None = None
    low: float | None = None
    high: float | None = None
    verdict: str | None = None


@dataclass(frozen=True, slots=True)
class RunSteps:
    """Which steps of a run are compared.

    Attributes:
        log: The file.
        compared: Timed steps outside warm-up.
        left_out: Warm-up, and steps without a time.
        has_ended: False while it runs, or when it was killed.
        world_size: Processes of the training. The steps in a log are those of the rank that wrote it.
    """

    log: str
    compared: int
    left_out: int
    has_ended: bool
    world_size: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two runs side by side.

    Attributes:
        a: The first run.
        b: The second.
        differences: What was not the same, so that some numbers may not be comparable.
        lines: The table.
    """

    a: RunSteps
    b: RunSteps
    differences: tuple[Difference, ...]
    lines: tuple[Line, ...]

    def line(self, key: str) -> Line:
        return next(line for line in self.lines if line.key == key)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def compare(a: RunLog, b: RunLog) -> Comparison:
    """Compare two runs by the steps in their logs."""
    in_a, in_b = steady_steps(a), steady_steps(b)
    drawn = _Draws(in_a, in_b)
    judged = tuple(_measured(measure, in_a, in_b, drawn) for measure in MEASURES)
    return Comparison(
        _run_steps(a, len(in_a)), _run_steps(b, len(in_b)), find_differences(a, b), (*judged, *_told(a, b))
    )


def speed_line(comparison: Comparison) -> Line | None:
    """The line that says how fast the runs are: the first of `SPEED` known in both; None when neither has steps."""
    lines = (comparison.line(key) for key in SPEED)
    return next((line for line in lines if line.a is not None and line.b is not None), None)


def _run_steps(log: RunLog, compared: int) -> RunSteps:
    world_size = log.starts[-1].world_size if log.starts else 1
    return RunSteps(str(log.path), compared, step_count(log) - compared, log.summary is not None, world_size)


class _Draws:
    """Two runs drawn anew again and again, the same way for every measure."""

    def __init__(self, in_a: Sequence[SteadyStep], in_b: Sequence[SteadyStep]) -> None:
        self._blocks = (cut(in_a), cut(in_b))
        self._chosen = tuple(draws(len(blocks), seed) for seed, blocks in enumerate(self._blocks))
        self._pooled: dict[Any, list[list[Any]]] = {}

    def changes(self, measure: Measure) -> list[float]:
        """The change in every draw; none where a run has too few steps."""
        if not all(self._blocks):
            return []
        # Sorting is nearly all of the work, and several measures look at the same sorted steps.
        if measure.of_block not in self._pooled:
            self._pooled[measure.of_block] = [self._pool(measure, run) for run in (0, 1)]
        pairs = zip(*self._pooled[measure.of_block], strict=True)
        changes = (_change(measure.value(a), measure.value(b), measure.unit) for a, b in pairs)
        return [change for change in changes if change is not None]

    def _pool(self, measure: Measure, run: int) -> list[Any]:
        blocks = [measure.of_block(thinned(block) if measure.sorts else block) for block in self._blocks[run]]
        return [measure.pool([blocks[index] for index in chosen]) for chosen in self._chosen[run]]


def _measured(measure: Measure, in_a: Sequence[SteadyStep], in_b: Sequence[SteadyStep], drawn: _Draws) -> Line:
    a, b = (measure.value(measure.of_block(steps)) for steps in (in_a, in_b))
    change = _change(a, b, measure.unit)
    line = Line(measure.key, measure.label, measure.unit, a, b, change)
    if change is None or measure.words is None:
        return line
    changes = drawn.changes(measure)
    if not changes:
        return replace(line, verdict=TOO_FEW)
    low, high = interval(changes)
    return replace(line, low=low, high=high, verdict=_verdict(measure.words, low, high))


def _change(a: float | None, b: float | None, unit: str) -> float | None:
    if a is None or b is None:
        return None
    if unit == "%":
        return b - a
    return 100 * (b - a) / a if a else None


def _verdict(words: tuple[str, str], low: float, high: float) -> str:
    if low > _LEAST:
        return words[0]
    return words[1] if high < -_LEAST else NOT_TOLD


def _told(a: RunLog, b: RunLog) -> list[Line]:
    """What the logs have added up themselves."""
    again = recompute_percent(a), recompute_percent(b)
    lines = [Line("recompute_percent", "recompute", "%", *again, _change(*again, "%"))]
    for key, label, unit in TOTALS:
        in_a, in_b = total(a, key), total(b, key)
        lines.append(Line(key, label, unit, in_a, in_b, _change(in_a, in_b, unit)))
    return lines
