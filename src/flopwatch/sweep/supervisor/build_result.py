"""Builds the result of a trial from its worker's exit and the files that the worker wrote. Standard library only."""

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from flopwatch.decode import BrokenRecordError, clean_value, read_or_none, read_record
from flopwatch.errors import FlopwatchError
from flopwatch.files import UnreadableError, load_json, read_json, read_lines, tail
from flopwatch.records.trial import (
    AFTER_THE_STEPS,
    OUT_OF_MEMORY,
    UNSTABLE_WIDTH,
    Measured,
    MemoryUse,
    Outcome,
    StepCost,
    StepTimes,
    TrialJob,
    TrialResult,
    TrialSpec,
)
from flopwatch.records.trial_files import EXCEPTION, MEASURED, METRICS, SPEC, STEPS, log_file, trial_folder
from flopwatch.runs import find_log, read_log
from flopwatch.runs.reading import steady_steps
from flopwatch.stats import interval, median, percentile, resampled
from flopwatch.sweep.host.environment import host_facts
from flopwatch.sweep.host.memory import HostPeak
from flopwatch.sweep.progress import Progress, read_progress
from flopwatch.sweep.supervisor.classify import ExitFacts, classify, memory_hint, ok_after_steps, signal_name
from flopwatch.sweep.supervisor.ranks import JobEnd
from flopwatch.text import cut, first_line, listed

_LONGEST_TEXT = 20_000  # longer tracebacks are cut to this number of characters
_LARGEST_NUMBER = 1e300  # sums and products of larger numbers would overflow
_MOST_OF_PEAK = 1.05  # of a reported MFU or HFU; above 1, because datasheet peaks are not exact
_MOST_NUMBERS = 500  # so many numbers of a command's `metrics.json` are kept, so that `results.jsonl` stays small
_REPORTED_NUMBERS = ("samples_per_s", "tokens_per_s", "mfu", "hfu")
_RESAMPLES = 500  # 500 resamples give two correct digits of a 95 % bootstrap interval in 10 ms for 100 steps.


@dataclass(frozen=True, slots=True)
class WorkerExit:
    """What the supervisor knows about the end of its worker process."""

    pid: int
    facts: ExitFacts
    stacks: str
    host_peak: HostPeak  # of the trial's processes until the last step; for a command, until its end
    memory_limit: dict[str, Any]
    unkillable_pids: list[int]  # they survived SIGKILL, because they are blocked in the kernel
    unix_time: float
    seconds: float
    job_end: JobEnd


@dataclass(frozen=True, slots=True)
class _ExceptionFile:
    """The required fields of `exception.json`."""

    type: str
    message: str
    outcome: Literal["error", "invalid", "unsupported", "oom_device", "oom_host", "lost"]


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
    """The content of the worker's `measured.json`, and of the other files that the worker or a user's command wrote.

    `reported` is the outcome that a command wrote to `metrics.json`, because an exit code cannot express it.
    """

    measured: Measured = field(default_factory=Measured)
    environment: Mapping[str, Any] = field(default_factory=dict)
    done: bool = False
    steps_done: bool = False
    reported: Literal["oom_device", "oom_host"] | None = None


def build_result(sweep: Path, name: str, job: TrialJob, worker_exit: WorkerExit) -> TrialResult:
    folder, spec = trial_folder(sweep, name), job.spec
    collected = collect_measurements(folder, spec, worker_exit.host_peak)
    facts = _exit_facts(sweep, name, spec, worker_exit, collected)
    outcome, reason = _with_failed_rank(classify(facts), worker_exit.job_end, facts)
    is_complete = outcome == "ok" and (collected.done or facts.is_command)
    progress = Progress("done") if is_complete else Progress("run") if facts.is_command else read_progress(folder)
    measured = collected.measured
    if outcome == "ok" and not is_complete:
        measured = _with_missing_phases(measured, spec, progress, reason)
    return TrialResult(
        name=name,
        key=job.key,
        spec=spec,
        outcome=outcome,
        reason=reason,
        evidence=_evidence(facts, worker_exit, outcome),
        phase=progress.phase,
        step=progress.step,
        measured=measured,
        unix_time=worker_exit.unix_time,
        seconds=worker_exit.seconds,
        environment={**job.environment, **host_facts(), "host": os.uname().nodename, **collected.environment},
        command=f"flopwatch trial --spec {shlex.quote(str(folder / SPEC))}",
        log_tail="" if is_complete else facts.log_tail,
        stacks=worker_exit.stacks,
        earlier_attempts=job.earlier_attempts,
        attempt=job.attempt,
    )


def with_finished_steps(result: TrialResult, folder: Path) -> TrialResult:
    """Change the outcome to `ok` if Slurm killed the trial for memory or time after all its steps were measured.

    Slurm kills the supervisor together with its worker, so the supervisor could not write this outcome itself. The
    outcomes `lost` and `cancelled` do not change, because such a trial runs again.
    """
    if result.outcome not in (*OUT_OF_MEMORY, "timeout") or result.measured.not_measured:
        return result
    collected = collect_measurements(folder, result.spec, HostPeak())
    if not collected.steps_done:
        return result
    _, reason = ok_after_steps(result.reason)
    progress = read_progress(folder)
    return replace(
        result,
        outcome="ok",
        reason=reason,
        phase=progress.phase,
        step=progress.step,
        measured=_with_missing_phases(collected.measured, result.spec, progress, reason),
        environment={**result.environment, **collected.environment},
    )


def _exit_facts(sweep: Path, name: str, spec: TrialSpec, worker_exit: WorkerExit, collected: Collected) -> ExitFacts:
    """Add what the trial's files say. Of several ranks the first that failed counts, as torchrun hides the cause."""
    first = worker_exit.job_end.first
    has_exception = first is None or first.exception is not None
    return replace(
        worker_exit.facts,
        status=worker_exit.facts.status if first is None else first.status,
        is_command=spec.trainer == "command",
        has_finished=collected.done and first is None,
        has_finished_steps=collected.steps_done,
        exception=_read_exception(trial_folder(sweep, name)) if has_exception else None,
        reported=collected.reported,
        log_tail=tail(log_file(sweep, name)),
    )


def _with_failed_rank(ended: tuple[Outcome, str], job: JobEnd, facts: ExitFacts) -> tuple[Outcome, str]:
    """Add to the reason which of several ranks failed first."""
    outcome, reason = ended
    if facts.own_kill is not None:
        return ended
    if job.first is not None:
        rank = f"rank {job.first.rank}"
        return outcome, f"{reason} ({rank})" if outcome == "ok" else f"{rank}: {reason}"
    if outcome == "ok":
        return ended
    if job.is_mute:
        return outcome, f"torchrun: {reason}"
    if job.error:
        return "error", f"the trial's ranks could not connect to each other: {first_line(job.error, 300)}"
    return ended


def _read_exception(folder: Path) -> dict[str, Any] | None:
    content = read_json(folder / EXCEPTION)
    try:
        read_record(_ExceptionFile, content)
        found: dict[str, Any] = clean_value(content)
    except BrokenRecordError:
        return None
    # Cut long texts. The worker writes none, but the user's code may have written this file.
    return {name: cut(value, _LONGEST_TEXT) if isinstance(value, str) else value for name, value in found.items()}


def _evidence(facts: ExitFacts, worker_exit: WorkerExit, outcome: Outcome) -> dict[str, Any]:
    job = worker_exit.job_end
    found = {
        "pid": worker_exit.pid,
        "killed_by": "flopwatch" if facts.own_kill is not None else None,
        "exit_code": facts.exit_code,
        "signal": signal_name(facts.signal_number) if facts.signal_number is not None else None,
        "exception": dict(facts.exception) if facts.exception is not None else None,
        "oom_kills": facts.oom_kills or None,
        "memory_limit": worker_exit.memory_limit or None,
        "hint": memory_hint(facts, outcome),
        "rank": job.first.rank if job.first is not None else None,
        "torchrun": job.error or None,
        "would_not_die": worker_exit.unkillable_pids or None,
    }
    return {name: value for name, value in found.items() if value is not None}


def collect_measurements(trial_dir: Path, spec: TrialSpec, host_peak: HostPeak) -> Collected:
    left = read_or_none(Collected, read_json(trial_dir / MEASURED)) or Collected()
    measured = replace(left.measured, memory=_with_host_peak(left.measured.memory, host_peak))
    if spec.trainer != "command":
        rows = list(read_lines(trial_dir / STEPS))
        return replace(left, measured=_with_steps(measured, rows, spec), reported=None)
    metrics, trouble = _read_metrics(trial_dir / METRICS)
    reported = metrics.get("outcome") if metrics.get("outcome") in ("oom_device", "oom_host") else None
    measured = _with_reported(measured, {**_monitor_values(trial_dir), **metrics}, spec.batch_size)
    if trouble:
        measured = replace(measured, not_measured={"reported numbers": trouble, **measured.not_measured})
    return replace(left, measured=measured, steps_done=False, reported=reported)


def _read_metrics(file: Path) -> tuple[dict[str, Any], str]:
    """The content of a command's `metrics.json`, and what is wrong with it."""
    try:
        content = load_json(file)
    except FileNotFoundError:
        return {}, ""
    except UnreadableError as error:
        return {}, f"{METRICS} cannot be used: {error}"
    if not isinstance(content, dict):
        return {}, f'{METRICS} cannot be used: it must hold a JSON object, such as {{"samples_per_s": 3}}'
    wrong = [
        f"{name} = {first_line(repr(value), 60)} is not {wanted}"
        for name, value in islice(content.items(), _MOST_NUMBERS)
        if (wanted := _wanted(name, value))
    ]
    return content, f"of {METRICS}, some values cannot be used: {listed(wrong, 3)}" if wrong else ""


def _wanted(name: str, value: Any) -> str:
    if name == "outcome":
        return "" if value in ("ok", "oom_device", "oom_host") else "oom_device or oom_host"
    if name == "step_seconds":
        return "" if _are_step_times(value) else "a list of numbers above 0"
    is_number_meant = name in _REPORTED_NUMBERS or type(value) in (int, float)
    return "a finite number" if is_number_meant and not _is_number(value) else ""


def _with_missing_phases(measured: Measured, spec: TrialSpec, progress: Progress, why: str) -> Measured:
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
    """Set the peak host memory to the larger of the worker's exact peak and the sampled peak of all processes."""
    if sampled.bytes is None:
        return memory
    is_more = memory.host_bytes is None or sampled.bytes > memory.host_bytes
    method = sampled.method if is_more or sampled.method != "high_water" else memory.host_method
    return replace(memory, host_bytes=max(sampled.bytes, memory.host_bytes or 0), host_method=method)


def _with_steps(measured: Measured, rows: list[dict[str, Any]], spec: TrialSpec) -> Measured:
    # The last line may be incomplete if the worker was killed.
    whole = [line for row in rows if (line := read_or_none(_StepLine, row)) is not None]
    timed = [row for row in whole if row.phase == "measure"]
    times = step_times([row.seconds for row in timed], first=whole[0].seconds if whole else None)
    if times is None:
        return measured
    positions = measured.extra.get("positions_per_step")
    cost = measured.cost
    if cost is not None and cost.peak:
        at_peak = times.median * cost.peak["flops_per_s"]
        mfu = cost.model_flops / at_peak if cost.model_flops is not None else None
        hfu = cost.hardware_flops / at_peak if cost.hardware_flops is not None else None
        cost = replace(cost, mfu=mfu, hfu=hfu)
    return replace(
        measured,
        steps=times,
        phase_seconds={
            phase: median(sorted(getattr(row, phase) for row in timed))
            for phase in ("forward", "backward", "optimizer")
        },
        samples_per_s=spec.batch_size / times.median,
        tokens_per_s=positions / times.median if positions else None,
        cost=cost,
    )


def _with_reported(measured: Measured, reported: Mapping[str, Any], batch_size: int) -> Measured:
    numbers = {name: float(value) for name, value in reported.items() if _is_number(value)}
    seconds: Any = reported.get("step_seconds")
    times = step_times([float(value) for value in seconds]) if _are_step_times(seconds) else None
    shares: dict[str, Any] = {name: numbers[name] for name in ("mfu", "hfu") if name in numbers}
    notes = tuple(
        f"the command reported {name} = {value:g}, which is ignored: write it as a share of the peak, 0.45 for 45 %"
        for name, value in shares.items()
        if not 0 <= value <= _MOST_OF_PEAK
    )
    shares = {name: value for name, value in shares.items() if 0 <= value <= _MOST_OF_PEAK}
    shares = shares if "mfu" in shares else {}
    return replace(
        measured,
        steps=times,
        samples_per_s=numbers.get("samples_per_s", batch_size / times.median if times else None),
        tokens_per_s=numbers.get("tokens_per_s"),
        cost=StepCost(**shares, method="reported by the command", notes=notes) if shares or notes else None,
        extra={cut(name, 200): value for name, value in islice(numbers.items(), _MOST_NUMBERS)},
    )


def _monitor_values(trial_dir: Path) -> Mapping[str, Any]:
    """The numbers of a command that was monitored by flopwatch, from its log in the trial's folder."""
    if not any(trial_dir.glob("*.jsonl")) and not (trial_dir / "flopwatch").is_dir():  # see `find_log`
        return {}
    try:
        log = read_log(find_log(trial_dir))
        summary, seconds = log.summary, [step.seconds for step in steady_steps(log)]
    except (FlopwatchError, ArithmeticError, OSError, ValueError):  # such a log must not prevent the trial's result
        return {}
    if summary is None:
        return {}
    short = {
        "mfu": "perf/mfu",
        "hfu": "perf/hfu",
        "tokens_per_s": "perf/tokens_per_second",
        "samples_per_s": "perf/samples_per_second",
    }
    values = dict(summary.values)
    return {**values, **{name: values[key] for name, key in short.items() if key in values}, "step_seconds": seconds}


def _are_step_times(value: Any) -> bool:
    return isinstance(value, list) and all(_is_number(item) and item > 0 for item in value)


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and abs(value) <= _LARGEST_NUMBER  # this comparison is False for NaN


def step_times(seconds: Sequence[float], first: float | None = None) -> StepTimes | None:
    """Compute the median, percentiles and the 95 % bootstrap interval of the median; None without steps.

    >>> step_times([2.0, 1.0, 3.0]).median
    2.0
    """
    if not seconds:
        return None
    ordered = sorted(seconds)
    middle = median(ordered)
    low, high = interval((median(sorted(drawn)) for drawn in resampled(ordered, _RESAMPLES)), 0.95)
    return StepTimes(
        count=len(ordered),
        median=middle,
        low=low,
        high=high,
        p10=percentile(ordered, 0.10),
        p90=percentile(ordered, 0.90),
        p99=percentile(ordered, 0.99),
        first=seconds[0] if first is None else first,
        unstable=len(ordered) < 3 or high - low > UNSTABLE_WIDTH * middle,
    )


def with_full_disk(result: TrialResult, why: str) -> TrialResult:
    """Add to the result that the disk was full, with the system's message `why`, which is empty if it was not.

    A failure counts as `lost` then, because the disk may have caused it.
    """
    if not why:
        return result
    evidence = {**result.evidence, "full_disk": why}
    if result.outcome not in ("error", "crash", "timeout", "hang"):  # these would blame the trainer
        return replace(result, evidence=evidence)
    reason = f"the disk of the sweep's folder was full ({why}) while it ran: {result.reason}"
    return replace(result, outcome="lost", reason=reason, evidence=evidence)
