"""The FLOP laws of a live run: fitted when a kind of batch is first met, checked when asked, paid for sparingly."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from flopwatch.clock import Clock
from flopwatch.errors import FlopwatchError, InputError, MeasurementError
from flopwatch.flops.fit import fit_flops_law
from flopwatch.flops.law import FlopLaw, StepShape
from flopwatch.flops.methods import MethodChoice, count_as_is
from flopwatch.flops.passes import LossFn
from flopwatch.flops.replica import unwrap
from flopwatch.flops.sample import first_sample
from flopwatch.models.dummy import dummy_batch
from flopwatch.monitor.batch_reader import PACKING, Plan, Signature, Work
from flopwatch.records import AttentionConvention, PhaseFlops

_SHARE_FOR_NEW_SHAPES = 0.01
_LEAST_ALLOWANCE_SECONDS = 10.0
_SHARE_FOR_CHECKS = 0.0005
_MOST_SHAPES = 4096


@dataclass(frozen=True, slots=True)
class StepFlops:
    """What a step costs; a part nobody knows is None."""

    model: int
    hardware: int | None = None
    recompute: int | None = None

    def __add__(self, other: "StepFlops") -> "StepFlops":
        return StepFlops(
            self.model + other.model,
            None if self.hardware is None or other.hardware is None else self.hardware + other.hardware,
            None if self.recompute is None or other.recompute is None else self.recompute + other.recompute,
        )


@dataclass(frozen=True, slots=True)
class LawOffer:
    """Laws on their way from the rank that counted to the others."""

    laws: Mapping[Signature, FlopLaw]
    packed_runs_apart: bool | None


class LawBook:
    """One law per kind of batch.

    Counting takes the training's time, so it has an allowance: the first law is free, new kinds and shapes afterwards
    get as long again (at least 10 s) and 1 % of the run's time, checks 0.05 %. A step whose shape could not be counted
    has no FLOPs; the row says how many those are.

    Attributes:
        count_seconds: Spent counting so far.
        refused: Shapes that were not counted because the allowance was used up.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        method: MethodChoice = "auto",
        attention: AttentionConvention = "full",
        loss_fn: LossFn | None = None,
    ) -> None:
        self._clock = clock
        self._began = clock()
        self._options: dict[str, Any] = {"method": method, "attention": attention, "loss_fn": loss_fn}
        self._laws: dict[Signature, FlopLaw] = {}
        self._packed_runs_apart: bool | None = None
        self._executed: dict[int, tuple[Plan, PhaseFlops]] = {}
        self._first_seconds = 0.0
        self._check_seconds = 0.0
        self.count_seconds = 0.0
        self.refused = 0

    @property
    def laws(self) -> list[FlopLaw]:
        return list(self._laws.values())

    def knows(self, plan: Plan) -> bool:
        law = self._laws.get(plan.signature)
        if law is None:
            return False
        return law.seq_lens is None or not law.coefficients or law.covers(plan.seq_len)

    def learn(self, model: nn.Module, batch: Any, plan: Plan) -> None:
        """Fit a law for this kind of batch, or widen the range of lengths it was verified on."""
        if not self._may_count():
            self.refused += 1
            return
        self._executed.clear()
        with _Stopwatch(self._clock, self._spend):
            example = example_batch(model, batch, plan)
            law = self._laws.get(plan.signature)
            self._laws[plan.signature] = self._widened(law, model, example, plan) if law else self._fit(model, example)
        self._packed_runs_apart = "flash" in str(getattr(getattr(model, "config", None), "_attn_implementation", ""))

    def offer(self) -> LawOffer:
        """What other ranks need to price their own batches. Shapes counted one by one stay where the model is."""
        laws = {kind: replace(law, count_shape=None) for kind, law in self._laws.items() if law.coefficients}
        return LawOffer(laws, self._packed_runs_apart)

    def adopt(self, offer: LawOffer) -> None:
        """Use what another rank has counted."""
        self._laws |= offer.laws
        self._packed_runs_apart = offer.packed_runs_apart
        self._executed.clear()

    def forget(self) -> None:
        """The model has changed: all laws are void."""
        self._laws.clear()
        self._executed.clear()

    def check(self, model: nn.Module, batch: Any, plan: Plan, *, within_allowance: bool) -> bool | None:
        """Count this very batch and compare; None when it was not done."""
        law = self._laws.get(plan.signature)
        if law is None or (within_allowance and self._check_seconds > _SHARE_FOR_CHECKS * self._elapsed()):
            return None
        before = self.count_seconds
        with _Stopwatch(self._clock, self._spend):
            example = example_batch(model, batch, plan)
            grids = _grids_of(example) if law.sample_grids else None
            seq_len = plan.seq_len if law.seq_lens is not None else None
            agrees = self._count(model, example) == law.phase_flops(plan.batch_size, seq_len, image_grids=grids)
        self._check_seconds += self.count_seconds - before
        return agrees

    def flops(self, work: Work) -> StepFlops | None:
        """What this micro-batch costs; None when it is not known."""
        law = self._laws.get(work.plan.signature)
        if law is None:
            return None
        if law.coefficients:
            is_verified = law.seq_lens is None or law.covers(work.plan.seq_len)
            return self._by_law(law, work) if is_verified else None
        if not all(map(law.has_counted, _shapes(law, work))) and not self._may_count():
            self.refused += 1
            return None
        with _Stopwatch(self._clock, self._spend):
            return self._by_law(law, work)

    def _by_law(self, law: FlopLaw, work: Work) -> StepFlops:
        executed = self._executed_flops(law, work)
        needed = executed
        if work.documents is not None and law.seq_lens is not None:
            needed = _alone(law, work, executed)
            if work.lengths is None and self._packed_runs_apart:
                executed = needed  # variable-length kernels do not compute pairs across documents
        return StepFlops(needed.forward + needed.backward, executed.total, executed.recompute)

    def _executed_flops(self, law: FlopLaw, work: Work) -> PhaseFlops:
        """The same for all batches of a shape, unless they have images."""
        plan = work.plan
        known = self._executed.get(id(plan))
        if known is not None and known[0] is plan:
            return known[1]
        seq_len = plan.seq_len if law.seq_lens is not None else None
        if law.sample_grids:
            return law.phase_flops(plan.batch_size, seq_len, image_grids=work.grids)
        flops = law.phase_flops(plan.batch_size, seq_len)
        if len(self._executed) >= _MOST_SHAPES:
            self._executed.clear()
        self._executed[id(plan)] = plan, flops
        return flops

    def _fit(self, model: nn.Module, example: Any) -> FlopLaw:
        return fit_flops_law(model, example, **self._options)

    def _widened(self, law: FlopLaw, model: nn.Module, example: Any, plan: Plan) -> FlopLaw:
        """Twice the length at once, so that slowly growing lengths do not cost a count each."""
        if law.seq_lens is None or plan.seq_len is None or not law.coefficients:
            return law
        sample = first_sample(model, example)
        is_longer = plan.seq_len > law.seq_lens[1]
        for length in (2 * plan.seq_len, plan.seq_len) if is_longer else (plan.seq_len,):
            try:
                counted = self._count(model, sample.batch(1, length))
            except MeasurementError:  # longer than the model's positions
                continue
            if counted != law.phase_flops(1, length, image_grids=sample.grids or None):
                return self._fit(model, example)
            low, high = law.seq_lens
            return replace(law, seq_lens=(min(low, plan.seq_len), max(high, length)))
        return law

    def _count(self, model: nn.Module, batch: Any) -> PhaseFlops:
        count = count_as_is(model, batch, training=True, **self._options)
        return PhaseFlops(count.forward_flops, count.backward_flops, count.recompute_flops)

    def _may_count(self) -> bool:
        if not self._laws:
            return True
        extra = self.count_seconds - self._first_seconds - self._check_seconds
        return extra <= max(self._first_seconds, _LEAST_ALLOWANCE_SECONDS) + _SHARE_FOR_NEW_SHAPES * self._elapsed()

    def _elapsed(self) -> float:
        return self._clock() - self._began

    def _spend(self, seconds: float) -> None:
        self.count_seconds += seconds
        if not self._first_seconds:
            self._first_seconds = seconds


class _Stopwatch:
    def __init__(self, clock: Clock, report: Callable[[float], None]) -> None:
        self._clock = clock
        self._report = report

    def __enter__(self) -> None:
        self._start = self._clock()

    def __exit__(self, *_: object) -> None:
        self._report(self._clock() - self._start)


def _shapes(law: FlopLaw, work: Work) -> list[StepShape]:
    """What would have to be counted for a model without a law."""
    plan = work.plan
    seq_len = plan.seq_len if law.seq_lens is not None else None
    grids = work.grids if work.grids is not None else law.sample_grids * plan.batch_size
    alone = [StepShape(1, length, law.sample_grids) for length in work.lengths or ()]
    return [StepShape(plan.batch_size, seq_len, grids if law.sample_grids else ()), *alone]


def _grids_of(example: Any) -> Sequence[Any] | None:
    grid = example.get("image_grid_thw") if isinstance(example, Mapping) else None
    return None if grid is None else [tuple(row) for row in grid.tolist()]


def _alone(law: FlopLaw, work: Work, executed: PhaseFlops) -> PhaseFlops:
    """Each document computed on its own; where that cannot be told, padding counts as work."""
    assert work.documents is not None
    grids = work.grids if law.sample_grids else None
    try:
        if law.coefficients:
            return law.phase_flops_of_documents(work.documents, image_grids=grids)
        if work.lengths is None:
            raise InputError("packed documents of a model without a law")
        costs = [law.phase_flops(1, length) for length in work.lengths]
        return sum(costs, PhaseFlops())
    except FlopwatchError:
        return executed


def example_batch(model: nn.Module, batch: Any, plan: Plan) -> Any:
    """What the model itself takes of a batch: packed rows as plain ones, nothing its `forward` does not know."""
    if isinstance(batch, Mapping):
        tensors = {name: value for name, value in batch.items() if name not in PACKING or _is_multimodal(value)}
        if set(tensors) <= {"attention_mask"}:
            return dummy_batch(unwrap(model), plan.batch_size, plan.seq_len or 1)
        parameters = _parameters(model)
        if parameters is not None and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            tensors = {name: value for name, value in tensors.items() if name in parameters}
        return tensors
    if isinstance(batch, tuple | list):
        parameters = _parameters(model)
        if parameters is not None and not any(p.kind is p.VAR_POSITIONAL for p in parameters.values()):
            batch = tuple(batch)[: len(parameters)]
    return batch


def _is_multimodal(positions: Any) -> bool:
    """Position ids of several axes belong to images; TRL packs a plain int beside its tensors."""
    return isinstance(positions, torch.Tensor) and positions.dim() > 2


def _parameters(model: nn.Module) -> Mapping[str, inspect.Parameter] | None:
    try:
        return inspect.signature(unwrap(model).forward).parameters
    except (TypeError, ValueError):
        return None
