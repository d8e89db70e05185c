"""The FLOP law: a formula that gives the exact FLOPs of a step from the batch's shape, without counting the step.

In a transformer, n samples of S positions cost n·(a + b·S + c·S²) FLOPs, because projections grow with the number of
positions and attention with the number of pairs. A contrastive loss compares all pairs of samples and adds a term in
n². Work that does not depend on the batch size (position embeddings) adds a polynomial in S. Each image of t frames of
h x w patches adds α + β·t·h·w + γ·t·(h·w)². For models that cut the sequence into chunks or windows no polynomial is
exact, so each of their shapes is counted.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import prod
from typing import Any

from flopwatch.errors import InputError
from flopwatch.flops.batch_layout import LENGTHS, SAMPLES, Grid, Layout
from flopwatch.records.flops import AttentionConvention, Method, PhaseFlops


@dataclass(frozen=True, slots=True)
class StepShape:
    """The sizes of a batch on which the FLOPs of a step depend.

    The main sequence may be missing; `others` are those of a decoder's target and so on, by the name of their variable.
    """

    batch_size: int
    seq_len: int | None = None
    grids: tuple[Grid, ...] = ()
    others: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of(cls, values: Mapping[str, int], grids: tuple[Grid, ...] = ()) -> "StepShape":
        others = tuple((name, values[name]) for name in LENGTHS[1:] if name in values)
        return cls(values.get(SAMPLES, 1), values.get("s"), grids, others)

    @property
    def values(self) -> dict[str, int]:
        main = {} if self.seq_len is None else {"s": self.seq_len}
        return {SAMPLES: self.batch_size, **main, **dict(self.others)}


# The named terms of a FLOP formula, with their exponents of n (samples) and s (length of the main sequence). Terms
# with other lengths are named after their variables, such as `n*s*t`.
_EXPONENTS: Mapping[str, Mapping[str, int]] = {
    "samples": {"n": 1},
    "positions": {"n": 1, "s": 1},
    "pairs": {"n": 1, "s": 2},
    "sample pairs": {"n": 2},
    "step": {},
    "length": {"s": 1},
    "length squared": {"s": 2},
}
_NAMES = {tuple(sorted(powers.items())): name for name, powers in _EXPONENTS.items()}

IMAGE_TERMS: Mapping[str, Callable[[Sequence[Grid]], int]] = {
    "images": len,
    "patches": lambda grids: sum(t * h * w for t, h, w in grids),
    "patch pairs": lambda grids: sum(t * (h * w) ** 2 for t, h, w in grids),
}

PHASES = ("forward", "backward", "recompute")


def term_name(exponents: Mapping[str, int]) -> str:
    """Return the name of a term, a product of powers of variables. Some terms have a name in words, such as `pairs`.

    >>> term_name({"n": 1, "s": 2}), term_name({"n": 1, "s": 1, "t": 1})
    ('pairs', 'n*s*t')
    """
    powers = {name: power for name, power in exponents.items() if power}
    known = _NAMES.get(tuple(sorted(powers.items())))
    return known or "*".join(name for name in sorted(powers) for _ in range(powers[name]))


def exponents_of(term: str) -> dict[str, int]:
    if term in _EXPONENTS:
        return dict(_EXPONENTS[term])
    factors = term.split("*")
    return {name: factors.count(name) for name in factors}


def term_value(term: str, shape: StepShape) -> int:
    if term in IMAGE_TERMS:
        return IMAGE_TERMS[term](shape.grids)
    return _product(shape.values, exponents_of(term))


def _product(values: Mapping[str, int], powers: Mapping[str, int]) -> int:
    return prod(int(values.get(name, 0) ** power) for name, power in powers.items())


@dataclass(frozen=True, slots=True)
class Documents:
    """The number of packed documents and the sums of their lengths and squared lengths, which determine the FLOPs."""

    count: int
    tokens: int
    squares: int

    @classmethod
    def of_lengths(cls, lengths: Sequence[int]) -> "Documents":
        return cls(len(lengths), sum(lengths), sum(length * length for length in lengths))


@dataclass(frozen=True)
class FlopLaw:
    """A formula for the FLOPs of a step, for all batches that differ from the example only in variable sizes.

    Attributes:
        exact: True if the formula gave the exact FLOPs of every held-out shape and of the example, the counts leave
            nothing out and estimate nothing, and neither tensor values nor random draws change the FLOPs. This applies
            to shapes inside `domain`; `exact_for` answers for any shape.
        seq_lens: The shortest and longest length that was verified; None for a model without a text sequence.
        attention: How attention was counted: `full` or `causal`.
        coefficients: FLOPs per term, for each phase; empty if no formula holds and each shape is counted when needed.
        sample_grids: The image grids of one sample of the example, used for every sample if no grids are given.
        method: How the counts were made.
        coverage: The share of matmul-like op calls that had a formula; None if no op was seen.
        notes: Sentences about the limits of the formula.
        layout: Which sizes of the batch are variables; all others must be the same as in the example.
        domain: The least and greatest value of each variable that was verified.
        doubts: Reasons why the counts are not exact; empty if they are.
        per_batch: True if tensor values or random draws change the FLOPs, so that each batch has to be counted.
    """

    exact: bool
    seq_lens: tuple[int, int] | None
    attention: AttentionConvention
    coefficients: Mapping[str, Mapping[str, Fraction]] = field(default_factory=dict)
    sample_grids: tuple[Grid, ...] = ()
    notes: tuple[str, ...] = ()
    method: Method = "trace"
    coverage: float | None = None
    count_shape: Callable[[StepShape], PhaseFlops] | None = field(default=None, repr=False)
    layout: Layout | None = field(default=None, repr=False)
    domain: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    doubts: tuple[str, ...] = ()
    per_batch: bool = False

    def model_flops(
        self,
        batch_size: int | None = None,
        seq_len: int | None = None,
        *,
        lengths: Sequence[int] | None = None,
        image_grids: Sequence[Grid] | None = None,
    ) -> int:
        """Return the FLOPs that a step needs, without recomputation. A shape outside `domain` is counted.

        Args:
            batch_size: Samples in the batch.
            seq_len: Positions of each sample; leave it out for a model without a text sequence.
            lengths: The real length of each sample of a padded or packed batch; pass it instead of the first two.
            image_grids: (frames, rows, columns) of patches of every image in the batch; by default, every sample has
                the images of the example.
        """
        if lengths is not None:
            return self._sum_of_samples(batch_size, seq_len, lengths, image_grids)
        cost = self.cost(self._shape(batch_size, seq_len, image_grids))
        return cost.forward + cost.backward

    def hardware_flops(
        self, batch_size: int, seq_len: int | None = None, *, image_grids: Sequence[Grid] | None = None
    ) -> int:
        """Return the FLOPs that a step of this shape executes, recomputation and padding included."""
        return self.cost(self._shape(batch_size, seq_len, image_grids)).total

    def exact_for(self, batch_size: int, seq_len: int | None = None) -> bool:
        """Return whether this shape's FLOPs are exact: the shape lies inside `domain`, or `count_shape` can count it.

        >>> law = FlopLaw(True, (1, 64), "full", {"forward": {}}, domain={"n": (1, 8), "s": (1, 64)})
        >>> law.exact_for(4, 64), law.exact_for(4, 65)
        (True, False)
        """
        shape = self._shape(batch_size, seq_len, None)
        if self.doubts or self.per_batch:
            return False
        if self.coefficients and self.covers_shape(shape):
            return self.exact
        return self.count_shape is not None

    def cost(self, shape: StepShape) -> PhaseFlops:
        """Return the FLOPs of a step of this shape, by phase: from the formula, or outside `domain` by counting."""
        if self.coefficients and self.covers_shape(shape):
            return self._summed(lambda term: term_value(term, shape))
        if self.count_shape is None:
            raise InputError(
                f"the FLOPs of the shape {shape.values} are unknown: this FLOP law was verified on "
                f"{dict(self.domain)}, and has no model to count other shapes with; call fit_flops_law with the model"
            )
        return self.count_shape(shape)

    def phase_flops_of_rows(
        self, rows: Sequence[Mapping[str, int]], *, image_grids: Sequence[Grid] | None = None
    ) -> PhaseFlops:
        """Return the FLOPs of one step on samples of different lengths, without padding, by phase.

        Terms that are linear in the number of samples are evaluated for each sample at its own lengths. All other terms
        (position embeddings, pairs of samples) are evaluated at the greatest lengths. `rows` are the lengths of each
        sample by variable, such as `{"s": 512}`.
        """
        longest = {name: max(row[name] for row in rows) for name in rows[0]}
        whole = StepShape.of({SAMPLES: len(rows), **longest}, self._grids(image_grids, len(rows)))
        return self._of_samples(whole, lambda powers: sum(_product(row, powers) for row in rows))

    def phase_flops_of_documents(
        self,
        documents: Documents,
        *,
        longest: int | None = None,
        rows: int = 1,
        others: Sequence[tuple[str, int]] = (),
    ) -> PhaseFlops:
        """Return the FLOPs of one step on packed documents, where attention stays inside each document, by phase.

        Each document has the images of the example, and the same lengths of `others`, such as a decoder's target. They
        are packed into `rows` rows, of which the `longest` is None if they fill one row without padding.
        """
        # The sums of length⁰, length¹ and length² over all documents, indexed by the exponent of s.
        powers_of_main = (documents.count, documents.tokens, documents.squares)
        row_length = documents.tokens if longest is None else longest
        whole = StepShape(rows, row_length, self.sample_grids * documents.count, tuple(others))
        return self._of_samples(
            whole, lambda powers: powers_of_main[powers.pop("s", 0)] * _product(dict(others), powers)
        )

    def _of_samples(self, whole: StepShape, sum_over_samples: Callable[[dict[str, int]], int]) -> PhaseFlops:
        """Sum terms that are linear in the samples over the samples; evaluate all others for the whole batch."""

        def amount(term: str) -> int:
            powers = exponents_of(term) if term not in IMAGE_TERMS else {}
            return sum_over_samples(powers) if powers.pop(SAMPLES, 0) == 1 else term_value(term, whole)

        return self._summed(amount)

    def _summed(self, amount: Callable[[str], int]) -> PhaseFlops:
        if not self.coefficients:
            raise InputError(
                "this model has no formula for its FLOPs; call model_flops(lengths=...), which counts each sample"
            )
        return PhaseFlops(*(int(summed(self.coefficients.get(phase, {}), amount)) for phase in PHASES))

    def covers(self, seq_len: int | None) -> bool:
        """Return whether this sequence length lies in the range that was verified."""
        if self.seq_lens is None or seq_len is None:
            return self.seq_lens is None and seq_len is None
        return self.seq_lens[0] <= seq_len <= self.seq_lens[1]

    def covers_shape(self, shape: StepShape) -> bool:
        values = shape.values
        return all(low <= values.get(name, low) <= high for name, (low, high) in self.domain.items())

    def _sum_of_samples(self, batch_size: Any, seq_len: Any, lengths: Sequence[int], image_grids: Any) -> int:
        if batch_size is not None or seq_len is not None:
            raise InputError("pass either `lengths`, or `batch_size` and `seq_len`, but not both")
        if len(lengths) == 0:
            raise InputError("`lengths` is empty: pass the length of each sample")
        for length in lengths:
            _size("a length", length)
        rows = [{"s": length, **dict(self._other_lengths())} for length in lengths]
        if self.coefficients and all(self.covers_shape(StepShape(1, length)) for length in lengths):
            cost = self.phase_flops_of_rows(rows, image_grids=image_grids)
            return cost.forward + cost.backward
        if image_grids is not None:
            raise InputError(
                "leave `image_grids` out: this model is counted sample by sample, and the grids do not say which image "
                "belongs to which sample"
            )
        # Each sample is counted alone, so the FLOPs of comparing samples with each other are missing.
        costs = [self.cost(self._shape(1, length, None)) for length in lengths]
        return sum(cost.forward + cost.backward for cost in costs)

    def _shape(self, batch_size: int | None, seq_len: int | None, image_grids: Sequence[Grid] | None) -> StepShape:
        if batch_size is None:
            raise InputError("pass `batch_size` (and `seq_len`, for a text model), or `lengths`")
        if self.seq_lens is None and seq_len is not None:
            raise InputError(f"this model has no text sequence: leave `seq_len` out, got {seq_len!r}")
        if self.seq_lens is not None and seq_len is None:
            raise InputError("the FLOPs of this model depend on the sequence length: pass `seq_len` or `lengths`")
        samples = _size("batch_size", batch_size)
        grids = self._grids(image_grids, samples)
        length = None if seq_len is None else _size("a length", seq_len)
        return StepShape(samples, length, grids, self._other_lengths())

    def _other_lengths(self) -> tuple[tuple[str, int], ...]:
        return () if self.layout is None else tuple(self.layout.other_lengths.items())

    def _grids(self, image_grids: Sequence[Grid] | None, samples: int) -> tuple[Grid, ...]:
        if image_grids is None:
            return self.sample_grids * samples
        if not self.sample_grids:
            raise InputError("leave `image_grids` out: this FLOP law was fitted on a batch without image_grid_thw")
        for grid in image_grids:
            if len(grid) != 3:
                raise InputError(f"an image grid must be (frames, rows, columns), got {tuple(grid)!r}")
            for side in grid:
                _size("a side of an image grid", int(side))
        return tuple((int(t), int(h), int(w)) for t, h, w in image_grids)


def summed(coefficients: Mapping[str, Fraction], amount: Callable[[str], int]) -> Fraction:
    return sum((value * amount(term) for term, value in coefficients.items()), Fraction(0))


def _size(what: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"{what} must be a positive whole number, got {value!r}")
    return value
