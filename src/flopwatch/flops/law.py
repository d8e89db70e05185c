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
from typing import Any

from flopwatch.errors import InputError
from flopwatch.flops.sample import Grid
from flopwatch.records import AttentionConvention, PhaseFlops


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

PHASES = ("forward", "backward", "recompute")


@dataclass(frozen=True)
class FlopLaw:
    """What a step costs, for any shape of the batch it was fitted on.

    Attributes:
        exact: True when the formula predicted every held-out shape to the FLOP. Otherwise shapes are counted on demand
            and kept.
        seq_lens: The shortest and longest length it was verified on; None for a model without a text sequence.
        attention: The convention of the counts.
        coefficients: FLOPs per term, for each phase; empty when not exact.
        sample_grids: The images of the example sample, assumed for every sample when none are given.
        notes: What a reader must know.
    """

    exact: bool
    seq_lens: tuple[int, int] | None
    attention: AttentionConvention
    coefficients: Mapping[str, Mapping[str, Fraction]] = field(default_factory=dict)
    sample_grids: tuple[Grid, ...] = ()
    notes: tuple[str, ...] = ()
    count_shape: Callable[[StepShape], PhaseFlops] | None = field(default=None, repr=False)

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
        cost = self._cost(self._shape(batch_size, seq_len, image_grids))
        return cost.forward + cost.backward

    def hardware_flops(
        self, batch_size: int, seq_len: int | None = None, *, image_grids: Sequence[Grid] | None = None
    ) -> int:
        """FLOPs such a step executes, recomputation and padding included."""
        return self._cost(self._shape(batch_size, seq_len, image_grids)).total

    def covers(self, seq_len: int | None) -> bool:
        """Whether this length lies in the range the law was verified on."""
        if self.seq_lens is None or seq_len is None:
            return self.seq_lens is None and seq_len is None
        return self.seq_lens[0] <= seq_len <= self.seq_lens[1]

    def _sum_of_samples(self, batch_size: Any, seq_len: Any, lengths: Sequence[int], image_grids: Any) -> int:
        if batch_size is not None or seq_len is not None or image_grids is not None:
            raise InputError("pass the lengths of the samples, or batch_size and seq_len, not both")
        if len(lengths) == 0:
            raise InputError("lengths is empty: pass the length of each sample")
        if any(phase.get("sample pairs") for phase in self.coefficients.values()):
            raise InputError("this model compares its samples with each other: pass batch_size and seq_len")
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
        if image_grids is not None and not self.sample_grids:
            raise InputError("the example this law was fitted on has no image_grid_thw: leave image_grids out")
        grids = self.sample_grids * samples if image_grids is None else tuple(map(_grid, image_grids))
        return StepShape(samples, None if seq_len is None else _size("a length", seq_len), grids)

    def _cost(self, shape: StepShape) -> PhaseFlops:
        if self.count_shape is not None:
            return self.count_shape(shape)
        return PhaseFlops(*(int(evaluate(self.coefficients[phase], shape)) for phase in PHASES))


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
