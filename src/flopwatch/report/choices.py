"""What to run: per sequence length and privacy class, decided only where the measurement decides. Pure.

A private trainer is never weighed against one that is not: the second gives no privacy, however fast.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from flopwatch.report.crossovers import PROCESS_NOISE
from flopwatch.report.records import Cell, Choice, Privacy

NEAR = 0.9
"""Within 10 % of the fastest."""
_CLASSES: tuple[Privacy, ...] = ("not private", "private", "unknown")


def choose(cells: Iterable[Cell]) -> tuple[Choice, ...]:
    """One choice per sequence length and class that has anything that ran and was timed."""
    places = _by_place(cell for cell in cells if cell.samples_per_s is not None)
    return tuple(_choice(*place, members) for place, members in sorted(places.items(), key=_in_order))


def pareto_trials(cells: Iterable[Cell]) -> tuple[str, ...]:
    """Names of the trials that nothing of the same class and sequence length beats in both memory and throughput."""
    places = _by_place(cell for cell in cells if cell.samples_per_s is not None and cell.peak_bytes is not None)
    best: list[str] = []
    for members in places.values():
        most = 0.0
        for cell in sorted(members, key=lambda cell: (cell.peak_bytes or 0, -(cell.samples_per_s or 0))):
            if (cell.samples_per_s or 0) > most:
                most = cell.samples_per_s or 0
                best.append(cell.trial)
    return tuple(best)


def throughput_interval(cell: Cell) -> tuple[float, float] | None:
    """Samples per second at the ends of the interval of the median; None when steps were not timed."""
    if not (cell.samples_per_s and cell.seconds and cell.low_seconds and cell.high_seconds):
        return None
    # A command may tell a rate of its own, such as that of four devices.
    samples = cell.samples_per_s * cell.seconds
    return samples / cell.high_seconds, samples / cell.low_seconds


def _choice(seq_len: int, privacy: Privacy, members: Sequence[Cell]) -> Choice:
    ranked = sorted(members, key=lambda cell: (-(cell.samples_per_s or 0), cell.peak_bytes or 0))
    fastest = ranked[0]
    near = [
        cell
        for cell in ranked
        if cell.peak_bytes is not None and (cell.samples_per_s or 0) >= NEAR * (fastest.samples_per_s or 0)
    ]
    return Choice(
        seq_len,
        privacy,
        fastest,
        tied=tuple(cell for cell in ranked[1:] if _overlap(fastest, cell)),
        lightest=min(near, key=lambda cell: cell.peak_bytes or 0) if near else None,
        candidates=len(members),
    )


def _overlap(fastest: Cell, other: Cell) -> bool:
    best, interval = throughput_interval(fastest), throughput_interval(other)
    if best is None or interval is None:  # without an interval nothing is decided
        return (other.samples_per_s or 0) >= NEAR * (fastest.samples_per_s or 0)
    return interval[1] * (1 + PROCESS_NOISE) >= best[0] * (1 - PROCESS_NOISE)


def _by_place(cells: Iterable[Cell]) -> dict[tuple[int, Privacy], list[Cell]]:
    places: dict[tuple[int, Privacy], list[Cell]] = defaultdict(list)
    for cell in cells:
        places[cell.seq_len, cell.privacy].append(cell)
    return places


def _in_order(place: tuple[tuple[int, Privacy], list[Cell]]) -> tuple[int, int]:
    (seq_len, privacy), _ = place
    return seq_len, _CLASSES.index(privacy)
