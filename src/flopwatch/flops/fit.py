"""Fits the FLOP law of a model on a few small traces, and tests it on shapes it has not seen."""

import weakref
from collections import OrderedDict
from typing import Any

from torch import nn

from flopwatch.errors import InputError
from flopwatch.flops.batches import MAIN_SEQUENCE, read_shape
from flopwatch.flops.collectives import ONE_RANKS_SHARE
from flopwatch.flops.law import PHASES, TERMS, FlopLaw, StepShape, evaluate
from flopwatch.flops.methods import MethodChoice, count_as_is
from flopwatch.flops.passes import LossFn
from flopwatch.flops.sample import Grid, Sample, first_sample
from flopwatch.flops.solve import solve
from flopwatch.records import AttentionConvention, Method, PhaseFlops

CACHED_SHAPES = 256
_SHORTEST_SPAN = 12
_LEAST_TRUSTED_FIRST: tuple[Method, ...] = ("estimate", "step", "trace")

_Plan = tuple[list[str], list[StepShape], list[StepShape]]
"""Terms to fit, shapes to fit them on, shapes to test the result on."""


def fit_flops_law(
    model: nn.Module,
    batch: Any,
    *,
    attention: AttentionConvention = "full",
    loss_fn: LossFn | None = None,
    method: MethodChoice = "auto",
) -> FlopLaw:
    """Find what a training step of this model costs as a function of the batch's shape.

    Args:
        model: The live model; it is not changed.
        batch: An example of what it is trained on. Its first sample is stretched, cut and repeated.
        attention: `full` counts every pair of positions, `causal` those not masked.
        loss_fn: From the model's output to the loss, where the model does not return one.
        method: How the shapes are counted, as in `count_flops`.

    Example:
        >>> import torch
        >>> law = fit_flops_law(torch.nn.Linear(64, 32), torch.randn(8, 64))
        >>> law.exact, law.model_flops(batch_size=1000)
        (True, 8192000)
    """
    sample = first_sample(model, batch)
    counts = ShapeCounts(model, sample, attention, loss_fn, method)
    own_batch_size = read_shape(batch).batch_size
    counts.notes.update(dict.fromkeys(_other_lengths(sample)))
    plans = _plans_with_sequence if sample.seq_len else _plans_without_sequence
    reason = ""
    for terms, fitted, held_out in plans(sample, own_batch_size):
        coefficients = _solved(counts, terms, fitted)
        wrong = next((shape for shape in held_out if not _predicts(coefficients, counts, shape)), None)
        if coefficients and wrong is None:
            return counts.law(attention, coefficients)
        reason = f"batch size {wrong.batch_size}, length {wrong.seq_len}" if wrong else "the shapes tried"
    note = f"no polynomial of the shape predicts {reason}; shapes are counted on demand, {CACHED_SHAPES} are kept"
    return counts.law(attention, {}, note)


class ShapeCounts:
    """Counts per shape, made on demand; those not asked for the longest are dropped."""

    def __init__(
        self,
        model: nn.Module,
        sample: Sample,
        attention: AttentionConvention,
        loss_fn: LossFn | None,
        method: MethodChoice,
    ) -> None:
        self._model = weakref.ref(model)
        self._sample = sample
        self._options: dict[str, Any] = {
            "method": method,
            "attention": attention,
            "loss_fn": loss_fn,
            "training": True,
        }
        self._known: OrderedDict[StepShape, PhaseFlops] = OrderedDict()
        self.notes: dict[str, None] = {}
        self.doubts: dict[str, None] = {}
        """Why no law made of these counts can be exact."""
        self._methods: dict[Method, None] = {}
        self._coverage: float | None = None

    def __call__(self, shape: StepShape) -> PhaseFlops:
        if shape not in self._known:
            self._known[shape] = self._count(shape)
            if len(self._known) > CACHED_SHAPES:
                self._known.popitem(last=False)
        self._known.move_to_end(shape)
        return self._known[shape]

    def __contains__(self, shape: StepShape) -> bool:
        return shape in self._known

    def seq_lens(self) -> tuple[int, int] | None:
        lengths = [shape.seq_len for shape in self._known if shape.seq_len is not None]
        return (min(lengths), max(lengths)) if lengths else None

    def law(self, attention: AttentionConvention, coefficients: dict[str, dict[str, Any]], note: str = "") -> FlopLaw:
        """What these counts amount to; without coefficients, they themselves are the law."""
        return FlopLaw(
            exact=bool(coefficients) and not self.doubts,
            seq_lens=self.seq_lens(),
            attention=attention,
            coefficients=coefficients,
            sample_grids=self._sample.grids,
            notes=tuple(filter(None, (*self.doubts, note, *self.notes))),
            method=next((method for method in _LEAST_TRUSTED_FIRST if method in self._methods), "trace"),
            coverage=self._coverage,
            count_shape=None if coefficients else self,
        )

    def _count(self, shape: StepShape) -> PhaseFlops:
        model = self._model()
        if model is None:
            raise InputError("the model this law was fitted on is gone, so a new shape cannot be counted")
        sample = self._sample
        if shape.grids and shape.grids != sample.grids * shape.batch_size:
            sample = sample.with_grids(_grids_of_one_sample(shape))
        count = count_as_is(model, sample.batch(shape.batch_size, shape.seq_len), **self._options)
        self.notes.update(dict.fromkeys(count.notes))
        self._methods[count.method] = None
        if count.coverage is not None:
            self._coverage = min(count.coverage, 1.0 if self._coverage is None else self._coverage)
        if count.method == "estimate":
            self.doubts["the counts are estimates"] = None
        if ONE_RANKS_SHARE in count.notes:
            self.doubts[ONE_RANKS_SHARE] = None
        if count.uncounted:
            ops = ", ".join(sorted({op.op for op in count.uncounted}))
            self.doubts[f"ops without a formula are not in the counts ({ops})"] = None
        return PhaseFlops(count.forward_flops, count.backward_flops, count.recompute_flops)


def _plans_without_sequence(sample: Sample, own_batch_size: int) -> list[_Plan]:
    # Not a single sample: batch norm refuses one value per channel.
    shapes = [StepShape(batch_size) for batch_size in (2, 3, 4)]
    held_out = [StepShape(max(7, own_batch_size)), StepShape(5)]
    return [(["samples", "step"], shapes[:2], held_out), (["samples", "step", "sample pairs"], shapes, held_out)]


def _plans_with_sequence(sample: Sample, own_batch_size: int) -> list[_Plan]:
    """First the terms nearly every model has; then, one after the other, what a few have besides."""
    shortest, longest = sample.shortest, sample.seq_len or 0
    longest = max(longest, shortest + _SHORTEST_SPAN)
    span = longest - shortest

    def at(batch_size: int, share: float) -> StepShape:
        return StepShape(batch_size, shortest + round(span * share), sample.grids * batch_size)

    terms = ["samples", "positions", "pairs", "step"]
    fitted = [at(1, 0.2), at(1, 0.45), at(1, 0.8), at(2, 0.2)]
    held_out = [at(3, 0.37), at(1, 0.93), at(2, 0.0), at(own_batch_size, 1.0)]
    if sample.grids and sample.image_tokens:
        terms, fitted, held_out = _with_images(sample, longest, terms, fitted, held_out)
    return [
        (terms, fitted, held_out),
        ([*terms, "length", "length squared"], [*fitted, at(2, 0.45), at(2, 0.8)], held_out),
        ([*terms, "sample pairs"], [*fitted, at(4, 0.2)], held_out),
    ]


def _with_images(
    sample: Sample, longest: int, terms: list[str], fitted: list[StepShape], held_out: list[StepShape]
) -> tuple[list[str], list[StepShape], list[StepShape]]:
    """Images of other sizes and one image more, in sequences long enough for their placeholders."""
    side = sample.merge
    fit_grids: list[list[Grid]] = [[(1, 2 * side, 2 * side)], [(1, 3 * side, 4 * side)], [(1, 2 * side, 2 * side)] * 2]
    other_grids: list[list[Grid]] = [[(1, side, 5 * side)], [(1, 4 * side, 6 * side), (1, 2 * side, 3 * side)]]
    length = longest + 40

    def with_grids(grids: list[Grid], batch_size: int = 1) -> StepShape:
        return StepShape(batch_size, length, tuple(grids) * batch_size)

    return (
        [*terms, "images", "patches", "patch pairs"],
        [*fitted, *(with_grids(grids) for grids in fit_grids)],
        [*held_out, with_grids(other_grids[0], 2), with_grids(other_grids[1])],
    )


def _solved(counts: ShapeCounts, terms: list[str], fitted: list[StepShape]) -> dict[str, dict[str, Any]]:
    measured = [counts(shape) for shape in fitted]
    matrix = [[TERMS[term](shape) for term in terms] for shape in fitted]
    solutions = {phase: solve(matrix, [getattr(flops, phase) for flops in measured]) for phase in PHASES}
    return {
        phase: dict(zip(terms, solution, strict=True)) for phase, solution in solutions.items() if solution is not None
    }


def _predicts(coefficients: dict[str, dict[str, Any]], counts: ShapeCounts, shape: StepShape) -> bool:
    flops = counts(shape)
    return all(evaluate(coefficients.get(phase, {}), shape) == getattr(flops, phase) for phase in PHASES)


def _grids_of_one_sample(shape: StepShape) -> tuple[Grid, ...]:
    per_sample, left = divmod(len(shape.grids), shape.batch_size)
    grids = shape.grids[:per_sample]
    if left or grids * shape.batch_size != shape.grids:
        raise InputError(
            "this law is counted shape by shape, and can only count batches in which all samples have the same images; "
            f"got {len(shape.grids)} images for {shape.batch_size} samples"
        )
    return grids


def _other_lengths(sample: Sample) -> list[str]:
    """A decoder's own length is not a variable of the law."""
    return [
        f"{name!r} keeps its {value.shape[1]} positions, as in the example, whatever seq_len is"
        for name, value in sample.tensors.items()
        if name in MAIN_SEQUENCE and sample.seq_len and value.dim() == 2 and value.shape[1] != sample.seq_len
    ]
