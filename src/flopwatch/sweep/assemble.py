"""Put together what a trial measured, from the files its worker left. Light: runs in the supervisor."""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from flopwatch.record_reading import BrokenRecordError, read_record
from flopwatch.sweep.step_statistics import median, step_times
from flopwatch.trial_files import read_json, read_lines
from flopwatch.trial_records import Measured, MemoryUse, StepCost, TrialSpec

STEPS = "steps.jsonl"
MEASURED = "measured.json"
EXCEPTION = "exception.json"
METRICS = "metrics.json"

_PHASES = ("forward", "backward", "optimizer")
_LARGEST_NUMBER = 1e300


@dataclass(frozen=True, slots=True)
class _Left:
    """What `measured.json` holds."""

    measured: Measured = field(default_factory=Measured)
    environment: Mapping[str, Any] = field(default_factory=dict)
    done: bool = False


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


def assemble(trial_dir: Path, spec: TrialSpec, rss_bytes: int | None) -> tuple[Measured, dict[str, Any], bool]:
    """What was measured, the environment, and whether the worker said that it is done.

    Args:
        trial_dir: The trial's folder.
        spec: Its configuration.
        rss_bytes: Most resident memory of the tree, as the supervisor saw it.
    """
    left = _read_left(trial_dir)
    measured = left.measured
    measured = replace(measured, memory=_with_rss(measured.memory, rss_bytes))
    if spec.trainer == "command":
        measured = _with_reported(measured, trial_dir, spec.batch_size)
    else:
        measured = _with_steps(measured, list(read_lines(trial_dir / STEPS)), spec)
    return measured, dict(left.environment), left.done


def _read_left(trial_dir: Path) -> _Left:
    try:
        return read_record(_Left, read_json(trial_dir / MEASURED))
    except BrokenRecordError:
        return _Left()


def _with_rss(memory: MemoryUse, rss_bytes: int | None) -> MemoryUse:
    known = [value for value in (memory.rss_bytes, rss_bytes) if value]
    return replace(memory, rss_bytes=max(known) if known else None)


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


def _with_reported(measured: Measured, trial_dir: Path, batch_size: int) -> Measured:
    """What a command told: numbers in `metrics.json`, and the log of a `TrainingMonitor` in the trial's folder."""
    told = read_json(trial_dir / METRICS)
    reported: dict[str, Any] = told if isinstance(told, dict) else {}
    numbers = {
        name: float(value) for name, value in {**_of_monitor(trial_dir), **reported}.items() if _is_number(value)
    }
    seconds: Any = reported.get("step_seconds")
    is_list = isinstance(seconds, list) and all(_is_number(value) and value > 0 for value in seconds)
    times = step_times([float(value) for value in seconds]) if is_list else None
    mfu = numbers.get("mfu")
    by_steps = batch_size / times.median if times and times.median > 0 else None
    return replace(
        measured,
        steps=times,
        samples_per_s=numbers.get("samples_per_s", by_steps),
        tokens_per_s=numbers.get("tokens_per_s"),
        cost=StepCost(mfu=mfu, hfu=numbers.get("hfu"), method="reported by the command") if mfu is not None else None,
        extra=numbers,
    )


def _of_monitor(trial_dir: Path) -> Mapping[str, Any]:
    from flopwatch.run_log import find_log, read_log  # most trials have none, and supervisors start quickly

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
