"""Estimated FLOPs of `model(batch)`, for mode `estimate` and for trainings of which nothing runs in this thread.

They follow from the shapes of weights and batch, and no code of the user runs. Rows with them are never called exact.
"""

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from flopwatch.errors import FlopwatchError
from flopwatch.flops.batch_contents import describe
from flopwatch.flops.batch_layout import SAMPLES
from flopwatch.flops.count import is_padded, with_full_masks
from flopwatch.flops.fit import fit_flops_law
from flopwatch.flops.law import FlopLaw, StepShape
from flopwatch.flops.methods import count_as_is
from flopwatch.flops.tracing.counter import phases_of
from flopwatch.flops.tracing.passes import CountOptions
from flopwatch.flops.tracing.replica import unwrap
from flopwatch.language import Said
from flopwatch.models import dummy_batch
from flopwatch.monitor.counting.batch_reader import BatchLayout, BatchSizes
from flopwatch.records.flops import AttentionConvention, PhaseFlops

PACKING = (
    *("cu_seq_lens_q", "cu_seqlens", "cu_seqlens_q", "cu_seq_lens_k", "cu_seqlens_k"),
    *("max_length_q", "max_length_k", "position_ids"),
)
"""Names of arguments that say where packed documents begin and end."""
MADE_UP = Said("only attention_mask was given, so a batch of its shape was assumed")


BatchCost = tuple[PhaseFlops, PhaseFlops, str | None]
"""FLOPs of one call `model(batch)` and its backward pass: needed, executed, and a remark."""


@dataclass(frozen=True, slots=True)
class _Estimate:
    executed: PhaseFlops
    law: FlopLaw | None = None
    shape: StepShape | None = None
    remark: str | None = None


class EstimatedCosts:
    """Estimates of `model(batch)` by the layout of the batch.

    Attributes:
        examples: Batches of new layouts.
        is_used: Whether a step got an estimate, or should have got one.
    """

    def __init__(
        self, attention: AttentionConvention, in_count_phase: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self.examples: list[tuple[Any, BatchLayout]] = []
        self.is_used = False
        self._attention, self._in_count_phase = attention, in_count_phase
        self._laws: dict[Any, FlopLaw] = {}
        self._known: dict[int, tuple[BatchLayout, _Estimate | None]] = {}
        """By the id of a `BatchLayout`, because different shapes can have equal layouts."""

    def anew(self) -> "EstimatedCosts":
        """New estimates for a model that has changed, with the same examples."""
        fresh = EstimatedCosts(self._attention, self._in_count_phase)
        fresh.examples = self.examples
        return fresh

    def note(self, batch: Any, layout: BatchLayout) -> None:
        if id(layout) not in self._known:
            self.examples.append((batch, layout))

    def estimate_next(self, model: nn.Module) -> None:
        """Estimate the FLOPs of the next example. The model may raise anything."""
        batch, layout = self.examples.pop(0)
        if id(layout) in self._known:
            return
        self._known[id(layout)] = layout, None  # if it fails, it is not tried again with such batches
        with self._in_count_phase():
            self._known[id(layout)] = layout, self._estimate(model, *example_batch(model, batch, layout))

    def _estimate(self, model: nn.Module, example: Any, remark: str | None) -> _Estimate:
        description = describe(example)
        law = self._laws.get(description.structure)
        if law is None or _by_law(law, description, remark) is None:
            full = with_full_masks(example) if is_padded(example) else example
            law = fit_flops_law(model, full, method="estimate", attention=self._attention)
            self._laws[description.structure] = law
        estimate = _by_law(law, description, remark)
        if estimate is None:
            count = count_as_is(model, example, CountOptions(self._attention, method="estimate"))
            estimate = _Estimate(phases_of(count), remark=remark)
        return estimate

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(note for law in self._laws.values() for note in law.notes))

    def cost(self, batch: BatchSizes) -> BatchCost | None:
        """The FLOPs of a batch; None if they are not known. A remark says if they include padding."""
        _, estimate = self._known.get(id(batch.layout), (None, None))
        if estimate is None:
            return None
        executed, law, shape = estimate.executed, estimate.law, estimate.shape
        if batch.documents is None:
            return executed, executed, estimate.remark
        unclear = Said(
            "model FLOPs include padding and attention across packed documents, as no formula separates them"
        )
        whole = executed, executed, estimate.remark or unclear
        if law is None or shape is None or shape.seq_len is None:
            return whole
        try:
            if batch.lengths is not None:
                rows = [{"s": length, **dict(shape.others)} for length in batch.lengths]
                needed = law.phase_flops_of_rows(rows, image_grids=shape.grids or None)
            else:
                needed = law.phase_flops_of_documents(
                    batch.documents, longest=shape.seq_len, rows=shape.batch_size, others=shape.others
                )
        except FlopwatchError:
            return whole
        return needed, executed, estimate.remark


def _by_law(law: FlopLaw, description: Any, remark: str | None) -> _Estimate | None:
    """The FLOPs of a batch by a law; None if the law has not been verified for such sizes."""
    values = law.layout.match(description) if law.layout is not None and law.coefficients else None
    if values is None:
        return None
    shape = StepShape.of(values, law.sample_grids * values.get(SAMPLES, 1))
    if not law.covers_shape(shape):
        return None
    return _Estimate(law.cost(shape), law, shape, remark)


def example_batch(model: nn.Module, batch: Any, layout: BatchLayout) -> tuple[Any, str | None]:
    """The batch without arguments that `forward` does not accept or that describe packed documents, and a remark.

    If the batch is only a mask, `forward` cannot be called with it, so a dummy batch of the mask's shape is returned.
    """
    if isinstance(batch, Mapping):
        # Position ids with a third dimension have the axes of images: time, height and width.
        tensors = {
            name: value
            for name, value in batch.items()
            if name not in PACKING or (isinstance(value, Tensor) and value.dim() > 2)
        }
        if set(tensors) <= {"attention_mask"}:
            return dummy_batch(unwrap(model), layout.batch_size, layout.seq_len or 1), MADE_UP
        parameters = _parameters(model)
        if parameters is not None and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            tensors = {name: value for name, value in tensors.items() if name in parameters}
        return tensors, None
    if isinstance(batch, tuple | list):
        parameters = _parameters(model)
        if parameters is not None and not any(p.kind is p.VAR_POSITIONAL for p in parameters.values()):
            batch = tuple(batch)[: len(parameters)]
    return batch, None


def _parameters(model: nn.Module) -> Mapping[str, inspect.Parameter] | None:
    try:
        return inspect.signature(unwrap(model).forward).parameters
    except (TypeError, ValueError):
        return None
