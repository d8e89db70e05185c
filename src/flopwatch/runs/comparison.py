"""Compare two training runs by their logs: which settings differ, and how speed, MFU and other measures changed."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Literal, TypeAlias

from flopwatch.decode import Stored
from flopwatch.language import Said, Templates, in_words, sentences
from flopwatch.numbers import duration, number, percent, step_time
from flopwatch.records.metrics import goodput_of
from flopwatch.records.run import Number
from flopwatch.runs.explain import WHAT_RAN, what_ran
from flopwatch.runs.per_step import OF_PASSES, PASSES, PerStep, RunTime, compare_per_step
from flopwatch.runs.reading import RunLog, SteadyStep, steady_steps
from flopwatch.runs.traces import TraceSplit
from flopwatch.runs.traces.files import traces_of_log
from flopwatch.runs.waterfall import (
    seconds_of,
    time_by_part,
    waterfall_of,
)
from flopwatch.stats import NO_DIFFERENCE, TOO_FEW, cut, differ, interval, median, percentile, resampled

_ALL = Said("every number")
_FLOPS = Said("MFU and HFU")
_SPEED = Said("speed")


@dataclass(frozen=True, slots=True)
class RunDifference:
    """A setting, version or device that differs between run A and run B.

    Attributes:
        a: Value in run A; None if the log of run A does not contain it.
        touches: Which numbers the difference affects: `every number`, `MFU and HFU` or `speed`; empty for an argument
            of the script, because flopwatch does not know what it means.
    """

    what: str
    a: Any
    b: Any
    touches: str


def find_differences(a: RunLog, b: RunLog) -> tuple[RunDifference, ...]:
    pairs = zip(_facts(a), _facts(b), strict=True)
    found = [RunDifference(what, in_a, in_b, touches) for (what, in_a, touches), (_, in_b, _) in pairs if in_a != in_b]
    in_a, in_b = _arguments(a), _arguments(b)
    names = [name for name in in_a | in_b if in_a.get(name) != in_b.get(name)]
    return (
        *found,
        *(RunDifference(Said("argument {name}", name=name), in_a.get(name), in_b.get(name), "") for name in names),
    )


def _arguments(log: RunLog) -> dict[str, str]:
    """The arguments of the script by name, or by place if they have no name. A flag without a value is `given`."""
    logged = log.starts[-1].what_ran.get("arguments") if log.starts else None
    found: dict[str, list[str]] = {}
    name, places = "", 0
    for argument in map(str, logged if isinstance(logged, list | tuple) else ()):
        if re.match(r"--?[a-zA-Z]", argument):
            name, _, value = argument.partition("=")
            found.setdefault(name, []).extend([value] if value else [])
            name = "" if value else name
        elif name:
            found[name].append(argument)
        else:
            places += 1
            found[str(places)] = [argument]
    return {name: " ".join(values) or "given" for name, values in found.items()}


_WORDS: Templates = {
    "attention": "attention",
    "mode": "mode",
    "method": "method",
    "host": "host",
    "threads": "threads",
}


def _facts(log: RunLog) -> list[tuple[str, Any, str]]:
    start = log.starts[-1] if log.starts else None
    # The first provenance record may be incomplete, because it is written at the start of the run.
    provenance = log.provenances[-1] if log.provenances else None
    peak: Mapping[str, Any] = (provenance and provenance.peak) or {}
    environment: Mapping[str, Any] = start.environment if start else {}
    known = [row.exact for row in log.rows if row.exact is not None]
    ran = dict(what_ran(start))
    return [
        (Said("device"), peak.get("device") or environment.get("device"), _ALL),
        (Said("world size"), getattr(start, "world_size", None), _ALL),
        (Said("devices per process"), getattr(provenance, "device_count", None), _ALL),
        (Said("dtype"), peak.get("dtype") or (start.config.get("dtype") if start else None), _ALL),
        (Said("peak FLOP/s"), peak.get("flops_per_s"), _FLOPS),
        (Said("peak is"), peak.get("kind"), _FLOPS),
        *(
            (in_words(_WORDS, name), getattr(provenance, name, None), _FLOPS)
            for name in ("attention", "mode", "method")
        ),
        (Said("exact"), known[-1] if known else None, _FLOPS),
        (Said("coverage"), getattr(provenance, "coverage", None), _FLOPS),
        *((in_words(_WORDS, name), environment.get(name), _SPEED) for name in ("host", "threads", "torch")),
        ("flopwatch", environment.get("flopwatch"), _FLOPS),
        *((in_words(WHAT_RAN, name), ran.get(name), _ALL) for name in ("script", "git commit")),
    ]


# The measures


Unit = Literal["s", "tokens/s", "samples/s", "steps/s", "%", "% of peak", "x", "per step", "FLOP"]
Part: TypeAlias = Callable[[SteadyStep], tuple[int | float | None, int | float | None]]


@dataclass(frozen=True, slots=True)
class Measure:
    """A measure of the steps of a run: a statistic of their times, or the quotient of two sums over them.

    A rate such as tokens per second is the sum of all tokens divided by the sum of all seconds, as in the log. The mean
    of the rates of single steps would give fast steps too much weight.

    Attributes:
        words: The verdicts on run B if its value is higher and if it is lower; None for a measure without a verdict.
        of_times: The statistic of the sorted times; None for a quotient.
        part: What a step adds to the two sums; if either is None, the step is left out.
    """

    key: str
    label: str
    unit: Unit
    words: tuple[str, str] | None
    of_times: Callable[[Sequence[float]], float] | None = None
    part: Part | None = None

    def reduced(self, steps: Sequence[SteadyStep]) -> list[float]:
        """What the value is computed from: the sorted times, or both sums."""
        if self.part is None:
            return sorted([step.seconds for step in steps])
        known = [(over, under) for over, under in map(self.part, steps) if over is not None and under is not None]
        return [sum([over for over, _ in known]), sum([under for _, under in known])]

    def pooled(self, blocks: Sequence[list[float]]) -> list[float]:
        return sorted(chain.from_iterable(blocks)) if self.part is None else list(map(sum, zip(*blocks, strict=True)))

    def value(self, reduced: Sequence[float]) -> float | None:
        if self.of_times is not None:
            return self.of_times(reduced) if reduced else None
        over, under = reduced
        return (100 if self.unit in ("%", "% of peak") else 1) * over / under if under else None


def _capacity(step: SteadyStep) -> float | None:
    return None if step.peak_flops_per_s is None else step.seconds * step.peak_flops_per_s


def _padding(step: SteadyStep) -> int | None:
    return None if step.tokens is None or step.real_tokens is None else step.tokens - step.real_tokens


def _p90(ordered: Sequence[float]) -> float:
    return percentile(ordered, 0.9)


_TIME = (Said("slower"), Said("faster"))
_RATE = (Said("faster"), Said("slower"))
_SHARE = (Said("higher"), Said("lower"))
_STEADINESS = (Said("less steady"), Said("steadier"))

_QUOTIENTS: tuple[tuple[str, str, Unit, tuple[str, str] | None, Part], ...] = (
    ("steps_per_second", Said("steps/s"), "steps/s", _RATE, lambda step: (1, step.seconds)),
    ("tokens_per_second", Said("tokens/s"), "tokens/s", _RATE, lambda step: (step.tokens, step.seconds)),
    ("real_tokens_per_second", Said("real tokens/s"), "tokens/s", _RATE, lambda step: (step.real_tokens, step.seconds)),
    ("samples_per_second", Said("samples/s"), "samples/s", _RATE, lambda step: (step.samples, step.seconds)),
    ("mfu_percent", "MFU", "% of peak", _SHARE, lambda step: (step.model_flops, _capacity(step))),
    ("hfu_percent", "HFU", "% of peak", _SHARE, lambda step: (step.hardware_flops, _capacity(step))),
    ("input_wait_percent", Said("input wait"), "%", _SHARE, lambda step: (step.input_wait_seconds, step.seconds)),
    ("padding_percent", Said("padding"), "%", _SHARE, lambda step: (_padding(step), step.tokens)),
    ("samples_per_step", Said("samples per step"), "per step", None, lambda step: (step.samples, 1)),
    ("tokens_per_step", Said("tokens per step"), "per step", None, lambda step: (step.tokens, 1)),
    ("model_flops_per_step", Said("model FLOPs per step"), "FLOP", None, lambda step: (step.model_flops, 1)),
)

MEASURES = (
    Measure("step_time_median", Said("step time, median"), "s", _TIME, median),
    Measure("step_time_p90", Said("step time, p90"), "s", _TIME, _p90),
    Measure(
        "step_time_p90_over_median",
        Said("p90 over median"),
        "x",
        _STEADINESS,
        lambda times: _p90(times) / median(times),
    ),
    *(Measure(key, label, unit, words, part=part) for key, label, unit, words, part in _QUOTIENTS),
)

SPEED = ("real_tokens_per_second", "tokens_per_second", "samples_per_second", "steps_per_second")
"""The first of these measures that is known in both runs decides which run is faster.

Real tokens come first because padding is not useful work, and steps come last because steps may differ in size.
"""


# Totals get no verdict such as "faster", because a longer run is not a slower run.
TOTALS: tuple[tuple[str, str, Literal["%", "steps", "tokens", "FLOP", "duration", "J"]], ...] = (
    ("perf/goodput_percent", Said("goodput"), "%"),
    ("total/steps", Said("steps in all"), "steps"),
    ("total/tokens", Said("tokens in all"), "tokens"),
    ("total/model_flops", Said("model FLOPs in all"), "FLOP"),
    ("time/train_seconds", Said("time in steps"), "duration"),
    ("total/energy_joules", Said("energy in all"), "J"),
    ("perf/joules_per_step", Said("energy per step"), "J"),
    ("perf/joules_per_token", Said("energy per token"), "J"),
    ("perf/joules_per_sample", Said("energy per sample"), "J"),
)


def total(log: RunLog, key: str) -> Number | None:
    """Return a total as the run logged it: from the record at its end, or else from the newest row that has it."""
    if log.summary is not None and key in log.summary.values:
        return log.summary.values[key]
    group, _, name = key.partition("/")
    for row in reversed(log.rows):
        part = row.ledger if name == "steps" else row.ledger.get("totals" if group == "total" else "seconds", {})
        found: Number | None = row.values.get(key, part.get(name.removesuffix("_seconds")))
        if found is not None:
            return found
    return None


def recompute_percent(log: RunLog) -> float | None:
    """Mean of the logged `perf/recompute_percent`, each row weighted by its executed FLOPs; None if unknown."""
    shares = [
        (row.values["perf/recompute_percent"], sum(filter(None, row.steps.get("hardware_flops", ()))))
        for row in log.rows
        if "perf/recompute_percent" in row.values
    ]
    executed = sum(flops for _, flops in shares)
    return sum(share * flops for share, flops in shares) / executed if executed else None


CONFIDENCE = 0.99
_DRAWS = 1000
_MOST_STEPS_DRAWN = 50
"""If a measure sorts steps, longer blocks are thinned to this length, because 1,000 sorts of a long run are slow."""
_NOISE = (-0.05, 0.05)
"""A change below 0.05 percent or percentage points is printed as 0.0, so it is not called a difference."""


@dataclass(frozen=True, slots=True)
class Line:
    """One row of the comparison: a measure, its value in both runs, and the change. Unknown values are None.

    Attributes:
        unit: `s`, `tokens/s`, `samples/s`, `steps/s`, `%`, `% of peak`, `x`, `per step`, `steps`, `tokens`,
            `FLOP`, `J` or `duration` (seconds).
        change: From A to B, in percent of A; in percentage points if the unit is `%`, because A may be 0 %.
        low: Lower end of the 99 % interval of the change; `high` is the upper end.
        verdict: What B is: `faster`, `slower`, `higher`, `lower`, `steadier`, `less steady`, `no measurable
            difference` or `too few steps`; None for a measure without a verdict.
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
    """How many steps of a run are compared.

    Attributes:
        compared: Number of timed steps after warm-up.
        left_out: Number of warm-up steps and of steps without a measured time.
        has_ended: False if the run is still running or was killed.
        world_size: Number of ranks. The log has the steps of the rank that writes it.
        earlier_step: The last step of an earlier run in the same log, which is left out; None if there is none.
    """

    log: str
    compared: int
    left_out: int
    has_ended: bool
    world_size: int
    earlier_step: int | None = None


@dataclass(frozen=True, slots=True)
class Comparison(Stored):
    """The comparison of run A with run B.

    Attributes:
        headline: How the speed and MFU of the steps changed, and what a run does once, in whole sentences.
        differences: Settings, versions and devices that differ, so that some numbers may not be comparable.
        whole_run: How the MFU of the whole run changed; empty if a run does not know it.
        per_step: How the time per step changed, by part; None if a log does not have the times.
    """

    a: RunSteps
    b: RunSteps
    differences: tuple[RunDifference, ...]
    lines: tuple[Line, ...]
    headline: str = ""
    whole_run: str = ""
    per_step: PerStep | None = None

    def line(self, key: str) -> Line:
        return next(line for line in self.lines if line.key == key)


def compare(
    a: RunLog, b: RunLog, traces_a: Sequence[TraceSplit] = (), traces_b: Sequence[TraceSplit] = ()
) -> Comparison:
    """Compare two runs by the steps in their logs. Traces are used only if both runs have some."""
    in_a, in_b = steady_steps(a), steady_steps(b)
    drawn = _Draws(in_a, in_b)
    judged = tuple(_measured(measure, in_a, in_b, drawn) for measure in MEASURES)
    traces_a, traces_b = traces_of_log(a, traces_a)[0], traces_of_log(b, traces_b)[0]
    if not traces_a or not traces_b:  # a loss that one of them does not divide would look like one that shrank
        traces_a = traces_b = ()
    times_a, times_b = run_time(a, traces_a), run_time(b, traces_b)
    found = Comparison(
        _run_steps(a, len(in_a)),
        _run_steps(b, len(in_b)),
        find_differences(a, b),
        (*judged, *_totals(a, b)),
        whole_run=_whole_run(a, b),
        per_step=compare_per_step(times_a, times_b) if times_a is not None and times_b is not None else None,
    )
    once = _once(times_a, times_b) if times_a is not None and times_b is not None else ""
    headline = sentences([_speed_sentence(found), _mfu_sentence(found.line("mfu_percent")), once])
    return replace(found, headline=headline)


_LEAST_CHANGED_POINTS, _LEAST_CHANGED_SHARE = 1.0, 0.1
"""Two runs of the same training differ by some tenths of a point, or by some percent of a low MFU; a smaller change is
not called one."""


def _whole_run(a: RunLog, b: RunLog) -> str:
    in_a, in_b = waterfall_of(a), waterfall_of(b)
    if in_a is None or in_b is None:
        return ""
    gained = in_b.mfu_percent - in_a.mfu_percent
    said = Said("MFU of the whole run fell from {a} to {b}.")
    if gained > 0:
        said = Said("MFU of the whole run rose from {a} to {b}.")
    if abs(gained) < min(_LEAST_CHANGED_POINTS, _LEAST_CHANGED_SHARE * in_a.mfu_percent):
        said = Said("MFU of the whole run changed little, from {a} to {b}.")
    return said.filled(a=percent(in_a.mfu_percent / 100), b=percent(in_b.mfu_percent / 100))


_SAME_WORK_PERCENT = 1.0


def has_other_work(comparison: Comparison) -> bool:
    """Whether the steps of the runs differ in size, so that their times are those of different work."""
    change = comparison.line("model_flops_per_step").change
    return change is not None and abs(change) > _SAME_WORK_PERCENT


def _speed_sentence(comparison: Comparison) -> str:
    line = speed_line(comparison) if has_other_work(comparison) else comparison.line("step_time_median")
    if line is None or line.a is None or line.b is None or line.change is None:
        return ""
    in_s = line.unit == "s"
    values = {"a": step_time(line.a) if in_s else number(line.a), "b": step_time(line.b) if in_s else number(line.b)}
    if line.verdict in (TOO_FEW, NO_DIFFERENCE):
        known = Said("No measurable difference in speed")
        if line.verdict == TOO_FEW:
            known = Said("Too few steps to tell speeds apart")
        what = Said("{known}: a step takes {a} in A and {b} in B.")
        if not in_s:
            what = Said("{known}: {measure} are {a} in A and {b} in B.")
        return what.filled(known=known, measure=line.label, **values)
    changed = Said("Steps take {change} time in B: {b} instead of {a}.")
    if not in_s:
        changed = Said("B does {change} {measure}: {b} instead of {a}.")
    return changed.filled(
        change=_more_or_less(percent(abs(line.change) / 100), line.change), measure=line.label, **values
    )


def _more_or_less(amount: str, change: float) -> Said:
    return Said("{amount} more", amount=amount) if change > 0 else Said("{amount} less", amount=amount)


def _mfu_sentence(line: Line) -> str:
    if line.a is None or line.b is None or line.verdict not in _SHARE:
        return ""
    said = Said("MFU of the steps falls from {a} to {b}.")
    if line.verdict == _SHARE[0]:
        said = Said("MFU of the steps rises from {a} to {b}.")
    return said.filled(a=percent(line.a / 100, decimals=2), b=percent(line.b / 100, decimals=2))


_LEAST_ONCE_SECONDS, _LEAST_ONCE_SHARE = 1.0, 0.02
"""A smaller difference of what runs do once, and below this share of the shorter run, is not worth a sentence."""


def _once(a: RunTime, b: RunTime) -> str:
    more = b.once_seconds - a.once_seconds
    wall = min(sum(a.seconds.values()), sum(b.seconds.values()))
    if abs(more) < max(_LEAST_ONCE_SECONDS, _LEAST_ONCE_SHARE * wall):
        return ""
    once = Said("What a run does once (start-up, compilation, counting FLOPs) takes {change} in B.")
    return once.filled(change=_more_or_less(duration(abs(more)), more))


def run_time(log: RunLog, traces: Sequence[TraceSplit] = ()) -> RunTime | None:
    found, steps = time_by_part(log, traces), total(log, "total/steps")
    if found is None or not steps:
        return None
    seconds, measured = found
    passes = sum(seconds.pop(key, 0.0) for key in OF_PASSES)
    return RunTime({**seconds, PASSES: passes}, int(steps), measured)


def speed_line(comparison: Comparison) -> Line | None:
    lines = (comparison.line(key) for key in SPEED)
    return next((line for line in lines if line.a is not None and line.b is not None), None)


def _run_steps(log: RunLog, compared: int) -> RunSteps:
    world_size = log.starts[-1].world_size if log.starts else 1
    steps = sum(len(row.steps.get("step", ())) for row in log.rows)
    return RunSteps(str(log.path), compared, steps - compared, log.summary is not None, world_size, log.earlier_step)


class _Draws:
    """Bootstrap draws from the steps of both runs. All measures use the same draws."""

    def __init__(self, in_a: Sequence[SteadyStep], in_b: Sequence[SteadyStep]) -> None:
        self._blocks = (cut(in_a), cut(in_b))
        self._chosen = tuple(
            list(resampled(range(len(blocks)), _DRAWS, seed)) for seed, blocks in enumerate(self._blocks) if blocks
        )
        self._pooled: dict[Part | None, list[list[list[float]]]] = {}

    def changes(self, measure: Measure) -> list[float]:
        """Return the change of a measure from run A to run B in every draw; empty if a run has too few steps."""
        if not all(self._blocks):
            return []
        # Keep the sorted steps, because sorting takes most of the time and several measures need the same ones.
        if measure.part not in self._pooled:
            self._pooled[measure.part] = [self._pool(measure, run) for run in (0, 1)]
        drawn = zip(*self._pooled[measure.part], strict=True)
        changes = (_change(measure.value(a), measure.value(b), measure.unit) for a, b in drawn)
        return [change for change in changes if change is not None]

    def _pool(self, measure: Measure, run: int) -> list[list[float]]:
        # A thinned block makes the interval of the change slightly wider.
        most = _MOST_STEPS_DRAWN if measure.part is None else max(map(len, self._blocks[run]))
        blocks = [measure.reduced(block[:: -(-len(block) // most)]) for block in self._blocks[run]]
        return [measure.pooled([blocks[index] for index in chosen]) for chosen in self._chosen[run]]


def _measured(measure: Measure, in_a: Sequence[SteadyStep], in_b: Sequence[SteadyStep], drawn: _Draws) -> Line:
    a, b = (measure.value(measure.reduced(steps)) for steps in (in_a, in_b))
    change = _change(a, b, measure.unit)
    line = Line(measure.key, measure.label, measure.unit, a, b, change)
    if change is None or measure.words is None:
        return line
    changes = drawn.changes(measure)
    bounds = interval(changes, CONFIDENCE) if changes else None
    low, high = bounds or (None, None)
    return replace(line, low=low, high=high, verdict=differ(bounds, _NOISE, *reversed(measure.words)))


def _change(a: float | None, b: float | None, unit: str) -> float | None:
    if a is None or b is None:
        return None
    if unit == "%":
        return b - a
    return 100 * (b - a) / a if a else None


def _totals(a: RunLog, b: RunLog) -> list[Line]:
    again = recompute_percent(a), recompute_percent(b)
    lines = [Line("recompute_percent", Said("recompute"), "%", *again, _change(*again, "%"))]
    for key, label, unit in TOTALS:
        in_a, in_b = total(a, key), total(b, key)
        if key == "perf/goodput_percent" and _leaves_out_much(a, b):
            lines.append(Line(key, label, unit, in_a, in_b))
            continue
        if unit == "J" and in_a is None and in_b is None:  # most runs read no counters
            continue
        lines.append(Line(key, label, unit, in_a, in_b, _change(in_a, in_b, unit)))
    return lines


_MOST_LEFT_OUT = 0.02


def _leaves_out_much(*logs: RunLog) -> bool:
    """Whether goodput leaves out so much time between the passes that a slow loader could raise it."""
    known = [goodput_of(seconds_of(log)) for log in logs]
    return any(run is not None and run.known_seconds < (1 - _MOST_LEFT_OUT) * run.wall_seconds for run in known)
