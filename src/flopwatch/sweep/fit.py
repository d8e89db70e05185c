"""The largest and the fastest batch of one configuration, found by real trials in a folder of their own."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flopwatch.errors import InputError
from flopwatch.records.reading import BrokenRecordError
from flopwatch.records.sweep_results import read_results, read_trial_list
from flopwatch.records.trial import FAILED, OUT_OF_MEMORY, TrialResult, TrialSpec
from flopwatch.sweep.engines.local import LocalEngine
from flopwatch.sweep.engines.protocol import Engine
from flopwatch.sweep.engines.slots import visible_gpus
from flopwatch.sweep.fit_search import MOST_BATCH, Found, Probe, search
from flopwatch.sweep.folder import Trial, held_folder, write_trial_list
from flopwatch.sweep.host.environment import available_bytes, safe_limit_bytes
from flopwatch.sweep.runner.observing import Observer, Stop
from flopwatch.sweep.runner.plan import Plan, make_plan, record_unlisted
from flopwatch.sweep.runner.run import Refusal, run_plan

GIB = 2**30


@dataclass(frozen=True, slots=True)
class HostLimit:
    """The host memory every trial of a fit may have.

    Attributes:
        spec: The configuration, with the limit in it.
        reason: Where the limit comes from, for a person; empty when the user gave it or there is none.
    """

    spec: TrialSpec
    reason: str


def with_host_limit(folder: Path, spec: TrialSpec) -> HostLimit:
    """On a CPU, what is available on this host less a margin, unless the configuration has a limit already.

    A fit that is resumed keeps the limit it began with, or its trials could not be compared.
    """
    if spec.limits.memory_bytes is not None or not _is_on_cpu(spec):
        return HostLimit(spec, "")
    earlier = _earlier_limit(folder, spec)
    if earlier is not None:
        return HostLimit(_limited(spec, earlier), f"limit {earlier / GIB:.2f} GiB, as when this fit began")
    available = available_bytes()
    if available is None:
        raise InputError("this host does not tell how much memory is available; give the limit, such as --memory 8GiB")
    limit = safe_limit_bytes(available)
    reason = f"limit {limit / GIB:.2f} GiB: the {available / GIB:.2f} GiB available on this host, less a margin"
    return HostLimit(_limited(spec, limit), reason)


def _is_on_cpu(spec: TrialSpec) -> bool:
    return spec.device == "cpu" or (spec.device == "auto" and not visible_gpus())


def _limited(spec: TrialSpec, limit_bytes: int) -> TrialSpec:
    return replace(spec, limits=replace(spec.limits, memory_bytes=limit_bytes))


def _earlier_limit(folder: Path, spec: TrialSpec) -> int | None:
    """Of a trial in this folder that is the same but for its batch and its limit."""
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
    told: Callable[[Probe], Any] = lambda probe: None,
) -> Found:
    """Search with real trials, each an ordinary one of the folder: what ran before is not run again.

    Args:
        folder: As of a sweep; `flopwatch report` reads it.
        spec: The configuration; its batch size is not used.
        observer: Is told of the trials that run.
        stop: Ends the search.
        max_batch: Nothing larger is tried.
        preflight: Called once, before the first trial that must run; says what refuses it.
        make_engine: Where trials run.
        told: Called with each probe, those of earlier calls included.
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
        told(probe)
        return probe

    with held_folder(folder):
        return search(measure, max_batch)


def _plan(folder: Path, spec: TrialSpec) -> Plan:
    """What failed for another reason than memory is run again: the user will have mended it."""
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
            f"the limit of {limit / GIB:.2f} GiB is more than the {available / GIB:.2f} GiB available on this host; "
            "free some memory, or give a smaller --memory and a new --output"
        )


def probe_of(result: TrialResult) -> Probe:
    """What a search needs to know of a trial."""
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
