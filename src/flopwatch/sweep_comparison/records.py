"""What a comparison of two sweeps knows: frozen records that the terminal, Markdown and JSON draw from."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

Quantity: TypeAlias = Literal["time", "samples_per_s", "memory", "mfu"]
Verdict: TypeAlias = Literal["better", "worse", "not told apart", "too few steps"]


@dataclass(frozen=True, slots=True)
class Ratio:
    """One quantity of a pair.

    Attributes:
        a: Seconds of the median step, samples per second, peak bytes, or MFU as a fraction, in A.
        b: The same in B.
        ratio: b / a.
        low: The least the two 95 % intervals allow; None where there is none (memory, fewer than 6 steps).
        high: The most they allow.
        verdict: `better` or `worse` only where the measurement decides: the intervals, each widened by the 2 % that two
            processes differ by, do not overlap; peaks of memory differ by more than 1 %.
    """

    a: float
    b: float
    ratio: float
    low: float | None
    high: float | None
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Difference:
    """Attributes:
    what: A setting, or a fact of where trials ran.
    a: In A; None when it is not known.
    b: In B.
    """

    what: str
    a: str | None
    b: str | None


@dataclass(frozen=True, slots=True)
class Pair:
    """One configuration that is in both sweeps.

    Attributes:
        trial: Its name in A.
        trial_b: Its name in B.
        trainer: As it stands in tables, of A.
        outcome_a: How it ended in A, or `missing`.
        outcome_b: How it ended in B.
        reason_a: One line, of A.
        reason_b: One line, of B.
        ratios: By quantity; empty unless both are `ok`.
        differences: Settings in which just this pair differs: found by name and not by settings.
        is_unstable: The interval of one of the two times is wider than 5 % of it: something disturbed the machine, and
            may have disturbed the other trial in another way.
    """

    trial: str
    trial_b: str
    trainer: str
    outcome_a: str
    outcome_b: str
    reason_a: str
    reason_b: str
    ratios: Mapping[Quantity, Ratio]
    differences: tuple[Difference, ...] = ()
    is_unstable: bool = False


@dataclass(frozen=True, slots=True)
class Overall:
    """One quantity over many pairs.

    Attributes:
        pairs: In how many it is known on both sides.
        mean_ratio: Geometric mean of b / a.
        better: Pairs in which B is better by measurement.
        worse: Pairs in which it is worse by measurement.
        undecided: Pairs that measurement does not tell apart, or that have too few steps.
    """

    pairs: int
    mean_ratio: float
    better: int
    worse: int
    undecided: int


@dataclass(frozen=True, slots=True)
class Side:
    """Attributes:
    folder: Of the sweep.
    trials: Asked for.
    by_outcome: How many ended how.
    """

    folder: str
    trials: int
    by_outcome: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class SweepComparison:
    """Attributes:
    a: The sweep before.
    b: The sweep after.
    settings: What all of A has in one way and all of B in another; trials are paired without it.
    environment: What differs in where trials ran.
    pairs: Configurations in both, in A's order.
    overall: By quantity, over all pairs.
    by_trainer: The same for each trainer.
    only_a: Names of trials whose configuration B does not have.
    only_b: Names of trials whose configuration A does not have.
    notes: What a reader must know.
    """

    a: Side
    b: Side
    settings: tuple[Difference, ...]
    environment: tuple[Difference, ...]
    pairs: tuple[Pair, ...]
    overall: Mapping[Quantity, Overall]
    by_trainer: Mapping[str, Mapping[Quantity, Overall]]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def changed_outcomes(self) -> tuple[Pair, ...]:
        """Pairs that ended in another way."""
        return tuple(pair for pair in self.pairs if pair.outcome_a != pair.outcome_b)
