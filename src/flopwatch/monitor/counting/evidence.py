"""What live counts prove about the FLOPs of steps (pure). A live count is made op by op, while the step runs.

Steps that make the same calls with the same sizes are of one kind, and cost what was counted for their kind. For sizes
that were not counted, a formula fitted to the counts is used (`flops/live_formula.py`). Both are called exact once
counts agree with each other. If a later count differs, the steps since the last one that agreed are doubted.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from flopwatch.flops.live_formula import Calls, Formula, FormulaFit, divided_calls
from flopwatch.flops.tracing.counter import counted_convention
from flopwatch.flops.tracing.live import StepCount
from flopwatch.flops.tracing.scaling import Axes, Scale
from flopwatch.language import Said, counted
from flopwatch.monitor.counting.call_kinds import BATCH, CallKind
from flopwatch.monitor.counting.estimates import EstimatedCosts
from flopwatch.records.flops import AttentionConvention, PhaseFlops
from flopwatch.records.run import Provenance

_MOST_KINDS = 4096
_MOST_RANGES = 64
ENOUGH = 3
"""Uncounted steps of a kind are exact once so many counted steps of it agree."""
UNPROVEN = Said("equal calls have changed their cost before, and the run ended before another count")
UNKNOWN = -1
_NODES, _BACKWARDS, _UNKNOWN = "nodes", "backwards", "unknown"


@dataclass(frozen=True, slots=True)
class StepKind:
    """The kind of a step, counted or not. Steps of one kind are expected to run the same FLOPs.

    Attributes:
        nodes: Number of operations that autograd recorded; None if unknown.
        backwards: How often backward passes reached some parameters; UNKNOWN before the model was found.
        batches: Which parameters are trained, and shapes of the monitor's batches if no module was called.
    """

    calls: tuple[CallKind, ...]
    nodes: int | None = None
    backwards: int = 0
    batches: Hashable = ()

    def sized_calls(self) -> Calls:
        return [(kind.family, kind.sizes) for kind in self.calls]


class _Claims:
    """Uncounted steps that were called exact since the last count that agreed.

    Attributes:
        first: The first such step of the run; None if there was none.
        broken_at: The last step whose count differed. Steps before it that have no row so far are not exact, because
            it is not known with which of them the change came.
    """

    def __init__(self) -> None:
        self.first: int | None = None
        self.broken_at = -1
        self._ranges: list[list[int]] = []

    def add(self, step: int) -> None:
        if self.first is None:
            self.first = step
        if self._ranges and self._ranges[-1][1] >= step - 1:
            self._ranges[-1][1] = max(step, self._ranges[-1][1])
        else:
            self._ranges.append([step, step])
        if len(self._ranges) > _MOST_RANGES:
            self._ranges = [[self._ranges[0][0], self._ranges[-1][1]]]

    def take(self) -> tuple[tuple[int, int], ...]:
        ranges, self._ranges = self._ranges, []
        return tuple((first, last) for first, last in ranges)


@dataclass
class _Known:
    count: StepCount
    before: StepCount | None = None
    agreeing: int = 0
    changes: int = 0
    counts: int = 0
    low: int = 0
    high: int = 0
    total: int = 0
    claims: _Claims = field(default_factory=_Claims)

    @property
    def needed(self) -> int:
        """How many counts must agree: more after each change, because a cost that changed may change again."""
        return ENOUGH if not self.changes else min(2 ** (self.changes + 1), 8)

    @property
    def is_settled(self) -> bool:
        return self.agreeing >= self.needed

    def add(self, count: StepCount) -> bool:
        """Add a count; return whether it agrees with the one before."""
        flops = count.phases.total
        self.low, self.high = (min(self.low, flops), max(self.high, flops)) if self.counts else (flops, flops)
        self.counts += 1
        self.total += flops
        agrees = self.count.agrees(count)
        self.agreeing = self.agreeing + 1 if agrees else 1
        if not agrees:
            self.changes += 1
            self.before = self.count
        self.count = count
        return agrees


@dataclass(frozen=True, slots=True)
class KnownFlops:
    """The FLOPs of a step, as far as counts show them; `reason` says why they are not exact."""

    count: StepCount | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class StepTrace:
    """What a step ran.

    Attributes:
        kind: None if steps are not counted as they run.
        evidence: What was known of the model when the step ran.
        count: The step's FLOPs, if it was counted as it ran.
        was_counted: Whether counting has slowed the step down.
        is_partial: Whether something may have run before the count began.
        reason: Why the FLOPs are not exact or not known; None if no such reason is known.
        estimates: Estimates of `model(batch)`, if steps are not counted as they run.
    """

    kind: StepKind | None = None
    evidence: "Evidence | None" = None
    count: StepCount | None = None
    was_counted: bool = False
    is_partial: bool = False
    reason: str | None = None
    estimates: EstimatedCosts | None = None


NOTHING = StepTrace()


@dataclass(frozen=True, slots=True)
class Doubt:
    """Rows that were called exact and may be wrong: ranges of steps, and what a later count has shown."""

    steps: tuple[tuple[int, int], ...]
    shown: str


class Evidence:
    """Live counts by kind of step, and the formulas fitted to them.

    Attributes:
        uncounted: Names of ops without a formula that counted steps ran.
        coverage: The smallest share of products with a formula in a counted step.
        failure: Why the last step that could not be counted could not be; None if all could.
        starts_with_call: Whether counted steps ran nothing before their first call of a module; None if unknown. If so,
            a count may begin with that call.
        usual: What the last step ran, if it was not counted and needs no count. An equal step is not examined.
    """

    def __init__(self) -> None:
        self.counts = 0
        self.starts_with_call: bool | None = None
        self.usual: StepTrace | None = None
        self.uncounted: tuple[str, ...] = ()
        self.coverage = 1.0
        self.ops: set[str] = set()
        self.failure: str | None = None
        self._known: dict[StepKind, _Known] = {}
        self._fits: dict[Hashable, tuple[FormulaFit, _Claims]] = {}
        self._changed: dict[Hashable, int] = {}
        """By families of calls, how often equal calls have changed their cost. Other kinds with them may change too."""
        self.settled_calls: set[CallKind] = set()
        """Calls with which a step began whose FLOPs need no further count."""

    def provenance(self, mode: str, wanted: AttentionConvention) -> Provenance | None:
        """How the FLOPs are found; None before the first count. The counts may have another convention than wanted."""
        if not self.counts:
            return None
        attention, note = counted_convention(wanted, self.ops)
        notes: tuple[str, ...] = (
            (Said("ops without a formula: {ops}", ops=", ".join(self.uncounted)),) if self.uncounted else ()
        )
        notes += (note,) if note else ()
        return Provenance(0, mode, "step", not self.uncounted, attention, self.coverage, notes=notes)

    def add(self, kind: StepKind, step: int, count: StepCount, *, is_late: bool = False) -> Doubt | None:
        """Add the count of a step; return the rows that it contradicts, if any.

        A count that began with the first call of a module (`is_late`) proves nothing about what ran before.
        """
        self.counts += 1
        self.usual = None
        if count.failure is not None:
            return None
        self.uncounted = tuple(sorted({*self.uncounted, *count.uncounted}))
        self.coverage = min(self.coverage, count.coverage)
        self.ops |= count.by_op.keys()
        predicted = self._predicted_count(kind)
        known = self._known.get(kind) or self._begun(kind, count)
        before, was_settled = known.count, known.is_settled
        agrees = known.add(count)
        doubt = None
        if not agrees:
            known.claims.broken_at = step
            doubt = self._compared(known, step, before, count)
            self._changed[_families(kind)] = self._changed.get(_families(kind), 0) + 1
        if agrees and not is_late:
            known.claims.take()
        if is_late:
            known.claims.add(step)
        if predicted is not None and not predicted.agrees(count):
            # The formula was wrong here, so all steps that are called exact because of it are in doubt.
            known.claims.broken_at = step
            if doubted := self._claimed_by_formula(kind, step):
                known_doubted = () if doubt is None else doubt.steps
                doubt = Doubt(tuple(sorted({*known_doubted, *doubted})), _shown(step, predicted, count))
        if predicted is not None and predicted.agrees(count) and not was_settled:
            known.agreeing = max(known.agreeing, known.needed)
        for key in _keys(kind):
            self._fit_of(key)[0].add(kind.sized_calls(), _outputs(kind, count))
        if kind.calls:
            (self.settled_calls.add if known.is_settled else self.settled_calls.discard)(kind.calls[0])
        return doubt

    def _begun(self, kind: StepKind, count: StepCount) -> _Known:
        if len(self._known) >= _MOST_KINDS:
            self._known.clear()
        known = self._known[kind] = _Known(count, changes=self._changed.get(_families(kind), 0))
        return known

    def _claimed_by_formula(self, kind: StepKind, broken_at: int) -> list[tuple[int, int]]:
        doubted: list[tuple[int, int]] = []
        for key in _keys(kind):
            claims = self._fit_of(key)[1]
            doubted += claims.take()
            claims.broken_at = broken_at
        return doubted

    def _compared(self, known: _Known, step: int, before: StepCount, count: StepCount) -> Doubt | None:
        ranges = known.claims.take()
        # A cost that has changed twice comes and goes, so no step between two counts is proven.
        if known.changes > 1 and known.claims.first is not None:
            ranges = ((known.claims.first, step - 1),)
            known.claims.first = None
        return Doubt(ranges, _shown(step, before, count)) if ranges else None

    def unproven(self) -> Doubt | None:
        """At the end of a run, the steps that no later count proves, of kinds whose cost has changed.

        These are the steps after the last count. If too few counts agreed since the change, the cost may come and go,
        so that two counts prove nothing of the steps between them: then all steps before the change are doubted.
        """
        ranges: list[tuple[int, int]] = []
        for known in self._known.values():
            claims = known.claims
            if known.changes:
                ranges += claims.take()
            if known.changes and not known.is_settled and claims.first is not None:
                ranges.append((claims.first, claims.broken_at - 1))
                claims.first = None
        return Doubt(tuple(sorted(ranges)), UNPROVEN) if ranges else None

    def needs_count(self, kind: StepKind) -> bool:
        """Whether a count of one more step of this kind may make its FLOPs exact."""
        known = self._known.get(kind)
        if known is not None:
            return known.agreeing < min(known.needed, 2 * ENOUGH) and not self._is_predicted(kind, known)
        return self._predicted_count(kind) is None

    def knows_call(self, call: CallKind) -> bool:
        """Whether a step that begins with this call needs no count because of its sizes."""
        if call in self.settled_calls:
            return True
        fitted_formulas = (fit.formula for fit, _ in self._fits.values())
        return any(formula is not None and formula.covers(call.family, call.sizes) for formula in fitted_formulas)

    def verdict(self, kind: StepKind, step: int) -> KnownFlops:
        """The FLOPs of an uncounted step. If they are called exact, the step is noted, to be doubted if necessary."""
        known = self._known.get(kind) or self._alike(kind)
        if known is None:
            count = self._predicted_count(kind)
            if count is None:
                return KnownFlops(None, self._why_unknown(kind))
            claims = self._fit_of(_keys(kind)[0])[1]
            if step < claims.broken_at:
                return KnownFlops(count, _changed(claims.broken_at))
            claims.add(step)
            return KnownFlops(count)
        count = known.count
        if not count.is_whole:
            ops = ", ".join(count.uncounted)
            return KnownFlops(
                count, Said("the step runs ops without a formula ({ops}), so its FLOPs are a lower bound", ops=ops)
            )
        if known.is_settled or self._is_predicted(kind, known):
            if step < known.claims.broken_at:
                return KnownFlops(known.before or count, _changed(known.claims.broken_at))
            known.claims.add(step)
            return KnownFlops(count, count.doubt)
        if known.low != known.high:
            reason = Said(
                "equal calls cost different FLOPs: {counted} counted steps ran between {low:,} and {high:,}, and this "
                "is their mean",
                counted=known.counts,
                low=known.low,
                high=known.high,
            )
            return KnownFlops(_mean(known), reason)
        reason = counted(
            known.counts, "such a step was counted only once so far", "such a step was counted only {n} times so far"
        )
        return KnownFlops(count, reason)

    def _alike(self, kind: StepKind) -> _Known | None:
        """What was counted of matching steps, for a step that shows less: the first one, or one that compiled code."""
        if kind.backwards != UNKNOWN and kind.nodes is not None:
            return None
        # The batches of the monitor come last among the calls, and are not known for the first step of a run.
        found = [
            known
            for other, known in self._known.items()
            if other.calls in (kind.calls, (*kind.calls, *(call for call in other.calls if call.name == BATCH)))
            and (kind.nodes is None or other.nodes == kind.nodes)
            and (kind.backwards == UNKNOWN or (other.backwards, other.batches) == (kind.backwards, kind.batches))
        ]
        return found[0] if found and all(each.count.agrees(found[0].count) for each in found) else None

    def _is_predicted(self, kind: StepKind, known: _Known) -> bool:
        """Whether a fitted formula predicts the only count of this kind."""
        predicted = None if known.changes else self._predicted_count(kind)
        return predicted is not None and predicted.agrees(known.count)

    def _why_unknown(self, kind: StepKind) -> str:
        if self.failure is not None and not self._known:
            return Said("no step could be counted: {why}", why=self.failure)
        if not kind.calls:
            return Said("no step of this kind was counted")
        names = ", ".join(dict.fromkeys(call.name for call in kind.calls))
        if any(other.calls == kind.calls for other in self._known):
            text = Said(
                "no step with these calls, and as many operations and gradients, was counted so far (it calls {names})"
            )
        elif any(_families(other) == _families(kind) for other in self._known):
            text = Said("no step with these sizes was counted so far (it calls {names})")
        else:
            text = Said("no step like this one was counted so far (it calls {names})")
        return text.filled(names=names)

    def divided(self, kind: StepKind, axes: Sequence[Axes]) -> list[Mapping[Scale, int]] | None:
        """How the FLOPs of each micro-batch depend on lengths, by the formula; `axes` are the micro-batches' shapes.

        None if the formula does not hold for one of them alone, or if it is not known which calls belong to which.
        """
        found = self._fitted_formula(kind)
        parts = divided_calls(kind.sized_calls(), len(axes))
        if found is None or parts is None:
            return None
        for own, part in zip(axes, parts, strict=True):
            if not {own.batch, *own.lengths} <= {size for _, sizes in part for size in sizes}:
                return None
        each = [found[0].values(part) for part in parts]
        return None if None in each else [_count_of(values).by_scale for values in each if values is not None]

    def _predicted_count(self, kind: StepKind) -> StepCount | None:
        found = self._fitted_formula(kind)
        return None if found is None else _count_of(found[1])

    def _fitted_formula(self, kind: StepKind) -> tuple[Formula, Mapping[Hashable, int]] | None:
        """The formula that holds for a step, and its values."""
        for key in _keys(kind):
            fit = self._fits.get(key)
            formula = None if fit is None else fit[0].formula
            values = None if formula is None else formula.values(kind.sized_calls())
            if formula is None or values is None or values.get(_BACKWARDS, 0) != kind.backwards:
                continue
            if kind.nodes is None or values[_NODES] == kind.nodes:
                return formula, values
        return None

    def _fit_of(self, key: Hashable) -> tuple[FormulaFit, _Claims]:
        if key not in self._fits and len(self._fits) >= _MOST_KINDS:
            self._fits.clear()
        return self._fits.setdefault(key, (FormulaFit(), _Claims()))


def _families(kind: StepKind) -> Hashable:
    return frozenset(call.family for call in kind.calls), kind.batches


def _keys(kind: StepKind) -> tuple[Hashable, Hashable]:
    """Keys of the formulas for such steps: one for the same number of autograd's operations, and one for any."""
    return (_families(kind), kind.nodes, kind.backwards), _families(kind)


def _outputs(kind: StepKind, count: StepCount) -> dict[Hashable, int]:
    outputs: dict[Hashable, int] = {}
    for name, flops in count.by_dtype.items():
        outputs |= {(name, phase): getattr(flops, phase) for phase in PhaseFlops.__slots__}
    for scale, needed in count.by_scale.items():
        general = replace(scale, axes=None)
        outputs[general] = outputs.get(general, 0) + needed
    return {**outputs, _NODES: kind.nodes or 0, _BACKWARDS: kind.backwards, _UNKNOWN: int(not count.knows_executed)}


def _count_of(values: Mapping[Hashable, int]) -> StepCount:
    types: dict[str, dict[str, int]] = {}
    by_scale: dict[Scale, int] = {}
    for name, value in values.items():
        if isinstance(name, tuple):
            types.setdefault(name[0], {})[name[1]] = value
        elif isinstance(name, Scale):
            by_scale[name] = value
    by_dtype = {name: PhaseFlops(**phases) for name, phases in types.items()}
    phases = sum(by_dtype.values(), PhaseFlops())
    return StepCount(phases, by_dtype, by_scale=by_scale, knows_executed=not values.get(_UNKNOWN))


def _mean(known: _Known) -> StepCount:
    """The last count, scaled to the mean of all counts: an estimate."""
    total, mean = known.count.phases.total or 1, known.total / known.counts

    def scaled(flops: PhaseFlops) -> PhaseFlops:
        return PhaseFlops(*(round(getattr(flops, phase) * mean / total) for phase in PhaseFlops.__slots__))

    by_dtype = {name: scaled(flops) for name, flops in known.count.by_dtype.items()}
    return replace(known.count, phases=sum(by_dtype.values(), PhaseFlops()), by_dtype=by_dtype, by_scale={})


def _changed(step: int) -> str:
    return Said(
        "step {step} ran other FLOPs than equal calls before, and it is not known with which step that began", step=step
    )


def _shown(step: int, before: StepCount, now: StepCount) -> str:
    """What differs between two counts of equal calls, in words."""
    ops = [op for op in {**before.by_op, **now.by_op} if before.by_op.get(op) != now.by_op.get(op)]
    where = Said("FLOPs (in {ops})", ops=", ".join(sorted(ops)[:3])) if ops and before.by_op else "FLOPs"
    return Said(
        "step {step} ran {now:,} {flops}, although equal calls had run {before:,} until then",
        step=step,
        now=now.phases.total,
        flops=where,
        before=before.phases.total,
    )
