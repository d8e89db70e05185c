"""FLOPs as an exact function of the batch's shape, so that a step's cost is known without counting it.

In a transformer, n samples of S positions cost n·(a + b·S + c·S²): projections grow with the positions, attention with
their pairs. A contrastive loss compares all samples with each other, n² times. Work that does not depend on the batch
size (position embeddings) adds a polynomial of S alone. Each image of t frames of h x w patches adds
α + β·t·h·w + γ·t·(h·w)². No polynomial holds to the FLOP for models that cut the sequence into chunks or windows; their
shapes are counted one by one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from math import lcm, prod
from typing import Any, Protocol

from flopwatch.errors import InputError
from flopwatch.flops.batch_layout import SAMPLES, Grid, Layout
from flopwatch.records.flops import AttentionConvention, Method, PhaseFlops


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a step's cost depends on.

    Attributes:
        batch_size: Samples.
        seq_len: Positions of the main sequence.
        grids: All images of the batch, in order.
        others: Lengths of other sequences (a decoder's target) by the name of their variable.
    """

    batch_size: int
    seq_len: int | None = None
    grids: tuple[Grid, ...] = ()
    others: tuple[tuple[str, int], ...] = ()

    @property
    def values(self) -> dict[str, int]:
        main = {} if self.seq_len is None else {"s": self.seq_len}
        return {SAMPLES: self.batch_size, **main, **dict(self.others)}


# Names of the terms in samples and main sequence; terms with other sequences are spelled out, such as `n*s*t`.
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

_IMAGE_TERMS: Mapping[str, Callable[[Sequence[Grid]], int]] = {
    "images": len,
    "patches": lambda grids: sum(t * h * w for t, h, w in grids),
    "patch pairs": lambda grids: sum(t * (h * w) ** 2 for t, h, w in grids),
}
IMAGE_TERMS = tuple(_IMAGE_TERMS)

PHASES = ("forward", "backward", "recompute")


def term_name(exponents: Mapping[str, int]) -> str:
    """The name of a product of variables.

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
    """The value of a term for a step of this shape."""
    if term in _IMAGE_TERMS:
        return _IMAGE_TERMS[term](shape.grids)
    values = shape.values
    return prod(int(values.get(name, 0) ** power) for name, power in exponents_of(term).items())


@dataclass(frozen=True, slots=True)
class Documents:
    """What the cost of separate documents depends on: their number, their tokens, the sum of their squared lengths."""

    count: int
    tokens: int
    squares: int

    @classmethod
    def of_lengths(cls, lengths: Sequence[int]) -> "Documents":
        return cls(len(lengths), sum(lengths), sum(length * length for length in lengths))


class CountsShapes(Protocol):
    """Counts a shape on its first use, and remembers the result."""

    def __call__(self, shape: StepShape) -> PhaseFlops: ...

    def __contains__(self, shape: StepShape) -> bool: ...

    def by_dtype(self, shape: StepShape) -> Mapping[str, PhaseFlops]: ...


@dataclass(frozen=True)
class FlopLaw:
    """What a step costs, for any shape of the batch it was fitted on.

    Attributes:
        exact: True if the formula predicted every held-out shape and the example itself to the FLOP, the counts it was
            fitted on miss and estimate nothing, and neither values nor random draws steer the cost. It holds inside
            `domain`; `exact_for` answers for one shape.
        seq_lens: The shortest and longest length it was verified on; None for a model without a text sequence.
        attention: The convention of the counts.
        coefficients: FLOPs per term, for each phase; empty when no formula holds and shapes are counted on demand.
        sample_grids: The images of the example sample, assumed for every sample when none are given.
        method: How the counts it was fitted on were made.
        coverage: Share of the matmul-like op calls that had a formula; None where no op was seen.
        notes: What limits the law, for the reader.
        layout: Which sizes of the batch are variables, and which must be as in the example.
        domain: The least and greatest value of each variable that the law was verified on.
        doubts: Why the counts it was fitted on are not exact; empty if they are.
        dtypes: The compute types of the products, each with its own coefficients if there are several.
        mode_risks: Ops whose last bits may differ while a dispatch mode is on.
        per_batch: True if values or random draws steer the cost, so that a count holds for its own batch only.
    """

    exact: bool
    seq_lens: tuple[int, int] | None
    attention: AttentionConvention
    coefficients: Mapping[str, Mapping[str, Fraction]] = field(default_factory=dict)
    sample_grids: tuple[Grid, ...] = ()
    notes: tuple[str, ...] = ()
    method: Method = "trace"
    coverage: float | None = None
    count_shape: "CountsShapes | None" = field(default=None, repr=False)
    layout: Layout | None = field(default=None, repr=False)
    domain: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    doubts: tuple[str, ...] = ()
    dtypes: Mapping[str, Mapping[str, Mapping[str, Fraction]]] = field(default_factory=dict, repr=False)
    per_batch: bool = False
    mode_risks: tuple[str, ...] = ()

    def model_flops(
        self,
        batch_size: int | None = None,
        seq_len: int | None = None,
        *,
        lengths: Sequence[int] | None = None,
        image_grids: Sequence[Grid] | None = None,
    ) -> int:
        """FLOPs that the mathematics of such a step needs. A shape outside the verified domain is counted first.

        Args:
            batch_size: Samples in the batch.
            seq_len: Positions of each; left out for a model without a text sequence.
            lengths: Instead of both: the real length of each sample, for padded or packed batches.
            image_grids: (frames, rows, columns) of patches of every image in the batch; without it, every sample has
                the images of the example.
        """
        if lengths is not None:
            return self._sum_of_samples(batch_size, seq_len, lengths, image_grids)
        cost = self.phase_flops(batch_size, seq_len, image_grids=image_grids)
        return cost.forward + cost.backward

    def hardware_flops(
        self, batch_size: int, seq_len: int | None = None, *, image_grids: Sequence[Grid] | None = None
    ) -> int:
        """FLOPs such a step executes, recomputation and padding included."""
        return self.phase_flops(batch_size, seq_len, image_grids=image_grids).total

    def exact_for(self, batch_size: int, seq_len: int | None = None) -> bool:
        """Whether the answer for this shape is exact: inside the verified domain, or counted on demand.

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

    def phase_flops(
        self,
        batch_size: int | None = None,
        seq_len: int | None = None,
        *,
        image_grids: Sequence[Grid] | None = None,
    ) -> PhaseFlops:
        """The FLOPs that such a step executes, by phase."""
        return self.cost(self._shape(batch_size, seq_len, image_grids))

    def cost(self, shape: StepShape) -> PhaseFlops:
        """The FLOPs that a step of this shape executes, by phase; a shape outside the domain is counted."""
        # The formula is only verified inside the domain; outside it the shape is counted.
        if self.coefficients and (self.covers_shape(shape) or self.count_shape is None):
            if not self.covers_shape(shape):
                raise InputError(
                    f"{shape.values} lies outside of the range this law was verified on ({dict(self.domain)}), and "
                    "the model it was fitted on is not here to count it; fit a law on the model first"
                )
            return PhaseFlops(*(_sum_of(terms, lambda term: term_value(term, shape)) for terms in self._phase_terms))
        if self.count_shape is None:
            raise InputError("this law has neither a formula nor a model to count with")
        return self.count_shape(shape)

    def cost_by_dtype(self, shape: StepShape) -> dict[str, PhaseFlops]:
        """The same by the type that the products run in; empty where it is not known."""
        if not self.coefficients or not self.covers_shape(shape):
            return dict(self.count_shape.by_dtype(shape)) if self.count_shape is not None else {}
        # A single type has the whole cost, so no coefficients are stored for it.
        if len(self.dtypes) == 1:
            return {next(iter(self.dtypes)): self.cost(shape)}
        return {
            dtype: PhaseFlops(*(_sum_of(terms, lambda term: term_value(term, shape)) for terms in phases))
            for dtype, phases in self._dtype_terms.items()
        }

    def phase_flops_of_rows(
        self, rows: Sequence[Mapping[str, int]], *, image_grids: Sequence[Grid] | None = None
    ) -> PhaseFlops:
        """FLOPs of samples of different lengths in one step, without padding.

        Terms in the number of samples are evaluated for each sample at its own lengths, terms that a step pays once
        (position embeddings) at the greatest length, and terms that compare samples for all pairs of them.

        Args:
            rows: The lengths of each sample, by variable.
            image_grids: All images in them; without it, each has the images of the example.
        """
        longest = {name: max(row[name] for row in rows) for name in rows[0]}
        grids = self._grids(image_grids, len(rows))

        def amount(term: str) -> int:
            if term in _IMAGE_TERMS:
                return _IMAGE_TERMS[term](grids)
            powers = exponents_of(term)
            samples = powers.pop(SAMPLES, 0)
            # Linear in n: every sample adds the term at its own lengths.
            if samples == 1:
                return sum(prod(int(row.get(name, 0) ** power) for name, power in powers.items()) for row in rows)
            # A cost per step, or over all pairs of samples, is its term at the greatest lengths of the batch.
            return int(len(rows) ** samples) * prod(
                int(longest.get(name, 0) ** power) for name, power in powers.items()
            )

        return self._summed(amount)

    def phase_flops_of_documents(
        self,
        documents: Documents,
        *,
        longest: int | None = None,
        rows: int = 1,
        others: Sequence[tuple[str, int]] = (),
        image_grids: Sequence[Grid] | None = None,
    ) -> PhaseFlops:
        """FLOPs of packed documents in one step, each attending to itself alone.

        Args:
            documents: Their number, tokens and squared lengths.
            longest: The length of a row, at which terms that a step pays once are evaluated; None for one row without
                padding.
            rows: The number of rows they are packed into.
            others: Lengths of other sequences of each document.
            image_grids: All images in them; without it, each has the images of the example.
        """
        # The sums of length⁰, length¹ and length² over all documents, indexed by the exponent of s.
        powers_of_main = (documents.count, documents.tokens, documents.squares)
        row_length = documents.tokens if longest is None else longest
        once = StepShape(rows, row_length, self._grids(image_grids, documents.count), tuple(others))

        def amount(term: str) -> int:
            powers = exponents_of(term) if term not in _IMAGE_TERMS else {}
            if powers.pop(SAMPLES, 0) != 1:
                return term_value(term, once)
            main = powers.pop("s", 0)
            return powers_of_main[main] * prod(
                int(dict(others).get(name, 0) ** power) for name, power in powers.items()
            )

        return self._summed(amount)

    def _summed(self, amount: Callable[[str], int]) -> PhaseFlops:
        if not self.coefficients:
            raise InputError("this model has no law: pass the lengths of the samples, so that each can be counted")
        return PhaseFlops(*(_sum_of(terms, amount) for terms in self._phase_terms))

    def covers(self, seq_len: int | None) -> bool:
        """Whether this length lies in the range the law was verified on."""
        if self.seq_lens is None or seq_len is None:
            return self.seq_lens is None and seq_len is None
        return self.seq_lens[0] <= seq_len <= self.seq_lens[1]

    def covers_shape(self, shape: StepShape) -> bool:
        """Whether all variables of this shape lie in the ranges the law was verified on."""
        values = shape.values
        return all(low <= values.get(name, low) <= high for name, (low, high) in self.domain.items())

    def has_counted(self, shape: StepShape) -> bool:
        """Whether this shape's cost is known without counting."""
        is_formula = bool(self.coefficients) and self.covers_shape(shape)
        return is_formula or self.count_shape is None or shape in self.count_shape

    def _sum_of_samples(self, batch_size: Any, seq_len: Any, lengths: Sequence[int], image_grids: Any) -> int:
        if batch_size is not None or seq_len is not None:
            raise InputError("pass the lengths of the samples, or batch_size and seq_len, not both")
        if len(lengths) == 0:
            raise InputError("lengths is empty: pass the length of each sample")
        for length in lengths:
            _size("a length", length)
        rows = [{"s": length, **dict(self._other_lengths())} for length in lengths]
        if self.coefficients and all(self.covers_shape(StepShape(1, length)) for length in lengths):
            cost = self.phase_flops_of_rows(rows, image_grids=image_grids)
            return cost.forward + cost.backward
        if image_grids is not None:
            raise InputError("this model is counted sample by sample, and which images belong to which is not known")
        # Without a formula each sample is counted alone, which leaves out what compares samples.
        costs = [self.cost(self._shape(1, length, None)) for length in lengths]
        return sum(cost.forward + cost.backward for cost in costs)

    def _shape(self, batch_size: int | None, seq_len: int | None, image_grids: Sequence[Grid] | None) -> StepShape:
        if batch_size is None:
            raise InputError("pass batch_size (and seq_len), or the lengths of the samples")
        if self.seq_lens is None and seq_len is not None:
            raise InputError(f"this model has no text sequence: leave seq_len out, got {seq_len!r}")
        if self.seq_lens is not None and seq_len is None:
            raise InputError("this model's cost depends on the length: pass seq_len, or lengths")
        samples = _size("batch_size", batch_size)
        grids = self._grids(image_grids, samples)
        length = None if seq_len is None else _size("a length", seq_len)
        return StepShape(samples, length, grids, self._other_lengths())

    def _other_lengths(self) -> tuple[tuple[str, int], ...]:
        """The lengths of other sequences, as in the example."""
        if self.layout is None:
            return ()
        return tuple((name, self.layout.sizes[name]) for name in self.layout.lengths if name != "s")

    def _grids(self, image_grids: Sequence[Grid] | None, samples: int) -> tuple[Grid, ...]:
        if image_grids is None:
            return self.sample_grids * samples
        if not self.sample_grids:
            raise InputError("the example this law was fitted on has no image_grid_thw: leave image_grids out")
        return tuple(map(_grid, image_grids))

    @cached_property
    def _phase_terms(self) -> list["_Terms"]:
        return [_whole_numbers(self.coefficients.get(phase, {})) for phase in PHASES]

    @cached_property
    def _dtype_terms(self) -> dict[str, list["_Terms"]]:
        return {
            dtype: [_whole_numbers(coefficients.get(phase, {})) for phase in PHASES]
            for dtype, coefficients in self.dtypes.items()
        }


# Terms with integer factors, and their common divisor: a live run evaluates the law on every step.
_Terms = tuple[list[tuple[str, int]], int]


def _whole_numbers(coefficients: Mapping[str, Fraction]) -> _Terms:
    divisor = lcm(*(value.denominator for value in coefficients.values()))
    return [(term, int(value * divisor)) for term, value in coefficients.items() if value], divisor


def _sum_of(terms: _Terms, amount: Callable[[str], int]) -> int:
    factors, divisor = terms
    return sum(factor * amount(term) for term, factor in factors) // divisor


def evaluate(coefficients: Mapping[str, Fraction], shape: StepShape) -> Fraction:
    return sum((value * term_value(term, shape) for term, value in coefficients.items()), Fraction(0))


def _size(what: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"{what} is a positive whole number, got {value!r}")
    return value


def _grid(grid: Sequence[int]) -> Grid:
    if len(grid) != 3:
        raise InputError(f"an image grid is (frames, rows, columns), got {tuple(grid)!r}")
    t, h, w = (_size("a side of an image grid", int(side)) for side in grid)
    return t, h, w
