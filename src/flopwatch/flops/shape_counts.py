"""Counts the FLOPs of batches of any shape, built from one sample, to fit a formula or to replace an inexact one."""

import weakref
from collections import OrderedDict
from typing import Any

from torch import nn

from flopwatch.errors import InputError
from flopwatch.flops.batch_contents import read_shape
from flopwatch.flops.batch_layout import Grid, Layout, Sample, grids_of, repeated
from flopwatch.flops.law import FlopLaw, StepShape
from flopwatch.flops.methods import count_as_is
from flopwatch.flops.tracing.counter import ONE_RANKS_SHARE
from flopwatch.flops.tracing.custom_functions import CANNOT_TELL, MAY_RUN_AGAIN, NOT_FOLLOWED
from flopwatch.records.flops import FlopCount, Method, PhaseFlops

# The number of shapes whose FLOPs are kept. Each takes a few integers, and lengths often recur in a training.
CACHED_SHAPES = 256
# A FLOP law (the fitted formula) names the least reliable of the methods that its counts were made with.
_LEAST_RELIABLE_FIRST: tuple[Method, ...] = ("estimate", "step", "trace")


class ShapeCounts:
    """Counts the FLOPs of batches of different shapes, all made from one sample, and caches the latest results.

    `notes` are about the limits of the counts, `doubts` say why a formula that is fitted on them is not exact.
    """

    def __init__(self, model: nn.Module, sample: Sample, options: dict[str, Any]) -> None:
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
            self._known[shape] = _phases_of(self.count(self._batch(shape)))
            if len(self._known) > CACHED_SHAPES:
                self._known.popitem(last=False)
        self._known.move_to_end(shape)
        return self._known[shape]

    def add_example(self, batch: Any) -> FlopCount:
        """Count the FLOPs of the user's own batch, unaltered. All other shapes will be counted with the same method."""
        count = self.count(batch)
        self._options = {**self._options, "method": count.method}
        self._example = read_shape(batch).batch_size, grids_of(batch), _phases_of(count)
        return count

    def example_shape(self, layout: Layout) -> StepShape:
        """Return the shape of the user's batch in this layout, and store the batch's FLOPs under this shape."""
        assert self._example is not None
        batch_size, grids, cost = self._example
        others = tuple((name, layout.sizes[name]) for name in layout.lengths if name != "s")
        shape = StepShape(batch_size, layout.sizes.get("s"), grids, others)
        self._known[shape] = cost
        return shape

    def law(
        self, coefficients: dict[str, dict[str, Any]], domain: dict[str, tuple[int, int]], note: str = ""
    ) -> FlopLaw:
        """Return a FLOP law with these coefficients; without coefficients, it counts each shape when needed."""
        layout = self.sample.layout
        self.example_shape(layout)
        lengths = domain.get("s")
        if lengths is None and "s" in layout.sizes:
            known = [shape.seq_len for shape in self._known if shape.seq_len is not None]
            lengths = (min(known), max(known))
        other_lengths = [
            f"the length of {path!r} does not depend on seq_len; it is {layout.sizes[name]}, as in the example"
            for name in layout.lengths
            if name != "s"
            for path in layout.paths_along(name)
        ]
        return FlopLaw(
            exact=bool(coefficients) and not self.doubts,
            seq_lens=lengths,
            attention=self._options["attention"],
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
        """Count the FLOPs of a batch, and add the notes on this count to those of earlier counts."""
        model = self._model()
        if model is None:
            raise InputError(
                "this shape cannot be counted, because the model that the FLOP law was fitted on no longer exists; "
                "keep a reference to the model as long as you use its law"
            )
        count = count_as_is(model, batch, **self._options)
        self.notes.update(dict.fromkeys(count.notes))
        self._methods[count.method] = None
        if count.coverage is not None:
            self._coverage = min(count.coverage, 1.0 if self._coverage is None else self._coverage)
        if count.method == "estimate":
            self.doubts["the FLOPs are estimates"] = None
        for doubt in (ONE_RANKS_SHARE, MAY_RUN_AGAIN, CANNOT_TELL, NOT_FOLLOWED):
            if doubt in count.notes:
                self.doubts[doubt] = None
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


def _phases_of(count: FlopCount) -> PhaseFlops:
    return PhaseFlops(count.forward_flops, count.backward_flops, count.recompute_flops)
