"""The FLOP laws of a run: formulas for the FLOPs of a call, fitted to counts when a new kind of call is made."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn

from flopwatch.clock import Clock
from flopwatch.errors import FlopwatchError, InputError
from flopwatch.flops.batch_layout import SAMPLES, Grid, take_sample
from flopwatch.flops.count import is_padded, with_full_masks
from flopwatch.flops.fit import fit_flops_law
from flopwatch.flops.law import PHASES, FlopLaw, StepShape
from flopwatch.flops.methods import MethodChoice, count_as_is
from flopwatch.flops.steering import CHANCE
from flopwatch.flops.tracing.passes import LossFn
from flopwatch.library_internals import attention_implementation
from flopwatch.monitor.config import MonitorConfig
from flopwatch.monitor.output import Notify
from flopwatch.monitor.pricing.batch_reader import Work
from flopwatch.monitor.pricing.calls import CallKind
from flopwatch.records.flops import AttentionConvention, FlopCount, PhaseFlops
from flopwatch.torch_internals import recorded_operations

_SHARE_FOR_NEW_SHAPES = 0.01
_LEAST_ALLOWANCE_SECONDS = 10.0
_SHARE_FOR_CHECKS = 0.0005
_DRAWS = 8
"""If a model's FLOPs are random, they are counted this many times, to estimate their mean and range."""


@dataclass(frozen=True, slots=True)
class CallPrice:
    """FLOPs of a call of the model, its backward pass included.

    Attributes:
        executed: FLOPs by phase, including padding and recomputation.
        by_dtype: FLOPs by compute type.
        law: The law (formula) that gave the FLOPs; None if this shape was counted.
        shape: The shape for which the law was evaluated.
        reason: Why the FLOPs are not exact; None if they are.
        is_steered: True if the FLOPs depend on random numbers or activations, so equal calls can differ in FLOPs.
    """

    executed: PhaseFlops
    by_dtype: Mapping[str, PhaseFlops] = field(default_factory=dict)
    law: FlopLaw | None = None
    shape: StepShape | None = None
    reason: str | None = None
    is_steered: bool = False


@dataclass(frozen=True, slots=True)
class LawOffer:
    """The FLOP formulas (laws) that the logging rank sends to the other ranks."""

    laws: Mapping[Any, Sequence[FlopLaw]]
    packed_runs_apart: bool | None


class LawBook:
    """Holds the laws (formulas for the FLOPs of calls), and the FLOPs of every kind of call.

    Counting slows the training down, so its time is limited, except for the first law. All later counts together may
    take as long as the first law (at least 10 s) plus 1 % of the run's time; checks may take 0.05 % of the run's time.
    Calls that are not counted, because the time is used up, are logged without FLOPs.

    Attributes:
        count_seconds: Time spent counting so far.
        refused: Number of calls that were not counted, because the time for counting was used up.
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
        self._laws: dict[Any, list[FlopLaw]] = {}
        # The keys are weak references, so that an entry vanishes when `CallListener` drops the entry's `CallKind`.
        self._prices: WeakKeyDictionary[CallKind, CallPrice] = WeakKeyDictionary()
        self._spreads: WeakKeyDictionary[CallKind, tuple[int, int]] = WeakKeyDictionary()
        self._costs_by_nodes: WeakKeyDictionary[CallKind, dict[int, int]] = WeakKeyDictionary()
        self._hidden: WeakSet[CallKind] = WeakSet()
        self._packed_runs_apart: bool | None = None
        self._first_seconds = 0.0
        self._check_seconds = 0.0
        self.count_seconds = 0.0
        self.refused = 0

    @property
    def laws(self) -> list[FlopLaw]:
        return [law for laws in self._laws.values() for law in laws]

    def price(self, kind: CallKind) -> CallPrice | None:
        """FLOPs of a call of this kind; None if they are unknown, so that they must be counted."""
        known = self._prices.get(kind)
        if known is None:
            known = self._by_known_law(kind)
            if known is not None:
                self._prices[kind] = known
        return known

    def is_per_batch(self, kind: CallKind) -> bool:
        """Whether FLOPs must be counted for each call separately, because they depend on tensor values."""
        return any(law.per_batch for law in self._laws.get(kind.family, ()))

    def learn(self, model: nn.Module, kind: CallKind, example: Any) -> CallPrice | None:
        """Count the FLOPs of this call and fit a law (formula); None if the time for counting is used up."""
        if not self._may_count():
            self.refused += 1
            return None
        with self._paid():
            price = self._learnt(model, kind, example)
        self._prices[kind] = price
        self._packed_runs_apart = "flash" in attention_implementation(model)
        return price

    def count_call(self, model: nn.Module, kind: CallKind, example: Any) -> CallPrice | None:
        """Count a call whose FLOPs depend on tensor values; estimate its FLOPs if the time for counting is used up."""
        if not self._may_count():
            return self._spread_price(kind)
        with self._paid():
            count = self._count(model, kind, example)
        return self._noted_count(kind, count)

    def offer(self) -> LawOffer:
        """Return the laws to send to the other ranks: all that have a formula."""
        laws = {
            family: [replace(law, count_shape=None) for law in laws if law.coefficients]
            for family, laws in self._laws.items()
        }
        return LawOffer({family: own for family, own in laws.items() if own}, self._packed_runs_apart)

    def adopt(self, offer: LawOffer) -> None:
        self._laws |= {family: list(laws) for family, laws in offer.laws.items()}
        self._packed_runs_apart = offer.packed_runs_apart

    def renewed(self) -> "LawBook":
        """Return a `LawBook` for a changed model: without laws (formulas), but with the counting time used so far."""
        book = LawBook(self._clock, **self._options)
        book._began, book._first_seconds, book._check_seconds = self._began, self._first_seconds, self._check_seconds
        book.count_seconds, book.refused = self.count_seconds, self.refused
        return book

    def check(self, model: nn.Module, kind: CallKind, example: Any, *, within_allowance: bool) -> bool | None:
        """Count this call's FLOPs and return whether its law agrees; None if there is no exact law or no time left."""
        price = self.price(kind)
        if price is None or price.reason or (within_allowance and not self._may_check()):
            return None
        before = self.count_seconds
        with self._paid():
            grids = _grids_of(example)
            executed = price.executed
            if price.law is not None and price.law.sample_grids and price.shape is not None and grids:
                executed = price.law.cost(replace(price.shape, grids=grids))
            agrees = self._is_count_of(executed, model, kind, example)
        self._check_seconds += self.count_seconds - before
        return agrees

    def with_images(self, price: CallPrice, grids: Sequence[Grid] | None) -> CallPrice | None:
        """FLOPs of a call with images of these sizes; `price` itself if the law does not depend on image sizes."""
        law, shape = price.law, price.shape
        if law is None or shape is None or not law.sample_grids or not law.coefficients or grids is None:
            return price
        if shape.grids == tuple(grids):
            return price
        other = replace(shape, grids=tuple(grids))
        return replace(price, executed=law.cost(other), by_dtype=law.cost_by_dtype(other), shape=other)

    def needed(self, price: CallPrice, work: Work) -> tuple[PhaseFlops, PhaseFlops, str | None]:
        """Return a call's FLOPs without padding, its executed FLOPs, and why padding could not be left out, or None."""
        executed, law, shape = price.executed, price.law, price.shape
        if work.documents is None:
            return executed, executed, None
        unclear = "model FLOPs include padding and attention across packed documents, as no formula separates them"
        if law is None or shape is None or shape.seq_len is None or not law.coefficients:
            return executed, executed, unclear
        grids = shape.grids or None
        try:
            if work.lengths is not None:
                rows = _rows(law, shape, work)
                return law.phase_flops_of_rows(rows, image_grids=grids), executed, None
            alone = law.phase_flops_of_documents(
                work.documents, longest=shape.seq_len, rows=shape.batch_size, others=shape.others, image_grids=grids
            )
        except FlopwatchError:
            return executed, executed, unclear
        # Flash attention computes each packed document alone, so the executed FLOPs are those of the documents.
        return alone, (alone if self._packed_runs_apart else executed), None

    def _by_known_law(self, kind: CallKind) -> CallPrice | None:
        for law in self._laws.get(kind.family, ()):
            values = None if law.layout is None or law.per_batch else law.layout.match(kind.description)
            if values is None or not law.coefficients:
                continue
            shape = _shape(law, values)
            if law.covers_shape(shape):
                return _price_by(law, shape)
        return None

    def _learnt(self, model: nn.Module, kind: CallKind, batch: Any) -> CallPrice:
        laws = self._laws.setdefault(kind.family, [])
        if not laws:
            laws.append(self._fitted(model, kind, batch))
        elif any(law.per_batch for law in laws):
            return self._noted_count(kind, self._count(model, kind, batch))
        elif not self._has_widened(laws, model, kind, batch):
            return _price_of(self._count(model, kind, batch))
        known = self._by_known_law(kind)
        if known is not None:
            return known
        count = self._count(model, kind, batch)
        if laws[-1].per_batch:
            return self._steered_price(model, kind, batch, count, laws[-1])
        return _price_of(count)

    def _fitted(self, model: nn.Module, kind: CallKind, batch: Any) -> FlopLaw:
        options: dict[str, Any] = {"autocast": kind.autocast, "training": kind.has_grad, **self._options}
        law = fit_flops_law(model, batch, **options)
        if law.coefficients or law.per_batch or not is_padded(batch):
            return law
        unpadded = fit_flops_law(model, with_full_masks(batch), **options)
        values = None if unpadded.layout is None else unpadded.layout.match(kind.description)
        if values is None or not unpadded.coefficients:
            return law
        return unpadded if self._follows(unpadded, model, kind, batch, values) else law

    def _follows(self, law: FlopLaw, model: nn.Module, kind: CallKind, batch: Any, values: Mapping[str, int]) -> bool:
        """Whether the law gives this call's FLOPs."""
        return self._is_count_of(_formula(law, _shape(law, values)), model, kind, batch)

    def _is_count_of(self, flops: PhaseFlops, model: nn.Module, kind: CallKind, batch: Any) -> bool:
        """Whether a count of this call gives these FLOPs. Those that a padded call recomputes may be others.

        Torch may choose another attention kernel for a padded batch, whose backward pass recomputes more or fewer FLOPs
        than that of the unpadded rows that a law is fitted on. Then the batch is counted without its padding too. The
        model FLOPs are the same, and the recomputed FLOPs of such a step are known once it is counted as it runs.
        """
        counted = _phases(self._count(model, kind, batch))
        if counted == flops or not is_padded(batch):
            return counted == flops
        if (counted.forward, counted.backward) != (flops.forward, flops.backward):
            return False
        return _phases(self._count(model, kind, with_full_masks(batch))) == flops

    def _steered_price(self, model: nn.Module, kind: CallKind, batch: Any, count: FlopCount, law: FlopLaw) -> CallPrice:
        if CHANCE not in (*count.steered_by, *count.values_read):
            return self._noted_count(kind, count)
        counts = [count, *(self._count_another_draw(model, kind, batch, seed) for seed in range(1, _DRAWS))]
        totals = [one.model_flops for one in counts]
        mean = PhaseFlops(*(_mean([getattr(_phases(one), name) for one in counts]) for name in PhaseFlops.__slots__))
        reason = (
            f"the FLOPs depend on random numbers: this is the mean of {_DRAWS} counts between {min(totals):,} and "
            f"{max(totals):,} FLOPs"
        )
        dtypes = dict.fromkeys(count.by_dtype, mean) if len(count.by_dtype) == 1 else {}
        return CallPrice(mean, dtypes, reason=reason, is_steered=True)

    def _count_another_draw(self, model: nn.Module, kind: CallKind, batch: Any, seed: int) -> FlopCount:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self._count(model, kind, batch)

    def _noted_count(self, kind: CallKind, count: FlopCount) -> CallPrice:
        """Return the FLOPs counted for one call, and update the lowest and highest count of this kind of call."""
        total = count.forward_flops + count.backward_flops
        low, high = self._spreads.get(kind, (total, total))
        self._spreads[kind] = min(low, total), max(high, total)
        steered = {*count.steered_by, *count.values_read}
        price = _price_of(count)
        if CHANCE in steered or count.method == "step":
            low, high = self._spreads[kind]
            reason = (
                f"the FLOPs depend on random numbers or activations: counts were between {low:,} and {high:,} FLOPs"
            )
            price = replace(price, reason=reason, is_steered=True)
        self._prices[kind] = price
        return price

    def _spread_price(self, kind: CallKind) -> CallPrice | None:
        """The FLOPs of the last counted call of this kind, as an estimate; None if none was counted."""
        known = self._prices.get(kind)
        if known is None:
            self.refused += 1
            return None
        low, high = self._spreads.get(kind, (0, 0))
        reason = f"an estimate between {low:,} and {high:,} FLOPs, because the time for counting each batch is used up"
        return replace(known, reason=reason)

    def _has_widened(self, laws: list[FlopLaw], model: nn.Module, kind: CallKind, batch: Any) -> bool:
        """If a law (formula) gives the call's counted FLOPs, make it valid for the call's sizes; False if none does."""
        for index, law in enumerate(laws):
            values = None if law.layout is None or not law.coefficients else law.layout.match(kind.description)
            if values is None or law.sample_grids != _grids_of_one(batch, values):
                continue
            wider = self._widened(law, model, kind, batch, values)
            if wider is not None:
                laws[index] = wider
                return True
        return False

    def _widened(
        self, law: FlopLaw, model: nn.Module, kind: CallKind, batch: Any, values: Mapping[str, int]
    ) -> FlopLaw | None:
        """If counts agree with a law, extend its range to `values`, and to twice each value if it also holds there."""
        if not self._follows(law, model, kind, batch, values):
            return None
        domain = dict(law.domain)
        assert law.layout is not None
        sample = take_sample(model, with_full_masks(batch) if is_padded(batch) else batch, law.layout)
        for name, value in values.items():
            low, high = domain.get(name, (value, value))
            domain[name] = (min(low, value), max(high, value))
            if value <= high or (name == SAMPLES and law.method != "trace"):
                continue
            others = values if name == SAMPLES else {**values, SAMPLES: 1}
            sizes = (2 * value, 2 * value - 1, value + (value + 1) // 2)
            if all(self._agrees(law, model, kind, sample, {**others, name: size}) for size in sizes):
                domain[name] = (domain[name][0], 2 * value)
        return replace(law, domain=domain, seq_lens=domain.get("s", law.seq_lens))

    def _agrees(self, law: FlopLaw, model: nn.Module, kind: CallKind, sample: Any, values: Mapping[str, int]) -> bool:
        try:
            count = self._count(model, kind, sample.batch(values), law.method)
        except FlopwatchError:  # the size exceeds the model's maximum length
            return False
        return _phases(count) == _formula(law, _shape(law, values))

    def _count(self, model: nn.Module, kind: CallKind, batch: Any, method: Any = None) -> FlopCount:
        options = self._options if method is None else {**self._options, "method": method}
        before = recorded_operations() or 0
        count = count_as_is(model, batch, training=kind.has_grad, autocast=kind.autocast, **options)
        self._note_nodes(kind, (recorded_operations() or 0) - before, count)
        return count

    def _note_nodes(self, kind: CallKind, nodes: int, count: FlopCount) -> None:
        if self.is_per_batch(kind):
            known = self._costs_by_nodes.setdefault(kind, {}).setdefault(nodes, count.hardware_flops)
            if known != count.hardware_flops:
                self._hidden.add(kind)

    def hides_cost(self, kind: CallKind) -> bool:
        """Whether two counted calls of this kind had equally many autograd nodes, but different FLOPs."""
        return kind in self._hidden

    def _may_count(self) -> bool:
        if not self._laws:
            return True
        extra = self.count_seconds - self._first_seconds - self._check_seconds
        return extra <= max(self._first_seconds, _LEAST_ALLOWANCE_SECONDS) + _SHARE_FOR_NEW_SHAPES * self._elapsed()

    def _may_check(self) -> bool:
        return self._check_seconds <= _SHARE_FOR_CHECKS * self._elapsed()

    def _elapsed(self) -> float:
        return self._clock() - self._began

    @contextmanager
    def _paid(self) -> Iterator[None]:
        """A context that adds the time spent in it to `count_seconds`."""
        began = self._clock()
        try:
            yield
        finally:
            seconds = self._clock() - began
            self.count_seconds += seconds
            self._first_seconds = self._first_seconds or seconds


def _shape(law: FlopLaw, values: Mapping[str, int]) -> StepShape:
    samples = values.get(SAMPLES, 1)
    others = tuple((name, values[name]) for name in sorted(values) if name not in (SAMPLES, "s"))
    return StepShape(samples, values.get("s"), law.sample_grids * samples, others)


def _formula(law: FlopLaw, shape: StepShape) -> PhaseFlops:
    """Evaluate the law (formula), even for sizes outside the range for which it is valid."""
    return replace(law, domain={}).cost(shape)


def _price_by(law: FlopLaw, shape: StepShape) -> CallPrice:
    reason = None if law.exact else "; ".join(law.doubts) or "the formula for the FLOPs is not exact"
    return CallPrice(law.cost(shape), law.cost_by_dtype(shape), law, shape, reason)


def _price_of(count: FlopCount) -> CallPrice:
    reason = None
    if count.method == "estimate":
        reason = "the count is an estimate"
    elif count.uncounted:
        ops = ", ".join(sorted({op.op for op in count.uncounted}))
        reason = f"ops without a formula are not in the count ({ops}), so it is a lower bound"
    return CallPrice(_phases(count), count.by_dtype, reason=reason)


def _phases(count: FlopCount) -> PhaseFlops:
    return PhaseFlops(count.forward_flops, count.backward_flops, count.recompute_flops)


def _mean(values: Sequence[int]) -> int:
    return round(sum(values) / len(values))


def _rows(law: FlopLaw, shape: StepShape, work: Work) -> list[dict[str, int]]:
    lengths, targets = work.lengths or (), work.target_lengths
    rows = [{"s": length, **dict(shape.others)} for length in lengths]
    if targets is not None and len(targets) == len(rows) and "t" in dict(shape.others):
        for row, target in zip(rows, targets, strict=True):
            row["t"] = target
    return rows


def _grids_of(batch: Any) -> tuple[Grid, ...] | None:
    grid = batch.get("image_grid_thw") if isinstance(batch, Mapping) else None
    return None if grid is None else tuple((int(t), int(h), int(w)) for t, h, w in grid.tolist())


def _grids_of_one(batch: Any, values: Mapping[str, int]) -> tuple[Grid, ...]:
    grids = _grids_of(batch) or ()
    return grids[: len(grids) // max(1, values.get(SAMPLES, 1))]


@dataclass
class FlopMode:
    """How a run computes its FLOPs. The modes differ in how FLOP formulas (laws) are made and checked.

    Attributes:
        name: `estimate`, `profiler`, `smart` or `hybrid`; `flops_fn` if the user's function gives the FLOPs.
        book: The laws of the run; None if flopwatch counts nothing.
        frequency: Steps between two checks of a law; 0 means never.
        within_allowance: Whether the time for checks is limited.
        later: If `book` has only estimates, an empty book that replaces it at the first check; otherwise None.
        method: The name of the method for the log if there are no laws.
        notes: Remarks for the log's record of how FLOPs are found.
    """

    name: str
    book: LawBook | None
    frequency: int = 0
    within_allowance: bool = True
    later: LawBook | None = None
    method: Literal["flops_fn"] | None = None
    notes: tuple[str, ...] = ()

    def is_check_due(self, step: int) -> bool:
        return self.book is not None and self.frequency > 0 and step > 0 and step % self.frequency == 0

    def facts(self) -> dict[str, Any]:
        """Fields of the log's record about FLOP counting. `law` is the FLOP formula; {} unless there is exactly one."""
        laws = self.book.laws if self.book is not None else []
        known = [law.coverage for law in laws if law.coverage is not None]
        return {
            "method": laws[0].method if laws else self.method,
            "exact": bool(laws) and all(map(_is_exact, laws)),
            "coverage": min(known) if known else None,
            "law": _as_text(laws[0]) if len(laws) == 1 else {},
            "notes": tuple(dict.fromkeys([*self.notes, *(note for law in laws for note in law.notes)])),
        }


def choose_mode(
    config: MonitorConfig, clock: Clock, loss_fn: LossFn | None, flops_fn: Callable[[Any], int] | None, notify: Notify
) -> FlopMode:
    """Return the configured mode, or the mode `flops_fn` if the user gave such a function."""
    if flops_fn is not None:
        note = "model FLOPs are those of the user's flops_fn; executed FLOPs are not known"
        return FlopMode("flops_fn", None, method="flops_fn", notes=(note,))
    try:
        return make_mode(config, clock, loss_fn)
    except InputError as error:
        if config.strict:
            raise
        notify("error", "flops_unknown", f"there will be no FLOPs and no MFU: {error}")
        return FlopMode(config.mode, None, notes=(str(error),))


def make_mode(config: MonitorConfig, clock: Clock, loss_fn: LossFn | None) -> FlopMode:
    def book(method: Any) -> LawBook:
        return LawBook(clock, method=method, attention=config.attention, loss_fn=loss_fn)

    if config.mode == "estimate":
        return FlopMode("estimate", book("estimate"))
    if config.mode == "profiler":
        return FlopMode("profiler", book("auto"), config.flops_profile_freq, within_allowance=False)
    if config.mode == "hybrid":
        reason = "mode hybrid: this version reads no hardware counters"
        if not config.fallback_to_profiler:
            raise InputError(f"{reason}, and fallback_to_profiler is off; set it to true or choose another mode")
        note = f"{reason}; FLOPs are counted as in mode profiler"
        return FlopMode("hybrid", book("auto"), config.flops_profile_freq, within_allowance=False, notes=(note,))
    frequency = config.recalibration_frequency if config.calibration_enabled else 0
    if config.initial_profiling:
        return FlopMode("smart", book("auto"), frequency)
    return FlopMode("smart", book("estimate"), frequency, later=book("auto"))


def _is_exact(law: FlopLaw) -> bool:
    """Whether a law gives exact FLOPs. Without a formula, each new batch shape is counted, which can be exact too."""
    is_counted = not law.coefficients and law.method != "estimate" and law.coverage in (None, 1.0)
    return law.exact or (is_counted and not law.per_batch and not law.doubts)


def _as_text(law: FlopLaw) -> dict[str, dict[str, str]]:
    return {
        phase: {term: str(value) for term, value in law.coefficients[phase].items() if value}
        for phase in PHASES
        if law.coefficients
    }
