"""Conclusions from the measurements of comparable trials: what to run, and the limits of memory.

What to run is decided for each sequence length, separately for private and not private trainers, because a faster
trainer that is not private does not replace a private one. For the same reason, a private trainer whose epsilon is
unknown is chosen only if no other one has a known epsilon.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from math import inf
from typing import TypeAlias

from flopwatch.language import Said
from flopwatch.records.trial import FEWEST_STEPS, OUT_OF_MEMORY
from flopwatch.report.records import Choice, FrontierPoint, PrivacyClass, Quantity, TrialCell
from flopwatch.stats import differ
from flopwatch.text import listed

TIME_NOISE = (0.98 / 1.02, 1.02 / 0.98)
"""Ratios of two step times that mean nothing: each differs by up to 2 % between processes that run the same trial."""
MEMORY_NOISE = (1 / 1.01, 1.01)
"""Ratios of two memory peaks that are treated as equal."""


def differ_measurably(first: TrialCell, second: TrialCell, quantity: Quantity) -> bool:
    """Whether the 95 % intervals do not overlap after widening by 2 %; for memory, whether peaks differ by over 1 %."""
    interval, noise = ratio_interval(time_interval(first), time_interval(second)), TIME_NOISE
    if quantity == "memory":
        ratio = (second.peak_bytes or 0) / (first.peak_bytes or 1)
        interval, noise = (ratio, ratio), MEMORY_NOISE
    return differ(interval, noise, "less", "more") in ("less", "more")


Interval: TypeAlias = tuple[float, float] | None


def time_interval(cell: TrialCell) -> Interval:
    return (cell.low_seconds, cell.high_seconds) if cell.low_seconds and cell.high_seconds else None


def rate_interval(cell: TrialCell, rate: float | None) -> Interval:
    """Return the 95 % interval of a rate that is inverse to the step time, such as samples per second and MFU."""
    times = time_interval(cell)
    return (rate * cell.seconds / times[1], rate * cell.seconds / times[0]) if rate and cell.seconds and times else None


def ratio_interval(a: Interval, b: Interval) -> Interval:
    return (b[0] / a[1], b[1] / a[0]) if a and b else None


NEAR = 0.9
"""The trial with the least memory is chosen among those with at least this share of the highest throughput."""
_MOST_LEFT_OUT = 16


def choose(cells: Iterable[TrialCell]) -> tuple[Choice, ...]:
    places = _by_place(cells)
    return tuple(_choice(*place, places[place]) for place in sorted(places))


def _with_epsilon(cells: Iterable[TrialCell]) -> list[TrialCell]:
    """The cells without those whose epsilon is unknown or infinite; all of them if none has an epsilon."""
    members = list(cells)
    return [cell for cell in members if not cell.why_no_epsilon] or members


def _choice(seq_len: int, privacy: PrivacyClass, members: Sequence[TrialCell]) -> Choice:
    known = _with_epsilon(members)
    left_out = [cell for cell in members if cell.why_no_epsilon] if len(known) < len(members) else []
    ranked = sorted(known, key=lambda cell: (-(cell.samples_per_s or 0), cell.peak_bytes or 0))
    equal = [ranked[0], *(cell for cell in ranked[1:] if _overlap(ranked[0], cell))]
    fastest = min(equal, key=_epsilon)  # of equal ones, `min` takes the fastest
    tied = tuple(cell for cell in equal if cell is not fastest)
    others = [cell for cell in ranked if cell is not fastest]
    lighter = [
        cell
        for cell in others
        if cell.peak_bytes and fastest.peak_bytes and cell.peak_bytes < fastest.peak_bytes and _is_near(ranked[0], cell)
    ]
    lightest = min(lighter, key=lambda cell: cell.peak_bytes or 0, default=None)
    verdict, caveats = _verdict(fastest, tied, len(ranked)), tuple(_caveats(fastest, others, left_out))
    return Choice(seq_len, privacy, fastest, tied, lightest, len(ranked), verdict, caveats)


def _epsilon(cell: TrialCell) -> float:
    """Epsilon with two digits, because a search for the same target ends at slightly different values."""
    return inf if cell.epsilon is None else float(f"{cell.epsilon:.2g}")


def _verdict(fastest: TrialCell, tied: Sequence[TrialCell], candidates: int) -> str:
    if not tied:
        return Said("the only one that ran") if candidates == 1 else Said("the fastest of {all}", all=candidates)
    # Name other trainers first, because they are more interesting than other batch sizes of the same trainer.
    others = [configuration(cell) for cell in sorted(tied, key=lambda cell: cell.trainer == fastest.trainer)]
    one, rivals = configuration(fastest), listed(others, 2)
    said = Said("no measurable difference between {one} and {rivals}")
    if _epsilon(fastest) < max(map(_epsilon, tied)):
        said = Said(
            "no measurable difference between {one} and {rivals}; none of them has a smaller epsilon than {one}"
        )
    return said.filled(one=one, rivals=rivals)


def _caveats(fastest: TrialCell, others: Sequence[TrialCell], left_out: Sequence[TrialCell]) -> Iterator[str]:
    if fastest.why_no_epsilon:
        yield fastest.why_no_epsilon
    if left_out:
        # A trainer may have an epsilon with some batch sizes only: a batch can be larger than the data set.
        kept = {cell.trainer for cell in (fastest, *others)}
        names = dict.fromkeys(configuration(cell) if cell.trainer in kept else cell.trainer for cell in left_out)
        left = Said("left out, because their epsilon is unknown or infinite: {names}")
        yield left.filled(names=listed(list(names), _MOST_LEFT_OUT))
    if fastest.alloc_retries:
        yield Said("barely fits into memory: the allocator had to free its cache to make room")
    if unstable := sum(cell.is_unstable for cell in others):
        several = Said("{unstable} of {all} step times are unstable")
        if fastest.is_unstable:
            several = Said("{unstable} of {all} step times are unstable, its own too")
        yield several.filled(unstable=unstable + fastest.is_unstable, all=1 + len(others))
    elif fastest.is_unstable:
        yield Said("its step time is unstable")
    if others and time_interval(fastest) is None:
        without = Said(
            "it has no 95 % interval (fewer than {fewest} step times), so differences below 10 % do not count"
        )
        yield without.filled(fewest=FEWEST_STEPS)


def configuration(cell: TrialCell) -> str:
    return Said("{trainer} batch {size}", trainer=cell.trainer, size=cell.batch_size)


def _overlap(fastest: TrialCell, other: TrialCell) -> bool:
    best, interval = (rate_interval(cell, cell.samples_per_s) for cell in (fastest, other))
    if best is None or interval is None:  # Without intervals, trials within 10 % are treated as equally fast.
        return _is_near(fastest, other)
    return differ(ratio_interval(interval, best), TIME_NOISE, "slower", "faster") != "faster"


def _is_near(fastest: TrialCell, other: TrialCell) -> bool:
    return (other.samples_per_s or 0) >= NEAR * (fastest.samples_per_s or 0)


def _by_place(cells: Iterable[TrialCell]) -> dict[tuple[int, PrivacyClass], list[TrialCell]]:
    places: dict[tuple[int, PrivacyClass], list[TrialCell]] = defaultdict(list)
    for cell in cells:
        if cell.samples_per_s is not None:
            places[cell.seq_len, cell.privacy].append(cell)
    return places


def frontier(cells: Iterable[TrialCell]) -> Iterator[FrontierPoint]:
    places: dict[tuple[str, int], list[TrialCell]] = defaultdict(list)
    for cell in cells:
        places[cell.trainer, cell.seq_len].append(cell)
    for place, members in places.items():
        ran = [cell.batch_size for cell in members if cell.outcome == "ok"]
        too_large = {cell.batch_size: cell.outcome for cell in members if cell.outcome in OUT_OF_MEMORY}
        largest_ok, smallest_oom = max(ran, default=None), min(too_large, default=None)
        yield FrontierPoint(
            *place,
            largest_ok,
            smallest_oom,
            is_inferred=smallest_oom is not None and too_large[smallest_oom] == "oom_inferred",
            is_monotone=largest_ok is None or smallest_oom is None or largest_ok < smallest_oom,
        )
