"""Collects what a trial measured from the files its worker left. Standard library only: supervisors use it."""

import contextlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from flopwatch.records.reading import BrokenRecordError, cut, read_json, read_lines, read_object, read_record
from flopwatch.records.trial import AFTER_THE_STEPS, Measured, MemoryUse, Outcome, StepCost, StepTimes, TrialSpec
from flopwatch.records.trial_files import MEASURED, METRICS, STEPS
from flopwatch.sweep.claims import Progress
from flopwatch.sweep.host.memory import HostPeak

_PHASES = ("forward", "backward", "optimizer")
_LARGEST_NUMBER = 1e300
_MOST_OF_PEAK = 1.05
"""A reported MFU may exceed 1 by this much, because datasheet peaks are not exact."""

_MOST_NUMBERS = 500
"""Numbers kept from a command's `metrics.json`: each one is repeated in every list of results."""

REPORTED = "reported by the command"


@dataclass(frozen=True, slots=True)
class _MeasuredFile:
    """What `measured.json` holds."""

    measured: Measured = field(default_factory=Measured)
    environment: Mapping[str, Any] = field(default_factory=dict)
    done: bool = False
    steps_done: bool = False


@dataclass(frozen=True, slots=True)
class _StepLine:
    """A line of `steps.jsonl`."""

    phase: str
    seconds: float
    forward: float
    backward: float
    optimizer: float

    def why_broken(self) -> str | None:
        return None if self.seconds > 0 else "its seconds are not above 0"


@dataclass(frozen=True, slots=True)
class Collected:
    """What a worker or a command left in its files.

    Attributes:
        measured: The measurements.
        environment: What it ran on.
        is_done: Whether the worker wrote that it is done.
        has_all_steps: Whether all steps of the spec are measured; False for a command, whose steps we do not see.
        reported_outcome: The outcome a command reported for itself.
    """

    measured: Measured
    environment: dict[str, Any]
    is_done: bool = False
    has_all_steps: bool = False
    reported_outcome: Outcome | None = None


def collect_measurements(trial_dir: Path, spec: TrialSpec, host_peak: HostPeak) -> Collected:
    """Read a trial's files.

    Args:
        trial_dir: The trial's folder.
        spec: Its configuration.
        host_peak: Peak host memory of the process tree, as the supervisor sampled it.
    """
    left = _read_measured(trial_dir)
    measured = replace(left.measured, memory=_with_host_peak(left.measured.memory, host_peak))
    environment = dict(left.environment)
    if spec.trainer == "command":
        reported = read_object(trial_dir / METRICS)
        measured = _with_reported(measured, trial_dir, reported, spec.batch_size)
        return Collected(measured, environment, left.done, reported_outcome=_reported_outcome(reported))
    rows = list(read_lines(trial_dir / STEPS))
    return Collected(_with_steps(measured, rows, spec), environment, left.done, left.steps_done)


def _read_measured(trial_dir: Path) -> _MeasuredFile:
    try:
        return read_record(_MeasuredFile, read_json(trial_dir / MEASURED))
    except BrokenRecordError:
        return _MeasuredFile()


def with_missing_phases(measured: Measured, spec: TrialSpec, progress: Progress, why: str) -> Measured:
    """Note in `not_measured`, for a trial that ended after its steps, which phases are missing and why."""
    is_wanted = {"trace": spec.trace, "privacy": bool(spec.privacy)}
    is_measured = {
        "memory": "optimizer" in measured.memory.by_phase,
        "flops": measured.cost is not None,
        "privacy": measured.privacy is not None,
        "trace": measured.trace is not None,
    }
    missing = [phase for phase in AFTER_THE_STEPS if is_wanted.get(phase, True) and not is_measured[phase]]
    reasons = {phase: why if phase == progress.phase else "not reached" for phase in missing}
    return replace(measured, not_measured={**reasons, **measured.not_measured})


def _with_host_peak(memory: MemoryUse, sampled: HostPeak) -> MemoryUse:
    """Combine two peaks: the worker's is exact for its own process, the supervisor's samples the whole tree."""
    if sampled.bytes is None:
        return memory
    is_more = memory.host_bytes is None or sampled.bytes > memory.host_bytes
    method = sampled.method if is_more or sampled.method != "high_water" else memory.host_method
    return replace(memory, host_bytes=max(sampled.bytes, memory.host_bytes or 0), host_method=method)


def _reported_outcome(reported: Mapping[str, Any]) -> Outcome | None:
    """A command may report that it ran out of memory, which its exit code cannot say."""
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


def _whole_steps(rows: list[dict[str, Any]]) -> list[_StepLine]:
    """The readable lines: a worker may be killed in the middle of one, and a trainer may write its own."""
    found = []
    for row in rows:
        with contextlib.suppress(BrokenRecordError):
            found.append(read_record(_StepLine, row))
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
    """Add what a command reported: numbers in `metrics.json`, and a `TrainingMonitor` log in the trial's folder."""
    numbers = {
        name: float(value) for name, value in {**_monitor_values(trial_dir), **reported}.items() if _is_number(value)
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
    """MFU and HFU as a command reported them. Impossible values are left out, and a note says so."""
    reported = {name: numbers[name] for name in ("mfu", "hfu") if name in numbers}
    shares = {name: value for name, value in reported.items() if 0 <= value <= _MOST_OF_PEAK}
    notes = tuple(
        f"the command reported {name} = {value:g}, which is left out: it is a share of the peak, 0.45 for 45 %"
        for name, value in reported.items()
        if name not in shares
    )
    return (shares if "mfu" in shares else {}), notes


def _monitor_values(trial_dir: Path) -> Mapping[str, Any]:
    from flopwatch.runs import find_log, read_log  # few trials have such a log, so supervisors start without it

    try:
        summary = read_log(find_log(trial_dir)).summary
    except Exception:  # a broken log of the user's program must not cost the trial its result
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
    return is_number and abs(value) <= _LARGEST_NUMBER  # False for NaN as well


# Statistics of step times, without numpy: supervisors use them.


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
    """Median of sorted values. Importing `statistics` would cost a supervisor 7 ms."""
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
