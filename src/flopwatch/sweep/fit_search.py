"""Which batch to try next, to find the largest that fits and the fastest in few trials. Pure arithmetic.

Memory is nearly affine in the batch, so two small trials predict the edge; the prediction is then verified by real
trials on both sides of it. Where memory is not affine, the bracket between what fitted and what did not is narrowed.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from flopwatch.records.trial import Outcome

# Curves through peaks of memory over the batch, and the largest batch at which each stays within a capacity.


Point: TypeAlias = tuple[int, int]
"""Batch size and bytes; points are sorted by batch size."""


def edge_of_line(points: Sequence[Point], capacity: int) -> int | None:
    """Of the straight line; None while it does not rise.

    Least squares, each batch with its own size squared as weight: the large ones are nearest the edge.

    >>> edge_of_line([(1, 310), (8, 380)], 1000)
    70
    """
    if len(points) < 2:
        return None
    total = sum(size**2 for size, _ in points)
    mean_size = sum(size**3 for size, _ in points) / total
    mean_peak = sum(size**2 * peak for size, peak in points) / total
    spread = sum(size**2 * (size - mean_size) ** 2 for size, _ in points)
    slope = sum(size**2 * (size - mean_size) * (peak - mean_peak) for size, peak in points) / spread
    if slope <= 0:
        return None
    return max(0, math.floor(mean_size + (capacity - mean_peak) / slope + 1e-9))


def edge_of_parabola(points: Sequence[Point], capacity: int) -> int | None:
    """Of the parabola through the three largest; None unless it bends upwards.

    >>> edge_of_parabola([(size, 100 + 3 * size + size**2) for size in (1, 8, 20)], 100 + 3 * 50 + 50**2)
    50
    """
    if len(points) < 3:
        return None
    (x0, y0), (x1, y1), (x2, y2) = points[-3:]
    slope01, slope12 = (y1 - y0) / (x1 - x0), (y2 - y1) / (x2 - x1)
    bend = (slope12 - slope01) / (x2 - x0)
    if bend <= 0:
        return None
    # y = y2 + slope (x - x2) + bend (x - x2)^2, solved for the capacity above x2
    slope = slope12 + bend * (x2 - x1)
    root = slope**2 + 4 * bend * (capacity - y2)
    return math.floor(x2 + (math.sqrt(root) - slope) / (2 * bend) + 1e-9) if root >= 0 else None


TOLERANCE = 0.05
"""The largest batch is found when nothing more than this much larger could fit."""

MOST_BATCH = 4096

_FIRST_BATCHES = (1, 8)
_MOST_GROWTH = 16
"""A line through small batches says little about one many times as large."""

_NEAR_MISS = 1.1
_PATIENCE = 8
"""After so many trials the curves had their chance, and the bracket is halved."""

_LEAST_NOISE = 0.02
"""Of a throughput: two processes differ by so much even where the steps within each agree."""

_SPEED_PROBES = 2
_WORTHWHILE_GAP = 2.5


@dataclass(frozen=True, slots=True)
class Probe:
    """One batch size, tried.

    Attributes:
        batch_size: Samples per step.
        fits: None when it failed for another reason than memory, which says nothing.
        outcome: Of the trial.
        reason: Why it did not succeed.
        peak_bytes: Most memory held; None when not known.
        capacity_bytes: What it was held against; None when not known.
        samples_per_s: From the median step.
        slowest_per_s: From the high end of the step's interval.
        fastest_per_s: From its low end.
        step_seconds: Median.
        is_bare: It fitted only after the allocator had given memory back.
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
    """What a search found.

    Attributes:
        largest: Largest batch that was seen to fit; None when not even 1 did.
        too_large: Smallest that was seen not to; None when all fitted.
        is_largest_known: Whether the two are close enough, or everything up to the most that may be tried fits.
        fastest: Smallest batch whose throughput cannot be told from the best; None without times.
        as_fast: The next larger batch that was tried and is not measurably faster; None when there is none.
        probes: All that was tried, in order.
        probes_for_largest: How many of them it took to find the largest.
        stopped: Why the search ended early; empty when it did not.
    """

    largest: int | None
    too_large: int | None
    is_largest_known: bool
    fastest: int | None
    as_fast: int | None
    probes: tuple[Probe, ...]
    probes_for_largest: int
    stopped: str = ""


def search(
    measure: Callable[[int], Probe],
    max_batch: int = MOST_BATCH,
    tolerance: float = TOLERANCE,
    speed_probes: int = _SPEED_PROBES,
) -> Found:
    """Find the largest batch that fits, then the fastest.

    Args:
        measure: Tries one batch size.
        max_batch: Nothing larger is tried.
        tolerance: How much larger than the answer the true largest may be, as a share.
        speed_probes: How many more batches may be tried for the fastest.

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
        batch_size = next_for_largest(probes, max_batch, tolerance)
        if batch_size is None and for_speed < speed_probes:
            batch_size = next_for_fastest(probes)
            for_speed += batch_size is not None
        if batch_size is None:
            break
        probes.append(measure(batch_size))
    return _found(probes, for_speed, is_largest_known=next_for_largest(probes, max_batch, tolerance) is None)


def _found(probes: Sequence[Probe], for_speed: int, *, is_largest_known: bool) -> Found:
    fitting = _fitting(probes)
    fastest, as_fast = fastest_of(probes)
    return Found(
        largest=fitting[-1].batch_size if fitting else None,
        too_large=_too_large(probes),
        is_largest_known=is_largest_known,
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
    """By size. What lies above a batch that did not fit was luck and counts for nothing."""
    edge = _too_large(probes)
    fitting = [probe for probe in probes if probe.fits and (edge is None or probe.batch_size < edge)]
    return sorted(fitting, key=lambda probe: probe.batch_size)


def next_for_largest(probes: Sequence[Probe], max_batch: int, tolerance: float = TOLERANCE) -> int | None:
    """The batch to try next; None when the largest is known well enough."""
    fitting = _fitting(probes)
    low = fitting[-1].batch_size if fitting else 0
    too_large = _too_large(probes)
    high = max_batch + 1 if too_large is None else too_large
    if high - low <= 1 or (too_large is not None and low >= (1 - tolerance) * (high - 1)):
        return None
    guess = _first_batch(low, high) or _guess(probes, fitting, too_large, tolerance)
    return max(low + 1, min(guess, high - 1))


def _first_batch(low: int, high: int) -> int | None:
    """Small ones to draw a line through. A third one between them saved no trial on any kind of curve."""
    return next((size for size in _FIRST_BATCHES if low < size < high), None)


def _guess(probes: Sequence[Probe], fitting: Sequence[Probe], too_large: int | None, tolerance: float) -> int:
    low, is_patient = fitting[-1].batch_size, len(probes) <= _PATIENCE
    if too_large is None:
        return _guess_above(fitting, tolerance) if is_patient else 2 * low
    if not is_patient:
        return _middle(low, too_large)
    return _guess_between(fitting, too_large, _misses_since_a_fit(probes), tolerance)


def _guess_above(fitting: Sequence[Probe], tolerance: float) -> int:
    low, edge = fitting[-1].batch_size, _edge(edge_of_line, fitting)
    just_closing = _just_closing(low, tolerance)
    if edge is None:
        return 4 * low
    if edge >= just_closing:
        return min(edge, _MOST_GROWTH * low)
    # The line ends here. Trust it less each time something beyond its end fits after all.
    surprises = sum(probe.batch_size >= 0.9 * low for probe in fitting) - 1
    return (min(edge + 1, just_closing), just_closing, 2 * low)[min(surprises, 2)]


def _just_closing(low: int, tolerance: float) -> int:
    """Were this one too large, the search would be over."""
    return math.floor(low / (1 - tolerance)) + 1


def _guess_between(fitting: Sequence[Probe], too_large: int, misses: int, tolerance: float) -> int:
    """The line first, after two misses the parabola, after three halves.

    A curve is believed where it ends inside; where it ends a little beyond, some of the capacity cannot be used.
    """
    low = fitting[-1].batch_size
    nearly = math.ceil((1 - tolerance) * (too_large - 1))  # were this one to fit, the search would be over
    if low >= (1 - tolerance) * (nearly - 1):
        return nearly  # it is over either way
    curves = {2: (edge_of_parabola, edge_of_line)}.get(misses, (edge_of_line, edge_of_parabola))
    for edge in (_edge(curve, fitting) for curve in curves if misses <= 2):
        if edge is not None and edge < nearly:
            return max(edge, min(edge + 1, _just_closing(low, tolerance)))
        if edge is not None and edge <= _NEAR_MISS * too_large:
            return nearly
    return _middle(low, too_large)


def _misses_since_a_fit(probes: Sequence[Probe]) -> int:
    since = 0
    for probe in reversed(probes):
        if probe.fits:
            break
        since += 1
    return since


def _middle(low: int, high: int) -> int:
    """By ratio while they are far apart, since the answer is wanted to a share of itself."""
    return round(math.sqrt(low * high)) if high > 4 * low > 0 else (low + high) // 2


def _edge(curve: Callable[[Sequence[Point], int], int | None], fitting: Sequence[Probe]) -> int | None:
    """Where this curve through the peaks meets the capacity; None when they are not known."""
    points = [(probe.batch_size, probe.peak_bytes) for probe in fitting if probe.peak_bytes is not None]
    capacity = next((probe.capacity_bytes for probe in reversed(fitting) if probe.capacity_bytes is not None), None)
    return None if capacity is None else curve(points, capacity)


def fastest_of(probes: Sequence[Probe]) -> tuple[int | None, int | None]:
    """The smallest batch whose throughput cannot be told from the best, and the next larger one if it is as fast."""
    timed = [probe for probe in _fitting(probes) if probe.samples_per_s]
    if not timed:
        return None, None
    surely = max(_reach(probe)[0] for probe in timed)
    place = next(index for index, probe in enumerate(timed) if _reach(probe)[1] >= surely)
    larger = timed[place + 1] if place + 1 < len(timed) else None
    is_as_fast = larger is not None and _reach(larger)[1] >= _reach(timed[place])[0]
    return timed[place].batch_size, larger.batch_size if larger is not None and is_as_fast else None


def _reach(probe: Probe) -> tuple[float, float]:
    """Between which rates the true one lies."""
    rate = probe.samples_per_s or 0.0
    low, high = probe.slowest_per_s or rate, probe.fastest_per_s or rate
    return min(low, (1 - _LEAST_NOISE) * rate), max(high, (1 + _LEAST_NOISE) * rate)


def next_for_fastest(probes: Sequence[Probe]) -> int | None:
    """The middle of the gap below the fastest so far, or above it if that is far wider; None when both are narrow."""
    fastest, _ = fastest_of(probes)
    if fastest is None:
        return None
    sizes = [probe.batch_size for probe in _fitting(probes)]
    place = sizes.index(fastest)
    below, above = (sizes[max(0, place - 1)], fastest), (fastest, sizes[min(place + 1, len(sizes) - 1)])
    low, high = above if above[1] / above[0] > 2 * below[1] / below[0] else below
    return round(math.sqrt(low * high)) if high / low > _WORTHWHILE_GAP else None
