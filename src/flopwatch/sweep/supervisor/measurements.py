"""Put together what a trial measured, from the files its worker left. Light: runs in the supervisor."""

import contextlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from flopwatch.records.reading import BrokenRecordError, cut, read_record
from flopwatch.records.trial import Measured, MemoryUse, Outcome, StepCost, StepTimes, TrialSpec
from flopwatch.records.trial_files import read_json, read_lines
from flopwatch.sweep.claims import Progress
from flopwatch.sweep.host.tree_memory import HostPeak

STEPS = "steps.jsonl"
MEASURED = "measured.json"
EXCEPTION = "exception.json"
METRICS = "metrics.json"

_PHASES = ("forward", "backward", "optimizer")
_LARGEST_NUMBER = 1e300
_MOST_OF_PEAK = 1.05
"""A little above 1 for peaks that are a little wrong."""

_MOST_NUMBERS = 500
"""Of a command's `metrics.json`; every one of them stands in each list of results."""

REPORTED = "reported by the command"


@dataclass(frozen=True, slots=True)
class _Left:
    """What `measured.json` holds."""

    measured: Measured = field(default_factory=Measured)
    environment: Mapping[str, Any] = field(default_factory=dict)
    done: bool = False
    steps_done: bool = False


@dataclass(frozen=True, slots=True)
class _Step:
    """A line of `steps.jsonl`."""

    phase: str
    seconds: float
    forward: float
    backward: float
    optimizer: float

    def why_broken(self) -> str | None:
        return None if self.seconds > 0 else "it took no time"


def of_rank(file: str, rank: int) -> str:
    """The name of a file that every process of a trial writes for itself; the first one's is the trial's.

    >>> of_rank("exception.json", 0), of_rank("exception.json", 3)
    ('exception.json', 'exception-3.json')
    """
    stem, _, ending = file.partition(".")
    return f"{stem}-{rank}.{ending}" if rank else file


AFTER_THE_STEPS = ("memory", "flops", "privacy", "trace")
"""What flopwatch does for its own sake: not the training, so no failure of the trial's."""


@dataclass(frozen=True, slots=True)
class Found:
    """What a worker or a command left.

    Attributes:
        measured: What was measured.
        environment: What it ran on.
        is_done: It said that it is done.
        has_all_steps: Every step that was asked for is measured; always False for a command, whose steps we do not see.
        reported_outcome: What a command said of its own end.
    """

    measured: Measured
    environment: dict[str, Any]
    is_done: bool = False
    has_all_steps: bool = False
    reported_outcome: Outcome | None = None


def assemble(trial_dir: Path, spec: TrialSpec, host_peak: HostPeak) -> Found:
    """From the files of a trial.

    Args:
        trial_dir: The trial's folder.
        spec: Its configuration.
        host_peak: Most host memory of the tree, as the supervisor saw it.
    """
    left = _read_left(trial_dir)
    measured = replace(left.measured, memory=_with_host(left.measured.memory, host_peak))
    environment = dict(left.environment)
    if spec.trainer == "command":
        told = read_json(trial_dir / METRICS)
        reported: dict[str, Any] = told if isinstance(told, dict) else {}
        measured = _with_reported(measured, trial_dir, reported, spec.batch_size)
        return Found(measured, environment, left.done, reported_outcome=_told_outcome(reported))
    rows = list(read_lines(trial_dir / STEPS))
    return Found(_with_steps(measured, rows, spec), environment, left.done, left.steps_done)


def _read_left(trial_dir: Path) -> _Left:
    try:
        return read_record(_Left, read_json(trial_dir / MEASURED))
    except BrokenRecordError:
        return _Left()


def cut_short(measured: Measured, spec: TrialSpec, progress: Progress, why: str) -> Measured:
    """Of a trial that ended after its steps: what is missing, by phase, and why."""
    is_asked = {"trace": spec.trace, "privacy": bool(spec.privacy)}
    is_there = {
        "memory": "optimizer" in measured.memory.by_phase,
        "flops": measured.cost is not None,
        "privacy": measured.privacy is not None,
        "trace": measured.trace is not None,
    }
    missing = [phase for phase in AFTER_THE_STEPS if is_asked.get(phase, True) and not is_there[phase]]
    reasons = {phase: why if phase == progress.phase else "not reached" for phase in missing}
    return replace(measured, not_measured={**reasons, **measured.not_measured})


def _with_host(memory: MemoryUse, seen: HostPeak) -> MemoryUse:
    """The worker knows every moment of its own process, the supervisor the whole tree at some."""
    if seen.bytes is None:
        return memory
    is_more = memory.host_bytes is None or seen.bytes > memory.host_bytes
    method = seen.method if is_more or seen.method != "high_water" else memory.host_method
    return replace(memory, host_bytes=max(seen.bytes, memory.host_bytes or 0), host_method=method)


def _told_outcome(reported: Mapping[str, Any]) -> Outcome | None:
    """A command may say that it was out of memory: it knows what no exit code tells."""
    outcome = reported.get("outcome")
    return outcome if outcome in ("oom_device", "oom_host") else None


def _with_steps(measured: Measured, rows: list[dict[str, Any]], spec: TrialSpec) -> Measured:
    whole = _whole_steps(rows)
    timed = [row for row in whole if row.phase == "measure"]
    times = step_times([row.seconds for row in timed], first=whole[0].seconds if whole else None)
    if times is None:
        return measured
    positions = measured.extra.get("positions_per_step")
    return replace(
        measured,
        steps=times,
        phase_seconds={phase: median(sorted(getattr(row, phase) for row in timed)) for phase in _PHASES},
        samples_per_s=spec.batch_size / times.median,
        tokens_per_s=positions / times.median if positions else None,
        cost=_with_rates(measured.cost, times.median) if measured.cost else None,
    )


def _whole_steps(rows: list[dict[str, Any]]) -> list[_Step]:
    """Those that can be read: a worker is killed in the middle of a line, and a trainer may write what it likes."""
    found = []
    for row in rows:
        with contextlib.suppress(BrokenRecordError):
            found.append(read_record(_Step, row))
    return found


def _with_rates(cost: StepCost, seconds: float) -> StepCost:
    if not cost.peak:
        return cost
    at_peak = seconds * cost.peak["flops_per_s"]
    return replace(
        cost,
        mfu=cost.model_flops / at_peak if cost.model_flops is not None else None,
        hfu=cost.hardware_flops / at_peak if cost.hardware_flops is not None else None,
    )


def _with_reported(measured: Measured, trial_dir: Path, reported: Mapping[str, Any], batch_size: int) -> Measured:
    """What a command told: numbers in `metrics.json`, and the log of a `TrainingMonitor` in the trial's folder."""
    numbers = {
        name: float(value) for name, value in {**_of_monitor(trial_dir), **reported}.items() if _is_number(value)
    }
    seconds: Any = reported.get("step_seconds")
    is_list = isinstance(seconds, list) and all(_is_number(value) and value > 0 for value in seconds)
    times = step_times([float(value) for value in seconds]) if is_list else None
    shares, notes = _reported_shares(numbers)
    by_steps = batch_size / times.median if times and times.median > 0 else None
    return replace(
        measured,
        steps=times,
        samples_per_s=numbers.get("samples_per_s", by_steps),
        tokens_per_s=numbers.get("tokens_per_s"),
        cost=StepCost(**shares, method=REPORTED, notes=notes) if shares or notes else None,
        extra={cut(name, 200): value for name, value in islice(numbers.items(), _MOST_NUMBERS)},
    )


def _reported_shares(numbers: Mapping[str, float]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """MFU and HFU as a command told them; one that no device can reach is no measurement, and the notes say so."""
    told = {name: numbers[name] for name in ("mfu", "hfu") if name in numbers}
    shares = {name: value for name, value in told.items() if 0 <= value <= _MOST_OF_PEAK}
    notes = tuple(
        f"the command reported {name} = {value:g}, which is left out: it is a share of the peak, 0.45 for 45 %"
        for name, value in told.items()
        if name not in shares
    )
    return (shares if "mfu" in shares else {}), notes


def _of_monitor(trial_dir: Path) -> Mapping[str, Any]:
    from flopwatch.runs import find_log, read_log  # most trials have none, and supervisors start quickly

    try:
        summary = read_log(find_log(trial_dir)).summary
    except Exception:  # whatever a user's program left there must not cost its trial the result
        return {}
    if summary is None:
        return {}
    values = dict(summary.values)
    short = {
        "mfu": "perf/mfu",
        "hfu": "perf/hfu",
        "tokens_per_s": "perf/tokens_per_second",
        "samples_per_s": "perf/samples_per_second",
    }
    return {**values, **{name: values[key] for name, key in short.items() if key in values}}


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and abs(value) <= _LARGEST_NUMBER  # also false for what is not a number at all


# Statistics of step times. Pure, and without numpy: supervisors use it.


_RESAMPLES = 500
_UNSTABLE_WIDTH = 0.05


def step_times(seconds: Sequence[float], first: float | None = None) -> StepTimes | None:
    """Median, percentiles and the median's 95 % bootstrap interval (Efron 1979, percentile method).

    >>> step_times([2.0, 1.0, 3.0]).median
    2.0
    """
    if not seconds:
        return None
    ordered = sorted(seconds)
    middle = median(ordered)
    low, high = _interval_of_median(ordered)
    return StepTimes(
        count=len(ordered),
        median=middle,
        low=low,
        high=high,
        p10=percentile(ordered, 0.10),
        p90=percentile(ordered, 0.90),
        p99=percentile(ordered, 0.99),
        first=seconds[0] if first is None else first,
        unstable=len(ordered) < 3 or high - low > _UNSTABLE_WIDTH * middle,
    )


def median(ordered: Sequence[float]) -> float:
    """Of sorted values. The standard library's costs a supervisor 7 ms to import."""
    return percentile(ordered, 0.5)


def percentile(ordered: Sequence[float], share: float) -> float:
    """Linear between the two nearest, as numpy's default.

    >>> percentile([1.0, 2.0, 3.0], 0.25)
    1.5
    """
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def _interval_of_median(ordered: Sequence[float]) -> tuple[float, float]:
    draw = random.Random(0)  # the same steps always give the same interval
    medians = sorted(median(sorted(draw.choices(ordered, k=len(ordered)))) for _ in range(_RESAMPLES))
    return percentile(medians, 0.025), percentile(medians, 0.975)
