"""Compares each row with our count: the FLOPs per token by the publisher's convention times the tokens per second."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from flopwatch.flops.conventions import CONVENTIONS
from published.cases import Case, Group, NotCompared, case_of
from published.counts import Counts
from published.rows import Row

BOUND = 0.005
UNEXPLAINED = "unexplained"


@dataclass(frozen=True, slots=True)
class Verdict:
    """A row and what became of it.

    Attributes:
        difference: Ours against the published figure, the larger one if the row has two readings.
        margin: How much the rounding of the published figure and of the tokens per second can make.
        reason: Why it was not compared, or why it is off; None if it is within the bound.
    """

    row: Row
    case: Case | None
    flops_per_token: float | None
    difference: float | None
    margin: float
    reason: str | None

    @property
    def is_within(self) -> bool:
        return self.difference is not None and abs(self.difference) <= BOUND


def verdicts(rows: Iterable[Row], counts: Counts) -> list[Verdict]:
    return [_verdict(row, counts) for row in rows]


def _verdict(row: Row, counts: Counts) -> Verdict:
    case = case_of(row)
    if isinstance(case, NotCompared) or row.tokens_per_s is None or row.published is None:
        why = case.why if isinstance(case, NotCompared) else "a figure is missing"
        return Verdict(row, None, None, None, 0.0, why)
    flops = case.flops_per_token(counts, row.length)
    readings = [(row.tokens_per_s, row.published), *row.readings]
    difference = max((_difference(row, flops, *reading) for reading in readings), key=abs)
    margin = row.half_digit / row.published + row.tokens_half / row.tokens_per_s
    reason = None if abs(difference) <= BOUND else _why_off(row, case, difference, margin, counts)
    return Verdict(row, case, flops, difference, margin, reason)


def _difference(row: Row, flops_per_token: float, tokens_per_s: float, published: float) -> float:
    rate = published if row.peak_tflops is None else published / 100 * row.peak_tflops
    return flops_per_token * tokens_per_s / 1e12 / rate - 1


def _why_off(row: Row, case: Case, difference: float, margin: float, counts: Counts) -> str:
    if row.is_rounded:
        return "the tokens per second of this release are rounded, all to multiples of 8"
    if abs(difference) <= BOUND + margin:
        return f"the published digits are rounded, by up to {margin:.2%}"
    if row.source == "MaxText" and row.published is not None and row.tokens_per_s is not None:
        full = counts.of(case.model, row.length, "full").flops
        with_all_pairs = _difference(row, full, row.tokens_per_s, row.published)
        if abs(with_all_pairs) <= BOUND:
            return f"an older row that counts all pairs, by its figure: {with_all_pairs:+.2%} so"
        return f"{UNEXPLAINED}; with all pairs {with_all_pairs:+.2%}"
    return case.why_off or UNEXPLAINED


@dataclass(frozen=True, slots=True)
class Tally:
    """How many rows of a group were compared, and how they came out; rows that stand in two files count once."""

    rows: int
    compared: int
    unrounded: int
    within: int
    unrounded_within: int
    worst: Verdict | None


def tally(some: Sequence[Verdict]) -> Tally:
    once = [each for each in some if not each.row.is_repeated]
    compared = [each for each in once if each.difference is not None]
    unrounded = [each for each in compared if not each.row.is_rounded]
    return Tally(
        len(once),
        len(compared),
        len(unrounded),
        sum(each.is_within for each in compared),
        sum(each.is_within for each in unrounded),
        max(unrounded, key=lambda each: abs(each.difference or 0), default=None),
    )


def of_group(some: Iterable[Verdict], group: Group | None) -> list[Verdict]:
    """The rows of a group; those that were not compared if it is None."""
    return [each for each in some if (None if each.case is None else each.case.group) == group]


def attention_of(case: Case) -> str:
    return CONVENTIONS[case.convention].attention
