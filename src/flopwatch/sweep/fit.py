"""Finds the largest and the fastest batch of a configuration by running trials, in a folder with a sweep's files."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flopwatch.decode import BrokenRecordError, read_record
from flopwatch.errors import InputError
from flopwatch.numbers import byte_size
from flopwatch.records.sweep_results import read_results, read_trial_list
from flopwatch.records.trial import FAILED, OUT_OF_MEMORY, Outcome, TrialResult, TrialSpec
from flopwatch.sweep.engines.local import LocalEngine, visible_gpus
from flopwatch.sweep.folder import held_folder, write_trial_list
from flopwatch.sweep.host.environment import available_bytes, safe_limit_bytes
from flopwatch.sweep.runner.observing import Observer, Stop
from flopwatch.sweep.runner.plan import make_plan, record_unlisted
from flopwatch.sweep.runner.run import run_plan

TOLERANCE = 0.05
"""The search ends when the largest batch that fits is known up to this relative error."""

MOST_BATCH = 4096  # the default for the largest batch to try

_LEAST_NOISE = 0.02
"""Relative difference in throughput to expect between two processes, even if the steps within each are equally fast."""


@dataclass(frozen=True, slots=True)
class Probe:
    """The result of the trial of one batch size.

    Attributes:
        fits: Whether the memory sufficed; None if the trial failed for another reason.
        capacity_bytes: The memory that the trial could use; None if unknown.
        samples_per_s: Throughput at the median step time.
        slowest_per_s: Throughput at the upper end of the step time's confidence interval.
        fastest_per_s: Throughput at the lower end of that interval.
        is_bare: Whether the allocator had to release cached memory and try again before the batch fitted.
    """

    batch_size: int
    fits: bool | None
    outcome: Outcome
    reason: str = ""
    peak_bytes: int | None = None
    capacity_bytes: int | None = None
    samples_per_s: float | None = None
    slowest_per_s: float | None = None
    fastest_per_s: float | None = None
    step_seconds: float | None = None
    is_bare: bool = False


@dataclass(frozen=True, slots=True)
class Found:
    """The result of a search.

    Attributes:
        largest: The largest batch that fitted; None if not even 1 did.
        too_large: The smallest batch that did not fit; None if all did.
        is_largest_known: Whether `largest` is known within the tolerance, or all batches up to the allowed maximum fit.
        fastest: The smallest batch whose throughput is not measurably below the best; None if no trial has step times.
        as_fast: The next larger batch tried, if its throughput does not measurably differ from `fastest`'s; else None.
        probes: The results of all batches tried, in the order of the trials.
        stopped: Why the search ended early; empty if it did not.
    """

    largest: int | None
    too_large: int | None
    is_largest_known: bool
    fastest: int | None
    as_fast: int | None
    probes: tuple[Probe, ...]
    stopped: str = ""


def search(measure: Callable[[int], Probe], max_batch: int = MOST_BATCH) -> Found:
    """Double the batch until it does not fit, then halve the range between the last two.

    >>> def measure(batch_size):
    ...     used = 300 + 10 * batch_size
    ...     return Probe(batch_size, used <= 1000, "ok" if used <= 1000 else "oom_host", "", used, 1000)
    >>> found = search(measure)
    >>> found.largest, found.too_large, [probe.batch_size for probe in found.probes]
    (68, 72, [1, 2, 4, 8, 16, 32, 64, 128, 96, 80, 72, 68])
    """
    probes: list[Probe] = []
    low, high = 0, max_batch + 1
    has_end = False
    while (size := _next(low, high, has_end=has_end)) is not None:
        probes.append(measure(size))
        if probes[-1].fits is None:
            break
        if probes[-1].fits:
            low = size
        else:
            high, has_end = size, True
    last = probes[-1]
    is_stopped = last.fits is None
    fastest, as_fast = fastest_of(probes)
    return Found(
        largest=low or None,
        too_large=high if has_end else None,
        is_largest_known=not is_stopped,
        fastest=fastest,
        as_fast=as_fast,
        probes=tuple(probes),
        stopped=f"batch {last.batch_size}: {last.outcome}: {last.reason}".rstrip(": ") if is_stopped else "",
    )


def _next(low: int, high: int, *, has_end: bool) -> int | None:
    """The batch to try next, if `low` fits and `high` does not; None if the largest batch is known well enough."""
    if high - low <= 1 or (has_end and low >= (1 - TOLERANCE) * (high - 1)):
        return None
    return (low + high) // 2 if has_end else min(max(2 * low, 1), high - 1)


def fastest_of(probes: Sequence[Probe]) -> tuple[int | None, int | None]:
    """The smallest batch that is not measurably slower than the fastest, and the next larger batch that was tried.

    The second is None if it is measurably slower than the first. Each is None if there is no such batch.
    """
    timed = sorted((probe for probe in probes if probe.fits and probe.samples_per_s), key=lambda one: one.batch_size)
    if not timed:
        return None, None
    surely = max(_reach(probe)[0] for probe in timed)
    place = next(index for index, probe in enumerate(timed) if _reach(probe)[1] >= surely)
    larger = timed[place + 1] if place + 1 < len(timed) else None
    is_as_fast = larger is not None and _reach(larger)[1] >= _reach(timed[place])[0]
    return timed[place].batch_size, larger.batch_size if larger is not None and is_as_fast else None


def _reach(probe: Probe) -> tuple[float, float]:
    """The lowest and the highest throughput that the trial's step times allow, in samples per second."""
    rate = probe.samples_per_s or 0.0
    low, high = probe.slowest_per_s or rate, probe.fastest_per_s or rate
    return min(low, (1 - _LEAST_NOISE) * rate), max(high, (1 + _LEAST_NOISE) * rate)


def with_host_limit(folder: Path, spec: TrialSpec) -> tuple[TrialSpec, str]:
    """Add a memory limit to a CPU configuration that has none: the available memory of this host less a margin.

    A resumed fit keeps the limit of its first run, because its trials would otherwise not be comparable. The text says
    where the limit comes from; it is empty if the user gave the limit or there is none.
    """
    if spec.limits.memory_bytes is not None or not _is_on_cpu(spec):
        return spec, ""
    earlier = _earlier_limit(folder, spec)
    if earlier is not None:
        return _limited(spec, earlier), f"limit {byte_size(earlier)}, the same as in the first run of this fit"
    available = available_bytes()
    if available is None:
        raise InputError("the available memory of this host is unknown; give a limit, such as --memory 8GiB")
    limit = safe_limit_bytes(available)
    reason = f"limit {byte_size(limit)}: the {byte_size(available)} available on this host, less a margin"
    return _limited(spec, limit), reason


def _is_on_cpu(spec: TrialSpec) -> bool:
    return spec.device == "cpu" or (spec.device == "auto" and not visible_gpus())


def _limited(spec: TrialSpec, limit_bytes: int) -> TrialSpec:
    return replace(spec, limits=replace(spec.limits, memory_bytes=limit_bytes))


def _earlier_limit(folder: Path, spec: TrialSpec) -> int | None:
    """The memory limit of a trial in `folder` that equals `spec` except for batch size and limit; None without one."""
    for entry in read_trial_list(folder).trials.values():
        try:
            earlier = read_record(TrialSpec, entry.get("spec", {}))
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
    *,
    stop: Stop | None = None,
    observer: Observer | None = None,
    max_batch: int = MOST_BATCH,
    on_probe: Callable[[Probe], Any] = lambda probe: None,
) -> Found:
    """Find the largest and the fastest batch with real trials. Results of earlier runs in the folder are used again.

    The batch size of `spec` is not used. `on_probe` gets the result of each batch size, also of earlier runs.
    """

    def measure(batch_size: int) -> Probe:
        probe = probe_of(_result_of(folder, replace(spec, batch_size=batch_size), observer, stop or Stop()))
        on_probe(probe)
        return probe

    with held_folder(folder):
        return search(measure, max_batch)


def _result_of(folder: Path, spec: TrialSpec, observer: Observer | None, stop: Stop) -> TrialResult:
    plan = make_plan(folder, [spec])
    if any(result.outcome in FAILED for result in plan.kept.values()):
        plan = make_plan(folder, [spec], only="failed")  # its reason is not memory, and may be gone
    if plan.todo:
        limit, available = spec.limits.memory_bytes, available_bytes()
        if _is_on_cpu(spec) and limit is not None and available is not None and limit > available:
            raise InputError(
                f"the limit of {byte_size(limit)} is more than the {byte_size(available)} available on this host; "
                "free some memory, or give a smaller --memory and a new --output"
            )
        record_unlisted(folder, plan)
        write_trial_list(folder, plan.trials, "fit")
        run_plan(plan, LocalEngine(), observer, stop)
    trial = plan.trials[0]
    result = read_results(folder).get(trial.name)
    if result is None or result.key != trial.key:
        return TrialResult(trial.name, trial.key, trial.spec, "cancelled", "stopped before it began")
    return result


def probe_of(result: TrialResult) -> Probe:
    measured = result.measured
    times, rate = measured.steps, measured.samples_per_s
    return Probe(
        batch_size=result.spec.batch_size,
        fits=True if result.outcome == "ok" else False if result.outcome in OUT_OF_MEMORY else None,
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
