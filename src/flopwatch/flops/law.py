"""FLOPs as an exact function of the batch's shape, so that a step's cost is known without counting it.

n samples of S positions cost n·(a + b·S + c·S²) in a transformer: projections grow with the positions, attention with
their pairs. A contrastive loss compares all samples with each other, n² times. What does not depend on the batch
(position embeddings and the like) adds a polynomial of S alone. Images of t frames of h x w patches add, each,
α + β·t·h·w + γ·t·(h·w)². No law holds to the FLOP for models that cut the sequence into chunks or windows; those are
counted shape by shape.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from math import lcm
from typing import Any, Protocol

from flopwatch.errors import InputError
from flopwatch.flops.sample import Grid
from flopwatch.records import AttentionConvention, Method, PhaseFlops


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a step's cost depends on. `grids` are all images of the batch, in order."""

    batch_size: int
    seq_len: int | None = None
    grids: tuple[Grid, ...] = ()


TERMS: Mapping[str, Callable[[StepShape], int]] = {
    "samples": lambda shape: shape.batch_size,
    "positions": lambda shape: shape.batch_size * (shape.seq_len or 0),
    "pairs": lambda shape: shape.batch_size * (shape.seq_len or 0) ** 2,
    "sample pairs": lambda shape: shape.batch_size**2,
    "step": lambda shape: 1,
    "length": lambda shape: shape.seq_len or 0,
    "length squared": lambda shape: (shape.seq_len or 0) ** 2,
    "images": lambda shape: len(shape.grids),
    "patches": lambda shape: sum(t * h * w for t, h, w in shape.grids),
    "patch pairs": lambda shape: sum(t * (h * w) ** 2 for t, h, w in shape.grids),
}

_TERM_OF_EACH_ALONE: Mapping[str, Callable[["Documents"], int]] = {
    "samples": lambda documents: documents.count,
    "positions": lambda documents: documents.tokens,
    "pairs": lambda documents: documents.squares,
    "step": lambda documents: documents.count,
    "length": lambda documents: documents.tokens,
    "length squared": lambda documents: documents.squares,
}
"""The terms of a text, summed over documents of which each would be a step of its own."""

PHASES = ("forward", "backward", "recompute")


@dataclass(frozen=True, slots=True)
class Documents:
    """What the cost of separate documents depends on: how many, their tokens, and the sum of their squared lengths."""

    count: int
    tokens: int
    squares: int

    @classmethod
    def of_lengths(cls, lengths: Sequence[int]) -> "Documents":
        return cls(len(lengths), sum(lengths), sum(length * length for length in lengths))


class CountsShapes(Protocol):
    """Counts a shape when it is first asked for."""

    def __call__(self, shape: StepShape) -> PhaseFlops: ...

    def __contains__(self, shape: StepShape) -> bool: ...


@dataclass(frozen=True)
class FlopLaw:
    """What a step costs, for any shape of the batch it was fitted on.

    Attributes:
        exact: True when the formula predicted every held-out shape to the FLOP, and was fitted on counts in which
            nothing is missing or estimated.
        seq_lens: The shortest and longest length it was verified on; None for a model without a text sequence.
        attention: The convention of the counts.
        coefficients: FLOPs per term, for each phase; empty when no formula holds and shapes are counted on demand.
        sample_grids: The images of the example sample, assumed for every sample when none are given.
        method: How the counts behind it were made.
        coverage: Share of the matmul-like op calls that had a formula; None where no op was seen.
        notes: What a reader must know.
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

    def model_flops(
        self,
        batch_size: int | None = None,
        seq_len: int | None = None,
        *,
        lengths: Sequence[int] | None = None,
        image_grids: Sequence[Grid] | None = None,
    ) -> int:
        """FLOPs the mathematics of such a step needs.

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

    def phase_flops(
        self,
        batch_size: int | None = None,
        seq_len: int | None = None,
        *,
        image_grids: Sequence[Grid] | None = None,
    ) -> PhaseFlops:
        """What such a step executes, by phase."""
        return self._cost(self._shape(batch_size, seq_len, image_grids))

    def phase_flops_of_documents(
        self, documents: Documents, *, image_grids: Sequence[Grid] | None = None
    ) -> PhaseFlops:
        """FLOPs of documents of which each is computed alone: rows without their padding, or packed into one row.

        Args:
            documents: How many, their tokens and squared lengths.
            image_grids: All images in them; without it, each has the images of the example.
        """
        if any(phase.get("sample pairs") for phase in self.coefficients.values()):
            raise InputError("this model compares its samples with each other: pass batch_size and seq_len")
        if not self.coefficients:
            raise InputError("this model has no law: pass the lengths of the samples, so that each can be counted")
        images = StepShape(documents.count, grids=self._grids(image_grids, documents.count))

        def amount(term: str) -> int:
            return _TERM_OF_EACH_ALONE[term](documents) if term in _TERM_OF_EACH_ALONE else TERMS[term](images)

        return PhaseFlops(*(_sum_of(terms, amount) for terms in self._phase_terms))

    def covers(self, seq_len: int | None) -> bool:
        """Whether this length lies in the range the law was verified on."""
        if self.seq_lens is None or seq_len is None:
            return self.seq_lens is None and seq_len is None
        return self.seq_lens[0] <= seq_len <= self.seq_lens[1]

    def has_counted(self, shape: StepShape) -> bool:
        """Whether this shape's cost is known without counting."""
        return self.count_shape is None or shape in self.count_shape

    def _sum_of_samples(self, batch_size: Any, seq_len: Any, lengths: Sequence[int], image_grids: Any) -> int:
        if batch_size is not None or seq_len is not None:
            raise InputError("pass the lengths of the samples, or batch_size and seq_len, not both")
        if len(lengths) == 0:
            raise InputError("lengths is empty: pass the length of each sample")
        for length in lengths:
            _size("a length", length)
        if self.coefficients:
            cost = self.phase_flops_of_documents(Documents.of_lengths(lengths), image_grids=image_grids)
            return cost.forward + cost.backward
        if image_grids is not None:
            raise InputError("this model is counted sample by sample, and which images belong to which is not known")
        costs = [self._cost(self._shape(1, length, None)) for length in lengths]
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
        return StepShape(samples, None if seq_len is None else _size("a length", seq_len), grids)

    def _grids(self, image_grids: Sequence[Grid] | None, samples: int) -> tuple[Grid, ...]:
        if image_grids is None:
            return self.sample_grids * samples
        if not self.sample_grids:
            raise InputError("the example this law was fitted on has no image_grid_thw: leave image_grids out")
        return tuple(map(_grid, image_grids))

    def _cost(self, shape: StepShape) -> PhaseFlops:
        if self.count_shape is not None:
            return self.count_shape(shape)
        return PhaseFlops(*(_sum_of(terms, lambda term: TERMS[term](shape)) for terms in self._phase_terms))

    @cached_property
    def _phase_terms(self) -> list["_Terms"]:
        return [_whole_numbers(self.coefficients[phase]) for phase in PHASES]


_Terms = tuple[list[tuple[str, int]], int]
"""Terms with whole factors, and what their sum is to be divided by: a live run evaluates the law on every step."""


def _whole_numbers(coefficients: Mapping[str, Fraction]) -> _Terms:
    divisor = lcm(*(value.denominator for value in coefficients.values()))
    return [(term, int(value * divisor)) for term, value in coefficients.items() if value], divisor


def _sum_of(terms: _Terms, amount: Callable[[str], int]) -> int:
    factors, divisor = terms
    return sum(factor * amount(term) for term, factor in factors) // divisor


def evaluate(coefficients: Mapping[str, Fraction], shape: StepShape) -> Fraction:
    return sum((value * TERMS[term](shape) for term, value in coefficients.items()), Fraction(0))


def _size(what: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"{what} is a positive whole number, got {value!r}")
    return value


def _grid(grid: Sequence[int]) -> Grid:
    if len(grid) != 3:
        raise InputError(f"an image grid is (frames, rows, columns), got {tuple(grid)!r}")
    t, h, w = (_size("a side of an image grid", int(side)) for side in grid)
    return t, h, w
