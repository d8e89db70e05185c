"""Finds the largest and the fastest batch of a configuration by running trials, in a folder with a sweep's files."""

import math
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
from flopwatch.sweep.runner.plan import Plan, make_plan, record_unlisted
from flopwatch.sweep.runner.run import Refusal, run_plan

# The search for the next batch size to try. It runs no trials itself.
#
# Memory is nearly an affine function of the batch size, so two small trials predict the largest batch that fits. Real
# trials just below and just above then verify the prediction. If memory is not affine, the search narrows the bracket
# between the largest batch that fitted and the smallest that did not. After two trials in a row that did not fit, it
# takes the middle of the bracket instead of a prediction.

TOLERANCE = 0.05
"""The search ends when the largest batch that fits is known up to this relative error."""

MOST_BATCH = 4096  # the default for the largest batch to try

_FIRST_BATCHES = (1, 8)
_MOST_GROWTH = 16
"""The next batch is at most this many times the largest that fitted, because far predictions are inaccurate."""

_NEAR_MISS = 1.1
"""A predicted largest batch counts as nearly right if it is at most this many times the smallest batch that did not
fit. Predictions are a little too high, because they assume that a trial can use all of the memory.
"""

_PATIENCE = 10
"""After this many trials the search no longer predicts: it doubles the batch until one does not fit, then bisects."""

_LEAST_NOISE = 0.02
"""Relative difference in throughput to expect between two processes, even if the steps within each are equally fast."""

_SPEED_PROBES = 2
_WORTHWHILE_GAP = 2.5
"""The search for the fastest batch tries a size between two tried sizes only if their ratio is larger than this."""


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
        probes_for_largest: The number of trials that it took to find `largest`.
        stopped: Why the search ended early; empty if it did not.
    """

    largest: int | None
    too_large: int | None
    is_largest_known: bool
    fastest: int | None
    as_fast: int | None
    probes: tuple[Probe, ...]
    probes_for_largest: int
    stopped: str = ""


def search(measure: Callable[[int], Probe], max_batch: int = MOST_BATCH, speed_probes: int = _SPEED_PROBES) -> Found:
    """Find the largest batch that fits, then the fastest.

    Args:
        measure: Runs a trial of one batch size.
        max_batch: The largest batch to try.
        speed_probes: How many further batches may be tried to find the fastest.

    >>> def measure(batch_size):
    ...     used = 300 + 10 * batch_size
    ...     return Probe(batch_size, used <= 1000, "ok" if used <= 1000 else "oom_host", "", used, 1000)
    >>> found = search(measure)
    >>> found.largest, found.too_large, len(found.probes)
    (70, 71, 4)
    """
    probes: list[Probe] = []
    for_speed = 0
    while not _why_stopped(probes):
        batch_size = next_for_largest(probes, max_batch)
        if batch_size is None and for_speed < speed_probes:
            batch_size = next_for_fastest(probes)
            for_speed += batch_size is not None
        if batch_size is None:
            break
        probes.append(measure(batch_size))
    fitting = _fitting(probes)
    fastest, as_fast = fastest_of(probes)
    return Found(
        largest=fitting[-1].batch_size if fitting else None,
        too_large=_too_large(probes),
        is_largest_known=next_for_largest(probes, max_batch) is None,
        fastest=fastest,
        as_fast=as_fast,
        probes=tuple(probes),
        probes_for_largest=len(probes) - for_speed,
        stopped=_why_stopped(probes),
    )


def _why_stopped(probes: Sequence[Probe]) -> str:
    if not probes or probes[-1].fits is not None:
        return ""
    last = probes[-1]
    return f"batch {last.batch_size}: {last.outcome}: {last.reason}".rstrip(": ")


def _too_large(probes: Sequence[Probe]) -> int | None:
    return min((probe.batch_size for probe in probes if probe.fits is False), default=None)


def _fitting(probes: Sequence[Probe]) -> list[Probe]:
    """The batches that fitted, sorted by size, up to the first that did not fit; larger ones fitted only by chance."""
    edge = _too_large(probes)
    fitting = [probe for probe in probes if probe.fits and (edge is None or probe.batch_size < edge)]
    return sorted(fitting, key=lambda probe: probe.batch_size)


def next_for_largest(probes: Sequence[Probe], max_batch: int) -> int | None:
    fitting = _fitting(probes)
    low = fitting[-1].batch_size if fitting else 0
    too_large = _too_large(probes)
    high = max_batch + 1 if too_large is None else too_large
    if high - low <= 1 or (too_large is not None and low >= (1 - TOLERANCE) * (high - 1)):
        return None
    # Two small batches give a first line. A third did not help (benchmarks/sweeps/fit_trials.py).
    guess = next((size for size in _FIRST_BATCHES if low < size < high), None)
    if guess is None and len(probes) > _PATIENCE:
        guess = 2 * low if too_large is None else _middle(low, too_large)
    elif guess is None and too_large is None:
        guess = _guess_above(fitting)
    elif guess is None:
        has_missed_twice = not any(probe.fits for probe in probes[-2:])
        guess = _middle(low, high) if has_missed_twice else _guess_between(fitting, high)
    return max(low + 1, min(guess, high - 1))


def _guess_above(fitting: Sequence[Probe]) -> int:
    low, edge = fitting[-1].batch_size, edge_of_line(fitting)
    if edge is None:
        return 4 * low
    just_closing = _just_closing(low)
    if edge >= just_closing:
        return min(edge, _MOST_GROWTH * low)
    # The line predicts that hardly any larger batch fits. Whenever a larger one fits, the next step is larger.
    surprises = sum(probe.batch_size >= 0.9 * low for probe in fitting) - 1
    return (min(edge + 1, just_closing), just_closing, 2 * low)[min(surprises, 2)]


def _just_closing(low: int) -> int:
    """The smallest batch that would end the search if it did not fit."""
    return math.floor(low / (1 - TOLERANCE)) + 1


def _guess_between(fitting: Sequence[Probe], too_large: int) -> int:
    """Guess a batch in the bracket: above the largest batch that fitted, and below `too_large`, which did not fit.

    If the prediction is slightly above the bracket, as when trials cannot use all of the capacity, the guess is the
    batch that would end the search if it fits. A prediction far above the bracket is ignored.
    """
    low, edge = fitting[-1].batch_size, edge_of_line(fitting)
    nearly = math.ceil((1 - TOLERANCE) * (too_large - 1))  # the search ends if this batch fits
    if edge is not None and edge < nearly:
        return max(edge, min(edge + 1, _just_closing(low)))
    is_near = edge is not None and edge <= _NEAR_MISS * too_large
    return nearly if is_near else _middle(low, too_large)


def _middle(low: int, high: int) -> int:
    """The geometric mean if the batches are far apart, because the tolerance is relative; else the arithmetic mean."""
    return round(math.sqrt(low * high)) if high > 4 * low > 0 else (low + high) // 2


def edge_of_line(fitting: Sequence[Probe]) -> int | None:
    """The largest batch that fits according to a line through the memory of the two largest that fitted.

    None if memory or capacity is unknown, or the line does not rise.

    >>> edge_of_line([Probe(size, True, "ok", "", 300 + 10 * size, 1000) for size in (1, 8)])
    70
    """
    capacity = next((probe.capacity_bytes for probe in reversed(fitting) if probe.capacity_bytes is not None), None)
    points = [(probe.batch_size, probe.peak_bytes) for probe in fitting if probe.peak_bytes is not None]
    if len(points) < 2 or capacity is None:
        return None
    (smaller, less), (size, peak) = points[-2:]
    slope = (peak - less) / (size - smaller)
    return max(0, math.floor(size + (capacity - peak) / slope + 1e-9)) if slope > 0 else None


def fastest_of(probes: Sequence[Probe]) -> tuple[int | None, int | None]:
    """The smallest batch that is not measurably slower than the fastest, and the next larger batch that was tried.

    The second is None if it is measurably slower than the first. Each is None if there is no such batch.
    """
    timed = [probe for probe in _fitting(probes) if probe.samples_per_s]
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


def next_for_fastest(probes: Sequence[Probe]) -> int | None:
    """The batch to try next: between the fastest batch so far and its neighbour among the tried batches.

    The neighbour is the next smaller batch, unless the next larger one is more than twice as far away (as a ratio).
    None if the neighbour is so close (`_WORTHWHILE_GAP`) that a trial in between is not worthwhile.
    """
    fastest, _ = fastest_of(probes)
    if fastest is None:
        return None
    sizes = [probe.batch_size for probe in _fitting(probes)]
    place = sizes.index(fastest)
    below, above = (sizes[max(0, place - 1)], fastest), (fastest, sizes[min(place + 1, len(sizes) - 1)])
    low, high = above if above[1] / above[0] > 2 * below[1] / below[0] else below
    return round(math.sqrt(low * high)) if high / low > _WORTHWHILE_GAP else None


def with_host_limit(folder: Path, spec: TrialSpec) -> tuple[TrialSpec, str]:
    """Add a memory limit to a CPU configuration that has none: the available memory of this host less a margin.

    A resumed fit keeps the limit of its first run, because its trials would otherwise not be comparable.

    Returns:
        The configuration, and where the limit comes from; empty if the user gave the limit or there is none.
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
    observer: Observer,
    *,
    stop: Stop | None = None,
    max_batch: int = MOST_BATCH,
    preflight: Callable[[Plan], Refusal] | None = None,
    on_probe: Callable[[Probe], Any] = lambda probe: None,
) -> Found:
    """Find the largest and the fastest batch with real trials. Results of earlier runs in the folder are used again.

    The batch size of `spec` is not used. `preflight` is called once, before the first trial that must run, and returns
    a function that returns why a trial cannot run. `on_probe` gets the result of each batch size, also of earlier runs.
    """
    stop = stop or Stop()
    refusals: list[Refusal] = []

    def measure(batch_size: int) -> Probe:
        own = replace(spec, batch_size=batch_size)
        plan = make_plan(folder, [own])
        if any(result.outcome in FAILED for result in plan.kept.values()):
            plan = make_plan(folder, [own], only="failed")  # its reason is not memory, and may be gone
        if plan.todo:
            limit, available = spec.limits.memory_bytes, available_bytes()
            if _is_on_cpu(spec) and limit is not None and available is not None and limit > available:
                raise InputError(
                    f"the limit of {byte_size(limit)} is more than the {byte_size(available)} available on this host; "
                    "free some memory, or give a smaller --memory and a new --output"
                )
            record_unlisted(folder, plan)
            write_trial_list(folder, plan.trials, "fit")
            if not refusals:
                refusals.append(preflight(plan) if preflight else lambda trial: None)
            run_plan(plan, LocalEngine(), observer, stop, refusals[0])
        trial = plan.trials[0]
        result = read_results(folder).get(trial.name)
        if result is None or result.key != trial.key:
            result = TrialResult(trial.name, trial.key, trial.spec, "cancelled", "stopped before it began")
        probe = probe_of(result)
        on_probe(probe)
        return probe

    with held_folder(folder):
        return search(measure, max_batch)


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
