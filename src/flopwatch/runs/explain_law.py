"""A step's FLOPs written out with the FLOP law: terms, their FLOPs each, and how many of them the step had.

The log holds samples and positions, not the length of each sample. Where all samples are equally long, that is enough.
Otherwise the number of pairs of positions is taken from the logged FLOPs, and marked as such.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

_PHASES = {"model": ("forward", "backward"), "hardware": ("forward", "backward", "recompute")}
_INDEPENDENT_OF_MICRO_BATCHES = {"samples", "positions", "pairs"}


@dataclass(frozen=True, slots=True)
class LawTerm:
    """`count` times `flops_each`, such as 4,096 positions of 7,168 FLOPs in the forward pass."""

    phase: str
    name: str
    count: int
    flops_each: str
    flops: int | float


@dataclass(frozen=True, slots=True)
class LawSum:
    """FLOPs as a sum of terms.

    Attributes:
        terms: What is added.
        flops: The sum; what the run logged.
        pairs_from_sum: True when the number of pairs was taken from the logged sum, for the log has no lengths.
    """

    terms: tuple[LawTerm, ...]
    flops: int
    pairs_from_sum: bool = False


def apply_law(law: Mapping[str, Mapping[str, str]], cells: Mapping[str, Any], which: str) -> LawSum | None:
    """Write out a step's `model` or `hardware` FLOPs; None where the cells do not tell how they come about.

    >>> law = {"forward": {"positions": "10", "pairs": "2"}, "backward": {"positions": "20", "pairs": "4"}}
    >>> apply_law(law, {"samples": 2, "tokens": 8, "model_flops": 432}, "model").terms[1]
    LawTerm(phase='forward', name='pairs', count=32, flops_each='2', flops=64)
    """
    flops = cells.get(f"{which}_flops")
    counts = _counts(cells, which)
    if flops is None or counts is None:
        return None
    coefficients = _coefficients(law, which)
    needed = {name for terms in coefficients.values() for name in terms}
    if needed <= set(counts) and _evaluated(coefficients, counts) == flops:
        return LawSum(_terms(coefficients, counts), flops)
    if "pairs" in needed <= _INDEPENDENT_OF_MICRO_BATCHES:
        return _with_pairs_from_sum(coefficients, counts, flops)
    return None


def add_up(sums: Sequence[LawSum | None]) -> LawSum | None:
    """The sum over several steps; None when one of them is not known."""
    known = [item for item in sums if item is not None]
    if not known or len(known) < len(sums):
        return None
    counts: dict[tuple[str, str, str], tuple[int, int | float]] = {}
    for term in (term for item in known for term in item.terms):
        key = (term.phase, term.name, term.flops_each)
        count, flops = counts.get(key, (0, 0))
        counts[key] = (count + term.count, flops + term.flops)
    terms = tuple(LawTerm(phase, name, count, each, flops) for (phase, name, each), (count, flops) in counts.items())
    return LawSum(terms, sum(item.flops for item in known), any(item.pairs_from_sum for item in known))


def _counts(cells: Mapping[str, Any], which: str) -> dict[str, int] | None:
    """How many of each term, if all samples have the same length. Model FLOPs leave padding out."""
    samples = cells.get("samples")
    positions = cells.get("real_tokens", cells.get("tokens")) if which == "model" else cells.get("tokens")
    if not samples:
        return None
    counts = {"samples": samples, "sample pairs": samples**2, "step": 1}
    if positions is not None:
        counts["positions"] = positions
        length, rest = divmod(positions, samples)
        if rest == 0:
            counts |= {"pairs": samples * length**2, "length": length, "length squared": length**2}
    return counts


def _coefficients(law: Mapping[str, Mapping[str, str]], which: str) -> dict[str, dict[str, Fraction]]:
    return {
        phase: {name: Fraction(each) for name, each in law.get(phase, {}).items() if Fraction(each) != 0}
        for phase in _PHASES[which]
    }


def _evaluated(coefficients: Mapping[str, Mapping[str, Fraction]], counts: Mapping[str, int]) -> Fraction:
    return sum((each * counts[name] for terms in coefficients.values() for name, each in terms.items()), Fraction(0))


def _with_pairs_from_sum(
    coefficients: Mapping[str, Mapping[str, Fraction]], counts: Mapping[str, int], flops: int
) -> LawSum | None:
    per_pair = sum((terms.get("pairs", Fraction(0)) for terms in coefficients.values()), Fraction(0))
    if "positions" not in counts or per_pair == 0:
        return None
    pairs = (flops - _evaluated(coefficients, {**counts, "pairs": 0})) / per_pair
    # A sample of n positions has n² pairs: never fewer than positions, and a whole number.
    if pairs.denominator != 1 or pairs < counts["positions"]:
        return None
    return LawSum(_terms(coefficients, {**counts, "pairs": int(pairs)}), flops, pairs_from_sum=True)


def _terms(coefficients: Mapping[str, Mapping[str, Fraction]], counts: Mapping[str, int]) -> tuple[LawTerm, ...]:
    return tuple(
        LawTerm(phase, name, counts[name], _as_text(each), _as_number(each * counts[name]))
        for phase, terms in coefficients.items()
        for name, each in terms.items()
    )


def _as_number(fraction: Fraction) -> int | float:
    return int(fraction) if fraction.denominator == 1 else float(fraction)


def _as_text(fraction: Fraction) -> str:
    """Decimal where that is exact.

    >>> _as_text(Fraction(5, 2)), _as_text(Fraction(5, 3))
    ('2.5', '5/3')
    """
    return str(_as_number(fraction)) if Fraction(float(fraction)) == fraction else str(fraction)
