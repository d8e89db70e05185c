"""Fits the FLOP law of a model: a formula for the FLOPs of a step as a function of the batch's shape.

The formula is fitted on counts of a few small shapes and tested on others, which are held out from the fit. The user's
unaltered example is always held out. The other held-out shapes have the shortest and the longest lengths, odd and even
lengths, and lengths next to the window and block sizes in the model's configuration. If no formula predicts them all,
or if tensor values or random draws change the FLOPs, there is no formula, and each shape is counted when needed.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from torch import nn

from flopwatch.errors import FlopwatchError, MeasurementError
from flopwatch.flops.batch_contents import altered_batches
from flopwatch.flops.batch_layout import SAMPLES, Grid, Layout, Sample, suggest_layouts, take_sample
from flopwatch.flops.law import IMAGE_TERMS, PHASES, FlopLaw, StepShape, evaluate, term_name
from flopwatch.flops.live_formula import solve
from flopwatch.flops.methods import MethodChoice
from flopwatch.flops.shape_counts import CACHED_SHAPES, ShapeCounts
from flopwatch.flops.steering import CHANCE, WEIGHTS
from flopwatch.flops.tracing.passes import LossFn
from flopwatch.records.flops import AttentionConvention, FlopCount

# The range of traced lengths is at least this wide: three lengths fit a quadratic, further ones test the fit.
_SHORTEST_SPAN = 12
# A model setting with one of these words in its name may be a length beyond which the FLOPs follow another formula.
_EDGE_WORDS = ("window", "chunk", "block", "stride", "bucket", "segment")
# The maximum number of window, chunk or block sizes to test per model. Each takes two more traces.
_MOST_EDGES = 2
# The number of samples in the largest tested batch. A trace of many samples takes no longer than one of few.
_MANY = 16


@dataclass(frozen=True, slots=True)
class _Attempt:
    """The terms of a formula, the shapes to fit their coefficients on, and the shapes to test the result on."""

    terms: list[str]
    fitted: list[StepShape]
    held_out: list[StepShape]


def fit_flops_law(
    model: nn.Module,
    batch: Any,
    *,
    attention: AttentionConvention = "full",
    loss_fn: LossFn | None = None,
    method: MethodChoice = "auto",
    training: bool = True,
) -> FlopLaw:
    """Fit a formula for the FLOPs of a training step of this model as a function of the batch's shape.

    Args:
        model: The live model; it is not changed.
        batch: An example of a training batch. Batches of other shapes are made from one of its samples, which is
            lengthened, cut and repeated.
        attention: `full` counts every pair of positions, `causal` only unmasked pairs.
        loss_fn: Computes the loss from the model's output; needed if the model does not return a loss.
        method: How the shapes are counted, as in `count_flops`.
        training: False fits only the forward pass.

    Example:
        >>> import torch
        >>> law = fit_flops_law(torch.nn.Linear(64, 32), torch.randn(8, 64))
        >>> law.exact, law.model_flops(batch_size=1000)
        (True, 8192000)
    """
    layouts = suggest_layouts(batch)
    options: dict[str, Any] = {"attention": attention, "loss_fn": loss_fn, "method": method, "training": training}
    counts = ShapeCounts(model, take_sample(model, batch, layouts[-1]), options)
    own = counts.add_example(batch)
    law = _first_that_holds(model, batch, counts, layouts, own)
    return _with_steering_doubts(model, batch, counts, law, own)


def _first_that_holds(
    model: nn.Module, batch: Any, counts: ShapeCounts, layouts: Sequence[Layout], own: FlopCount
) -> FlopLaw:
    reason = "the number of samples cannot be varied"
    if own.method == "estimate" and own.coverage is not None:
        layouts = ()
    for suggested in layouts:
        try:
            layout = separate_lengths(model, batch, counts.count, suggested)
            counts.sample = take_sample(model, batch, layout, _longest_row(batch, layout))
            example = counts.example_shape(layout)
            attempts = list(_attempts(model, counts.sample, example, runs_for_real=own.method == "step"))
        except FlopwatchError as error:
            reason = str(error)
            continue
        takes_shapes = True
        for attempt in attempts:
            try:
                coefficients = _solved(counts, attempt)
                wrong = next((shape for shape in attempt.held_out if _is_wrong(counts, shape, coefficients)), None)
            except FlopwatchError as error:
                reason, takes_shapes = f"the model fails on another shape: {error}", False
                break
            if coefficients and wrong is None:
                return counts.law(coefficients, _domain(attempt))
            reason = f"no polynomial predicts the FLOPs of the shape {wrong.values}" if wrong else reason
        # The model accepts these shapes, but no formula predicts their FLOPs. Varying fewer sizes would not help.
        if takes_shapes:
            break
    note = f"no formula ({reason}): each shape is counted when needed, and the last {CACHED_SHAPES} counts are kept"
    return counts.law({}, {}, note)


def _with_steering_doubts(model: nn.Module, batch: Any, counts: ShapeCounts, law: FlopLaw, own: FlopCount) -> FlopLaw:
    """Return the fitted formula, marked as not exact if tensor values or random draws change the FLOPs.

    A value that the model's code reads need not change the FLOPs, so batches with other values are counted to find out.
    """
    steered = {*own.steered_by, *own.values_read}
    reason = None
    if CHANCE in steered:
        reason = "a random draw changes the FLOPs, so a count is right for one draw only"
    elif WEIGHTS in steered:
        reason = "the values of activations change the FLOPs, so a count is right for one batch only"
    else:
        harmless = {"image_grid_thw"} if law.sample_grids and law.coefficients else set()
        for name in sorted(steered - harmless):
            if name in own.steered_by or _depends_on_values(name, batch, counts, own):
                reason = f"the values of {name!r} change the FLOPs, so a count is right for one batch only"
                break
    if reason is None:
        return law
    counts.doubts[reason] = None
    return replace(
        counts.law({}, {}), doubts=tuple(counts.doubts), notes=(reason, *law.notes), per_batch=True, exact=False
    )


def _depends_on_values(name: str, batch: Any, counts: ShapeCounts, own: FlopCount) -> bool:
    """Return whether batches of the same shape but with other values of this argument cost different FLOPs."""
    tried = 0
    for other in altered_batches(batch, name):
        try:
            count = counts.count(other)
        except FlopwatchError:  # the model rejects these values
            continue
        tried += 1
        if (count.forward_flops, count.backward_flops) != (own.forward_flops, own.backward_flops):
            return True
    # If the model rejected all values that were tried, assume that this argument's values change the FLOPs.
    return not tried


def separate_lengths(model: nn.Module, batch: Any, count: Callable[[Any], FlopCount], layout: Layout) -> Layout:
    """Return the layout with a separate variable for each sequence whose length can differ from the main sequence's.

    Source and target of an encoder-decoder may have the same length in the example by coincidence. To find out if the
    lengths can differ, the model is run with a main sequence that is one position shorter than the other sequence.
    """
    if "s" not in layout.sizes or layout.sizes["s"] < 3:
        return layout
    _, *others = layout.paths_along("s")
    for path in others:
        apart = layout.with_own_length(path) if path != "attention_mask" else None
        if apart is None:
            continue
        added = next(name for name in apart.lengths if name not in layout.sizes)
        sample = replace(take_sample(model, batch, layout), layout=apart)
        length = layout.sizes["s"]
        try:
            count(sample.batch({SAMPLES: 2, "s": length - 1, added: length}))
        except MeasurementError:
            continue
        layout = apart
    return layout


def _longest_row(batch: Any, layout: Layout) -> int:
    mask = batch.get("attention_mask") if isinstance(batch, dict) else None
    if mask is None or mask.dim() != 2 or mask.device.type == "meta" or SAMPLES not in layout.sizes:
        return 0
    return int((mask != 0).sum(1).argmax()) % layout.sizes[SAMPLES]


def _attempts(model: nn.Module, sample: Sample, example: StepShape, *, runs_for_real: bool) -> Iterator[_Attempt]:
    """Yield formulas to try: first with the terms that nearly every model needs, then with more terms."""
    layout = sample.layout
    if SAMPLES not in layout.sizes:
        return
    lengths = layout.lengths
    powers = _monomials(lengths)
    levels = {name: _levels(sample, name) for name in lengths}
    points = [{name: levels[name][power.get(name, 0)] for name in lengths} for power in powers]
    first, second = (1, 2) if lengths else (2, 3)  # batch norm without a sequence needs two samples

    def at(samples: int, point: dict[str, int]) -> StepShape:
        others = tuple((name, size) for name, size in point.items() if name != "s")
        return StepShape(samples, point.get("s"), sample.grids * samples, others)

    terms = [term_name({SAMPLES: 1, **power}) for power in powers] + ["step"]
    fitted = [at(first, point) for point in points] + [at(second, points[0])]
    held_out = [example, *_held_out(model, sample, levels, at, runs_for_real=runs_for_real)]
    if sample.grids and sample.image_tokens:
        more_terms, more_fitted, more_held_out = _with_images(sample)
        terms, fitted, held_out = [*terms, *more_terms], [*fitted, *more_fitted], [*held_out, *more_held_out]
    yield _Attempt(terms, fitted, held_out)
    if lengths:
        once = [power for power in powers if power]
        more = [at(second, point) for point, power in zip(points, powers, strict=True) if power]
        yield _Attempt([*terms, *map(term_name, once)], [*fitted, *more], held_out)
    yield _Attempt([*terms, "sample pairs"], [*fitted, at(4, points[0])], held_out)


def _monomials(lengths: Sequence[str]) -> list[dict[str, int]]:
    """Return the exponents of all products of lengths up to degree two: 1, s, s², t, s·t, t², ..."""
    degrees = [power for power in product(range(3), repeat=len(lengths)) if sum(power) <= 2]
    return [{name: power for name, power in zip(lengths, each, strict=True) if power} for each in sorted(degrees)]


def _range_of(sample: Sample, name: str) -> tuple[int, int]:
    shortest = sample.shortest if name == "s" else 1
    return shortest, max(sample.layout.sizes[name], shortest + _SHORTEST_SPAN)


def _levels(sample: Sample, name: str) -> tuple[int, int, int]:
    """Return three lengths to fit on. Odd and even ones are among them, because a stride of 2 treats them differently.

    The lengths are not at the ends of the range, where the held-out lengths are.
    """
    shortest, longest = _range_of(sample, name)
    low, middle, high = (shortest + round((longest - shortest) * share) for share in (0.2, 0.45, 0.8))
    return low, middle + (1 if (middle - low) % 2 == 0 and middle + 1 < high else 0), high


def _held_out(
    model: nn.Module, sample: Sample, levels: dict[str, Any], at: Any, *, runs_for_real: bool
) -> list[StepShape]:
    """Return shapes to test on: the two longest lengths, the shortest, a middle one, and the model's window sizes."""
    many = 3 if runs_for_real else max(_MANY, 2 * sample.layout.sizes[SAMPLES])
    if not levels:
        return [at(5, {}), at(7, {}), *([] if runs_for_real else [at(many, {}), at(many - 3, {})])]
    middle = {name: own[1] for name, own in levels.items()}
    shapes = []
    for name in levels:
        shortest, longest = _range_of(sample, name)
        # 0.37 of the range is not among the lengths to fit on, which are 0.2, 0.45 and 0.8 of the range (`_levels`).
        between = shortest + round((longest - shortest) * 0.37)
        for samples, length in ((many, longest), (1, longest - 1), (3, between), (2, shortest)):
            shapes.append(at(samples, {**middle, name: length}))
        for edge in _edges(model, shortest, longest) if name == "s" else ():
            shapes += [at(1, {**middle, name: edge}), at(1, {**middle, name: edge + 1})]
    return shapes


def _edges(model: nn.Module, shortest: int, longest: int) -> list[int]:
    """Return the values of the model's window, chunk and block settings that lie in the range of lengths."""
    found: set[int] = set()
    for holder in (getattr(model, "config", None), *model.children()):
        for name, value in list(getattr(holder, "__dict__", {}).items()):
            if any(word in name for word in _EDGE_WORDS) and isinstance(value, int) and shortest < value < longest:
                found.add(value)
    return sorted(found)[:_MOST_EDGES]


def _with_images(sample: Sample) -> tuple[list[str], list[StepShape], list[StepShape]]:
    """Return the terms for images, the shapes to fit them on, and the shapes to test them on."""
    side = sample.merge
    fit_grids: list[list[Grid]] = [[(1, 2 * side, 2 * side)], [(1, 3 * side, 4 * side)], [(1, 2 * side, 2 * side)] * 2]
    other_grids: list[list[Grid]] = [[(1, side, 5 * side)], [(1, 4 * side, 6 * side), (1, 2 * side, 3 * side)]]
    # 40 more positions are enough: the largest images need 30 placeholders, and 3 text tokens around them.
    length = _range_of(sample, "s")[1] + 40

    fitted = [StepShape(1, length, tuple(grids)) for grids in fit_grids]
    held_out = [StepShape(2, length, tuple(other_grids[0]) * 2), StepShape(1, length, tuple(other_grids[1]))]
    return list(IMAGE_TERMS), fitted, held_out


def _domain(attempt: _Attempt) -> dict[str, tuple[int, int]]:
    """Return the least and greatest value of each variable among the shapes."""
    met: dict[str, list[int]] = {}
    for shape in (*attempt.fitted, *attempt.held_out):
        for name, value in shape.values.items():
            met.setdefault(name, []).append(value)
    domain = {name: (min(values), max(values)) for name, values in met.items()}
    # The formula also holds for one sample, even if no such shape was counted because batch norm would reject it.
    return domain | {SAMPLES: (1, domain[SAMPLES][1])}


def _solved(counts: ShapeCounts, attempt: _Attempt) -> dict[str, dict[str, Any]]:
    measured = [counts(shape) for shape in attempt.fitted]
    matrix = [[int(evaluate({term: 1}, shape)) for term in attempt.terms] for shape in attempt.fitted]  # type: ignore[dict-item]
    solutions = {phase: solve(matrix, [getattr(flops, phase) for flops in measured]) for phase in PHASES}
    return {
        phase: dict(zip(attempt.terms, solution, strict=True))
        for phase, solution in solutions.items()
        if solution is not None
    }


def _is_wrong(counts: ShapeCounts, shape: StepShape, coefficients: dict[str, dict[str, Any]]) -> bool:
    flops = counts(shape)
    return any(evaluate(coefficients.get(phase, {}), shape) != getattr(flops, phase) for phase in PHASES)
