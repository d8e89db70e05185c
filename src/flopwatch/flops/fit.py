"""Fits the FLOP law of a model: a formula for the FLOPs of a step as a function of the batch's shape.

The formula is fitted on counts of a few small shapes and tested on others, which are held out from the fit. The user's
unaltered example is always held out. The other held-out shapes have the shortest and the longest lengths, odd and even
lengths, and lengths next to the window and block sizes in the model's configuration. If no formula predicts them all,
or if tensor values or random draws change the FLOPs, there is no formula, and each shape is counted when needed.
"""

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from torch import nn

from flopwatch.errors import FlopwatchError, InputError, MeasurementError
from flopwatch.flops.batch_contents import altered_batches, read_shape
from flopwatch.flops.batch_layout import (
    LENGTHS,
    SAMPLES,
    Grid,
    Layout,
    Sample,
    grids_of,
    repeated,
    suggest_layouts,
    take_sample,
)
from flopwatch.flops.law import IMAGE_TERMS, PHASES, FlopLaw, StepShape, summed, term_name, term_value
from flopwatch.flops.live_formula import solve
from flopwatch.flops.methods import count_as_is
from flopwatch.flops.steering import CHANCE, WEIGHTS
from flopwatch.flops.tracing.counter import ONE_RANKS_SHARE, phases_of
from flopwatch.flops.tracing.custom_functions import CANNOT_TELL, MAY_RUN_AGAIN, NOT_FOLLOWED
from flopwatch.flops.tracing.passes import CountOptions, LossFn, MethodChoice
from flopwatch.flops.tracing.replica import NO_PER_SAMPLE_GRADIENTS
from flopwatch.records.flops import AttentionConvention, FlopCount, Method, PhaseFlops

# The range of traced lengths is at least this wide: three lengths fit a quadratic, further ones test the fit.
_SHORTEST_SPAN = 12
# A model setting with one of these words in its name may be a length beyond which the FLOPs follow another formula.
_EDGE_WORDS = ("window", "chunk", "block", "stride", "bucket", "segment")
# The maximum number of window, chunk or block sizes to test per model. Each takes two more traces.
_MOST_EDGES = 2
# The number of samples in the largest tested batch. A trace of many samples takes no longer than one of few.
_MANY = 16


# The number of shapes whose FLOPs are kept. Each takes a few integers, and lengths often recur in a training.
CACHED_SHAPES = 256
# A FLOP law (the fitted formula) names the least reliable of the methods that its counts were made with.
_LEAST_RELIABLE_FIRST: tuple[Method, ...] = ("estimate", "step", "trace")


class ShapeCounts:
    """Counts the FLOPs of batches of different shapes, all made from one sample, and caches the latest results.

    `notes` are about the limits of the counts, `doubts` say why a formula that is fitted on them is not exact.
    """

    def __init__(self, model: nn.Module, sample: Sample, options: CountOptions) -> None:
        # A FLOP law (the fitted formula) may live longer than its model, and must not keep the weights in memory.
        self._model = weakref.ref(model)
        self.sample = sample
        self._options = options
        self._known: OrderedDict[StepShape, PhaseFlops] = OrderedDict()
        self._example: tuple[int, tuple[Grid, ...], PhaseFlops] | None = None
        self.notes: dict[str, None] = {}
        self.doubts: dict[str, None] = {}
        self._methods: dict[Method, None] = {}
        self._coverage: float | None = None

    def __call__(self, shape: StepShape) -> PhaseFlops:
        if shape not in self._known:
            self._known[shape] = phases_of(self.count(self._batch(shape)))
            if len(self._known) > CACHED_SHAPES:
                self._known.popitem(last=False)
        self._known.move_to_end(shape)
        return self._known[shape]

    def add_example(self, batch: Any) -> FlopCount:
        """Count the FLOPs of the user's own batch, unaltered. All other shapes will be counted with the same method."""
        count = self.count(batch)
        if count.method != "flops_fn":
            self._options = self._options._replace(method=count.method)
        self._example = read_shape(batch).batch_size, grids_of(batch), phases_of(count)
        return count

    def example_shape(self, layout: Layout) -> StepShape:
        """Return the shape of the user's batch in this layout, and store the batch's FLOPs under this shape."""
        assert self._example is not None
        batch_size, grids, cost = self._example
        shape = StepShape.of({**layout.sizes, SAMPLES: batch_size}, grids)
        self._known[shape] = cost
        return shape

    def law(
        self, coefficients: dict[str, dict[str, Any]], domain: dict[str, tuple[int, int]], note: str = ""
    ) -> FlopLaw:
        layout = self.sample.layout
        self.example_shape(layout)
        lengths = domain.get("s")
        if lengths is None and "s" in layout.sizes:
            known = [shape.seq_len for shape in self._known if shape.seq_len is not None]
            lengths = (min(known), max(known))
        other_lengths = [
            f"the length of {path!r} does not depend on seq_len; it is {length}, as in the example"
            for name, length in layout.other_lengths.items()
            for path in layout.paths_along(name)
        ]
        return FlopLaw(
            exact=bool(coefficients) and not self.doubts,
            seq_lens=lengths,
            attention=self._options.attention,
            coefficients=coefficients,
            sample_grids=self.sample.grids,
            notes=tuple(filter(None, (*self.doubts, note, *other_lengths, *self.notes))),
            method=next((method for method in _LEAST_RELIABLE_FIRST if method in self._methods), "trace"),
            coverage=self._coverage,
            count_shape=self,
            layout=layout,
            domain=domain,
            doubts=tuple(self.doubts),
        )

    def count(self, batch: Any) -> FlopCount:
        model = self._model()
        if model is None:
            raise InputError(
                "this shape cannot be counted, because the model that the FLOP law was fitted on no longer exists; "
                "keep a reference to the model as long as you use its law"
            )
        count = count_as_is(model, batch, self._options)
        self.notes.update(dict.fromkeys(count.notes))
        self._methods[count.method] = None
        if count.coverage is not None:
            self._coverage = min(count.coverage, 1.0 if self._coverage is None else self._coverage)
        if count.method == "estimate":
            self.doubts["the FLOPs are estimates"] = None
        elif count.method == "flops_fn":
            self.doubts["the FLOPs come from the user's function"] = None
        for doubt in (ONE_RANKS_SHARE, MAY_RUN_AGAIN, CANNOT_TELL, NOT_FOLLOWED):
            if doubt in count.notes:
                self.doubts[doubt] = None
        if any(NO_PER_SAMPLE_GRADIENTS in note for note in count.notes):
            self.doubts["the executed FLOPs leave out per-sample gradients"] = None
        if count.uncounted:
            ops = ", ".join(sorted({op.op for op in count.uncounted}))
            self.doubts[f"the FLOPs leave out ops that have no formula ({ops})"] = None
        return count

    def _batch(self, shape: StepShape) -> Any:
        sample = self.sample
        if not shape.grids or shape.grids == sample.grids * shape.batch_size:
            return sample.batch(shape.values)
        per_sample, left = divmod(len(shape.grids), shape.batch_size)
        grids = shape.grids[:per_sample]
        if left or grids * shape.batch_size != shape.grids:
            raise InputError(
                "this model has no formula for its FLOPs, and a batch can only be counted if all its samples have the "
                f"same images; got {len(shape.grids)} images for {shape.batch_size} samples"
            )
        return repeated(sample.with_grids(grids, shape.seq_len or 0), shape.batch_size)


@dataclass(frozen=True, slots=True)
class _Attempt:
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
    options = CountOptions(attention, loss_fn, training, method)
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
            mask, longest = batch.get("attention_mask") if isinstance(batch, dict) else None, 0
            if mask is not None and mask.dim() == 2 and mask.device.type != "meta" and SAMPLES in layout.sizes:
                longest = int((mask != 0).sum(1).argmax()) % layout.sizes[SAMPLES]
            counts.sample = take_sample(model, batch, layout, longest)
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
                shapes = [shape.values for shape in (*attempt.fitted, *attempt.held_out)]
                met = {name: [values[name] for values in shapes if name in values] for name in shapes[0]}
                domain = {name: (min(values), max(values)) for name, values in met.items()}
                # The formula holds for one sample too, even if batch norm would reject such a shape.
                return counts.law(coefficients, domain | {SAMPLES: (1, domain[SAMPLES][1])})
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
    if CHANCE in steered:
        reason = "a random draw changes the FLOPs, so a count is right for one draw only"
    elif WEIGHTS in steered:
        reason = "the values of activations change the FLOPs, so a count is right for one batch only"
    else:
        harmless = {"image_grid_thw"} if law.sample_grids and law.coefficients else set()
        names = sorted(steered - harmless)
        found = (name for name in names if name in own.steered_by or _depends_on_values(name, batch, counts, own))
        if (name := next(found, None)) is None:
            return law
        reason = f"the values of {name!r} change the FLOPs, so a count is right for one batch only"
    counts.doubts[reason] = None
    return replace(
        counts.law({}, {}), doubts=tuple(counts.doubts), notes=(reason, *law.notes), per_batch=True, exact=False
    )


def _depends_on_values(name: str, batch: Any, counts: ShapeCounts, own: FlopCount) -> bool:
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
    length = layout.sizes["s"]
    for path in layout.paths_along("s")[1:]:
        added = next((name for name in LENGTHS if name not in layout.sizes), None)
        if path == "attention_mask" or added is None:
            continue
        slots = tuple(
            replace(slot, variable=added) if slot.path == path and slot.variable in layout.lengths else slot
            for slot in layout.slots
        )
        apart = replace(layout, slots=slots, sizes={**layout.sizes, added: length})
        sample = replace(take_sample(model, batch, layout), layout=apart)
        try:
            count(sample.batch({SAMPLES: 2, "s": length - 1, added: length}))
        except MeasurementError:
            continue
        layout = apart
    return layout


def _attempts(model: nn.Module, sample: Sample, example: StepShape, *, runs_for_real: bool) -> Iterator[_Attempt]:
    """Yield formulas to try: first with the terms that nearly every model needs, then with more terms."""
    layout = sample.layout
    if SAMPLES not in layout.sizes:
        return
    lengths = layout.lengths
    # The exponents of all products of lengths up to degree two: 1, s, s², t, s·t, t², ...
    degrees = sorted(power for power in product(range(3), repeat=len(lengths)) if sum(power) <= 2)
    powers = [{name: power for name, power in zip(lengths, each, strict=True) if power} for each in degrees]
    levels = {name: _levels(sample, name) for name in lengths}
    points = [{name: levels[name][power.get(name, 0)] for name in lengths} for power in powers]
    first, second = (1, 2) if lengths else (2, 3)  # batch norm without a sequence needs two samples

    def at(samples: int, point: dict[str, int]) -> StepShape:
        return StepShape.of({SAMPLES: samples, **point}, sample.grids * samples)

    terms = [term_name({SAMPLES: 1, **power}) for power in powers] + ["step"]
    fitted = [at(first, point) for point in points] + [at(second, points[0])]
    held_out = [example, *_held_out(model, sample, levels, at, runs_for_real=runs_for_real)]
    if sample.grids and sample.image_tokens:
        side = sample.merge
        # 40 more positions are enough: the largest images need 30 placeholders, and 3 text tokens around them.
        length = _range_of(sample, "s")[1] + 40
        small, wide, long = (1, 2 * side, 2 * side), (1, 3 * side, 4 * side), (1, side, 5 * side)
        terms += IMAGE_TERMS
        fitted += [StepShape(1, length, grids) for grids in ((small,), (wide,), (small, small))]
        held_out.append(StepShape(2, length, (long, long)))
        held_out.append(StepShape(1, length, ((1, 4 * side, 6 * side), (1, 2 * side, 3 * side))))
    yield _Attempt(terms, fitted, held_out)
    if lengths:
        once = [power for power in powers if power]
        more = [at(second, point) for point, power in zip(points, powers, strict=True) if power]
        yield _Attempt([*terms, *map(term_name, once)], [*fitted, *more], held_out)
    yield _Attempt([*terms, "sample pairs"], [*fitted, at(4, points[0])], held_out)


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
    found: set[int] = set()
    for holder in (getattr(model, "config", None), *model.children()):
        for name, value in list(getattr(holder, "__dict__", {}).items()):
            if any(word in name for word in _EDGE_WORDS) and isinstance(value, int) and shortest < value < longest:
                found.add(value)
    return sorted(found)[:_MOST_EDGES]


def _solved(counts: ShapeCounts, attempt: _Attempt) -> dict[str, dict[str, Any]]:
    measured = [counts(shape) for shape in attempt.fitted]
    matrix = [[term_value(term, shape) for term in attempt.terms] for shape in attempt.fitted]
    solutions = {phase: solve(matrix, [getattr(flops, phase) for flops in measured]) for phase in PHASES}
    return {
        phase: dict(zip(attempt.terms, solution, strict=True))
        for phase, solution in solutions.items()
        if solution is not None
    }


def _is_wrong(counts: ShapeCounts, shape: StepShape, coefficients: dict[str, dict[str, Any]]) -> bool:
    flops = counts(shape)
    return any(
        summed(coefficients.get(phase, {}), lambda term: term_value(term, shape)) != getattr(flops, phase)
        for phase in PHASES
    )
