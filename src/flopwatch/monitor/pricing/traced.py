"""FLOPs of `model(batch)`, for trainings whose steps are not counted as they run: compiled code and sharded models.

The FLOPs are traced on fake tensors, or estimated from the model's shapes in mode `estimate`. Rows with them are never
called exact, because what runs beside the model is not seen.
"""

import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from flopwatch.clock import Clock
from flopwatch.errors import FlopwatchError
from flopwatch.flops.batch_contents import describe
from flopwatch.flops.batch_layout import SAMPLES
from flopwatch.flops.count import is_padded, with_full_masks
from flopwatch.flops.fit import fit_flops_law
from flopwatch.flops.law import FlopLaw, StepShape
from flopwatch.flops.methods import MethodChoice, count_as_is
from flopwatch.flops.tracing.passes import AutocastState, LossFn, current_autocast
from flopwatch.flops.tracing.replica import unwrap
from flopwatch.models import dummy_batch
from flopwatch.monitor.pricing.batch_reader import BatchLayout, Work, has_image_axes
from flopwatch.records.flops import AttentionConvention, PhaseFlops
from flopwatch.torch_internals import compiled_call

PACKING = (
    *("cu_seq_lens_q", "cu_seqlens", "cu_seqlens_q", "cu_seq_lens_k", "cu_seqlens_k"),
    *("max_length_q", "max_length_k", "position_ids"),
)
"""Names of arguments that say where packed documents begin and end."""
MADE_UP = "only attention_mask was given, so a batch of its shape was assumed"
_SHARE, _LEAST_SECONDS = 0.01, 60.0
"""Counting new shapes may take this share of the run's time, and at least as many seconds."""


@dataclass(frozen=True, slots=True)
class BatchCost:
    """FLOPs of one call `model(batch)` and its backward pass: needed, executed, by compute type, and a remark."""

    needed: PhaseFlops
    executed: PhaseFlops
    by_dtype: Mapping[str, PhaseFlops] = field(default_factory=dict)
    remark: str | None = None


@dataclass(frozen=True, slots=True)
class _Traced:
    executed: PhaseFlops
    by_dtype: Mapping[str, PhaseFlops]
    law: FlopLaw | None = None
    shape: StepShape | None = None
    remark: str | None = None


class AutocastHook:
    """Notes in which autocast state the model is called; after the step, the state is another one.

    Attributes:
        state: The state of the newest call with gradients, or in which the model was compiled; None before.
    """

    def __init__(self) -> None:
        self.state: AutocastState | None = None
        self.key = str(id(self))
        _hooks[self.key] = self
        self._handle: RemovableHandle | None = None

    def listen_to(self, model: nn.Module) -> None:
        # If the compiled model is of a class of torch.nn, such as Sequential, a hook would change its compilation.
        if self._handle is None and not (compiled_call(model) and type(model).__module__.startswith("torch.nn")):
            self._handle = model.register_forward_pre_hook(self)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.remove()

    def __call__(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            _note_compilation(self.key)
        elif torch.is_grad_enabled():
            self.state = current_autocast()

    def __deepcopy__(self, memo: Any) -> "AutocastHook":
        return AutocastHook()

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        # A method that does nothing, so that a saved model can be loaded where flopwatch is not installed.
        return getattr, (nullcontext(), "__exit__")


_hooks: "weakref.WeakValueDictionary[str, AutocastHook]" = weakref.WeakValueDictionary()
"""Hooks by their `key`. Torch 2.6 fails to compile a call whose argument is the hook itself; a string is a constant."""


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _note_compilation(key: str) -> int:
    """Note the autocast state. This runs while the compiler traces the hook, not in the compiled code."""
    _hooks[key].state = current_autocast()
    return 0


class TracedCosts:
    """The FLOPs of `model(batch)` by the layout of the batch.

    Attributes:
        laws: The formulas that were fitted, by the structure of the batch.
    """

    def __init__(
        self, clock: Clock, method: MethodChoice, attention: AttentionConvention, loss_fn: LossFn | None
    ) -> None:
        self.method = method
        self._clock, self._began, self._seconds = clock, clock(), 0.0
        self._options: dict[str, Any] = {"method": method, "attention": attention, "loss_fn": loss_fn}
        self.laws: dict[Any, FlopLaw] = {}
        self._known: dict[int, tuple[BatchLayout, _Traced | None]] = {}
        """By the id of a `BatchLayout`, because different shapes can have equal layouts."""

    def knows(self, plan: BatchLayout) -> bool:
        return id(plan) in self._known

    def learn(self, model: nn.Module, batch: Any, plan: BatchLayout, autocast: AutocastState | None) -> None:
        """Find the FLOPs of a new layout of batches; by known formulas only, if counting has used up its time."""
        began = self._clock()
        may_count = not self.laws or self._seconds <= _LEAST_SECONDS + _SHARE * (began - self._began)
        self._known[id(plan)] = plan, None  # if the model raises, it is not tried again with such batches
        try:
            self._known[id(plan)] = plan, self._traced(model, batch, plan, autocast, may_count)
        finally:
            self._seconds += self._clock() - began

    def _traced(
        self, model: nn.Module, batch: Any, plan: BatchLayout, autocast: AutocastState | None, may_count: bool
    ) -> _Traced | None:
        example, remark = example_batch(model, batch, plan)
        options: dict[str, Any] = {"training": True, "autocast": autocast, **self._options}
        description = describe(example)
        law = self.laws.get(description.structure)
        traced = None if law is None else _by_law(law, description, remark)
        if traced is not None or not may_count:
            return traced
        if law is None or law.coefficients:  # no formula yet, or one that was not verified for so long rows
            full = with_full_masks(example) if is_padded(example) else example
            law = self.laws[description.structure] = fit_flops_law(model, full, **options)
            traced = _by_law(law, description, remark)
        if traced is not None:
            return traced
        count = count_as_is(model, example, **options)
        phases = PhaseFlops(count.forward_flops, count.backward_flops, count.recompute_flops)
        return _Traced(phases, count.by_dtype, remark=remark)

    def cost(self, work: Work) -> BatchCost | None:
        """The FLOPs of a batch; None if they are not known."""
        _, traced = self._known.get(id(work.plan), (None, None))
        if traced is None:
            return None
        needed, executed, unclear = _needed(traced, work)
        return BatchCost(needed, executed, traced.by_dtype, traced.remark or unclear)


def _by_law(law: FlopLaw, description: Any, remark: str | None) -> _Traced | None:
    """The FLOPs of a batch by a formula; None if it has not been verified for such sizes."""
    values = law.layout.match(description) if law.layout is not None and law.coefficients else None
    if values is None:
        return None
    samples = values.get(SAMPLES, 1)
    others = tuple((name, values[name]) for name in sorted(values) if name not in (SAMPLES, "s"))
    shape = StepShape(samples, values.get("s"), law.sample_grids * samples, others)
    if not law.covers_shape(shape):
        return None
    return _Traced(law.cost(shape), law.cost_by_dtype(shape), law, shape, remark)


def _needed(traced: _Traced, work: Work) -> tuple[PhaseFlops, PhaseFlops, str | None]:
    """FLOPs without padding, executed FLOPs, and why padding could not be left out, or None."""
    executed, law, shape = traced.executed, traced.law, traced.shape
    if work.documents is None:
        return executed, executed, None
    unclear = "model FLOPs include padding and attention across packed documents, as no formula separates them"
    if law is None or shape is None or shape.seq_len is None:
        return executed, executed, unclear
    try:
        if work.lengths is not None:
            rows = [{"s": length, **dict(shape.others)} for length in work.lengths]
            return law.phase_flops_of_rows(rows, image_grids=shape.grids or None), executed, None
        alone = law.phase_flops_of_documents(
            work.documents, longest=shape.seq_len, rows=shape.batch_size, others=shape.others
        )
    except FlopwatchError:
        return executed, executed, unclear
    return alone, executed, None


def example_batch(model: nn.Module, batch: Any, plan: BatchLayout) -> tuple[Any, str | None]:
    """The batch without arguments that `forward` does not accept or that describe packed documents, and a remark.

    If the batch is only a mask, `forward` cannot be called with it, so a dummy batch of the mask's shape is returned.
    """
    if isinstance(batch, Mapping):
        tensors = {name: value for name, value in batch.items() if name not in PACKING or has_image_axes(value)}
        if set(tensors) <= {"attention_mask"}:
            return dummy_batch(unwrap(model), plan.batch_size, plan.seq_len or 1), MADE_UP
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


def sum_of_costs(costs: Sequence[BatchCost]) -> BatchCost:
    by_dtype: dict[str, PhaseFlops] = {}
    for cost in costs:
        for name, flops in cost.by_dtype.items():
            by_dtype[name] = by_dtype.get(name, PhaseFlops()) + flops
    remarks = [cost.remark for cost in costs if cost.remark]
    return BatchCost(
        sum((cost.needed for cost in costs), PhaseFlops()),
        sum((cost.executed for cost in costs), PhaseFlops()),
        by_dtype if all(cost.by_dtype for cost in costs) else {},
        remarks[0] if remarks else None,
    )
