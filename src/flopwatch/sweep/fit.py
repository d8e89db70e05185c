"""Finds the largest and the fastest batch of a configuration with real trials, in a folder like a sweep's."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flopwatch.errors import InputError
from flopwatch.number_format import byte_size
from flopwatch.records.reading import BrokenRecordError
from flopwatch.records.sweep_results import read_results, read_trial_list
from flopwatch.records.trial import FAILED, OUT_OF_MEMORY, TrialResult, TrialSpec
from flopwatch.sweep.engines.local import LocalEngine, visible_gpus
from flopwatch.sweep.engines.protocol import Engine
from flopwatch.sweep.fit_search import MOST_BATCH, Found, Probe, search
from flopwatch.sweep.folder import Trial, held_folder, write_trial_list
from flopwatch.sweep.host.environment import available_bytes, safe_limit_bytes
from flopwatch.sweep.runner.observing import Observer, Stop
from flopwatch.sweep.runner.plan import Plan, make_plan, record_unlisted
from flopwatch.sweep.runner.run import Refusal, run_plan


@dataclass(frozen=True, slots=True)
class HostLimit:
    """The limit of host memory for every trial of a fit.

    Attributes:
        spec: The configuration with the limit.
        reason: Where the limit comes from, as text; empty if the user gave it or there is none.
    """

    spec: TrialSpec
    reason: str


def with_host_limit(folder: Path, spec: TrialSpec) -> HostLimit:
    """On a CPU, the available memory of this host less a margin, unless the configuration has a limit.

    A resumed fit keeps its first limit, because its trials would otherwise not be comparable.
    """
    if spec.limits.memory_bytes is not None or not _is_on_cpu(spec):
        return HostLimit(spec, "")
    earlier = _earlier_limit(folder, spec)
    if earlier is not None:
        return HostLimit(_limited(spec, earlier), f"limit {byte_size(earlier)}, as when this fit began")
    available = available_bytes()
    if available is None:
        raise InputError("the available memory of this host is unknown; give a limit, such as --memory 8GiB")
    limit = safe_limit_bytes(available)
    reason = f"limit {byte_size(limit)}: the {byte_size(available)} available on this host, less a margin"
    return HostLimit(_limited(spec, limit), reason)


def _is_on_cpu(spec: TrialSpec) -> bool:
    return spec.device == "cpu" or (spec.device == "auto" and not visible_gpus())


def _limited(spec: TrialSpec, limit_bytes: int) -> TrialSpec:
    return replace(spec, limits=replace(spec.limits, memory_bytes=limit_bytes))


def _earlier_limit(folder: Path, spec: TrialSpec) -> int | None:
    """The limit of a trial in this folder that differs from this one only in batch and limit."""
    for entry in read_trial_list(folder).trials.values():
        try:
            earlier = TrialSpec.from_json(entry.get("spec", {}))
        except BrokenRecordError:
            continue
        limit = earlier.limits.memory_bytes
        same = replace(_limited(spec, limit or 1), batch_size=earlier.batch_size)
        if limit is not None and same.measured_settings() == earlier.measured_settings():
            return limit
    return None


def fit_batch(
    folder: Path,
    spec: TrialSpec,
    observer: Observer,
    *,
    stop: Stop | None = None,
    max_batch: int = MOST_BATCH,
    preflight: Callable[[Plan], Refusal] | None = None,
    make_engine: Callable[[], Engine] = LocalEngine,
    on_probe: Callable[[Probe], Any] = lambda probe: None,
) -> Found:
    """Search with real trials, which are ordinary trials of the folder: results of earlier runs are used again.

    Args:
        folder: A folder like a sweep's; `flopwatch report` reads it.
        spec: The configuration; its batch size is not used.
        observer: Follows the trials that run.
        stop: Ends the search.
        max_batch: The largest batch to try.
        preflight: Called once, before the first trial that must run; returns which trials cannot run.
        make_engine: Makes the engine that runs the trials.
        on_probe: Called with each probe, including those of earlier runs.
    """
    stop = stop or Stop()
    refusals: list[Refusal] = []

    def measure(batch_size: int) -> Probe:
        plan = _plan(folder, replace(spec, batch_size=batch_size))
        if plan.todo:
            _refuse_too_little_memory(spec)
            record_unlisted(folder, plan)
            write_trial_list(folder, plan.trials, "fit")
            if not refusals:
                refusals.append(preflight(plan) if preflight else lambda trial: None)
            run_plan(plan, make_engine(), observer, stop, refusals[0])
        probe = probe_of(_result(folder, plan.trials[0]))
        on_probe(probe)
        return probe

    with held_folder(folder):
        return search(measure, max_batch)


def _plan(folder: Path, spec: TrialSpec) -> Plan:
    """Trials that failed for other reasons than memory run again, because the cause may have been removed."""
    plan = make_plan(folder, [spec])
    has_failed = any(result.outcome in FAILED for result in plan.kept.values())
    return make_plan(folder, [spec], only="failed") if has_failed else plan


def _result(folder: Path, trial: Trial) -> TrialResult:
    result = read_results(folder).get(trial.name)
    if result is None or result.key != trial.key:
        return TrialResult(trial.name, trial.key, trial.spec, "cancelled", "stopped before it began")
    return result


def _refuse_too_little_memory(spec: TrialSpec) -> None:
    limit, available = spec.limits.memory_bytes, available_bytes()
    if _is_on_cpu(spec) and limit is not None and available is not None and limit > available:
        raise InputError(
            f"the limit of {byte_size(limit)} is more than the {byte_size(available)} available on this host; "
            "free some memory, or give a smaller --memory and a new --output"
        )


def probe_of(result: TrialResult) -> Probe:
    """The values of a trial that the search needs."""
    measured, size = result.measured, result.spec.batch_size
    times, rate = measured.steps, measured.samples_per_s
    is_oom = result.outcome in OUT_OF_MEMORY
    return Probe(
        batch_size=size,
        fits=True if result.outcome == "ok" else False if is_oom else None,
        outcome=result.outcome,
        reason=result.reason,
        peak_bytes=measured.memory.peak_bytes,
        capacity_bytes=measured.memory.device_bytes or result.spec.limits.memory_bytes,
        samples_per_s=rate,
        slowest_per_s=rate * times.median / times.high if times and rate else None,
        fastest_per_s=rate * times.median / times.low if times and rate else None,
        step_seconds=times.median if times else None,
        is_bare=bool(measured.memory.alloc_retries),
    )
