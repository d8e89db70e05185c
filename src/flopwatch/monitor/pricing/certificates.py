"""Compares FLOPs that were counted while a step ran with those that the laws (formulas) give for its model calls.

Steps with the same calls and the same sizes are of one kind. Steps with the same calls, of any size, have one pattern.
If all counted steps of a pattern agree with the laws, nothing ran outside the model, so the laws are exact for all
sizes. If counts and laws differ, a step gets the FLOPs counted for its kind; they are exact once two counts are equal.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, Literal

from flopwatch.monitor.pricing.calls import CallKind, OutsideWork
from flopwatch.monitor.pricing.law_book import CallPrice, LawBook
from flopwatch.monitor.pricing.watched_step import StepCount, is_watched, is_watched_by_ranks, next_watched
from flopwatch.records.flops import PhaseFlops

Finding = Literal["agrees", "counted", "differs", "unseen"]
_MOST_KINDS, _MOST_PATTERNS = 512, 4096
_FIRST_ADAPTIVE = 6
"""After this many steps of a session, FLOPs can be counted in steps outside the schedule too (see `is_watched`)."""
_MOST_WATCHES, _SHARE_WATCHED = 24, 0.002
"""FLOPs are counted in up to 24 steps plus 0.2 % of all steps; beyond that, only in steps of the schedule."""
_MOST_WAITING = 64
_ENOUGH_COUNTS = 2
_ENOUGH_AGREEING = 3
"""Steps with the same calls are marked as exact once this many of them were counted and agree with the formulas."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the counted FLOPs of earlier steps show about the FLOPs of a step.

    Attributes:
        finding: How counted FLOPs compare with the formula's. `agrees`: equal in all counted steps with the same calls.
            `counted`: unequal in steps with the same calls and sizes, so `count` replaces the formula. `differs`:
            unequal in steps with the same calls but other sizes. `unseen`: no step with the same calls was counted.
        count: If `finding` is `counted`, the last count of a step with the same calls and sizes.
        reason: Why the step's FLOPs are not exact; None if they are.
    """

    finding: Finding
    count: StepCount | None = None
    reason: str | None = None


@dataclass
class _Ratios:
    """Range of the ratio of counted FLOPs to FLOPs by formula, over the counted steps with the same calls."""

    steps: int = 0
    unknown: int = 0
    low: float = inf
    high: float = -inf

    def add(self, ratio: float | None) -> None:
        self.steps += 1
        if ratio is None:
            self.unknown += 1
        else:
            self.low, self.high = min(self.low, ratio), max(self.high, ratio)


@dataclass
class _Counted:
    priced: int | None
    counts: list[StepCount] = field(default_factory=list)


class Certificates:
    """Keeps the results of all steps of a run whose FLOPs were counted as they ran."""

    def __init__(self) -> None:
        self._kinds: dict[Hashable, _Counted] = {}
        self._patterns: dict[Hashable, _Ratios] = {}
        self.runs_more = False
        """True once the counted FLOPs of a step differed from the FLOPs that the formulas (laws) give."""
        self.version = 0
        """Increased whenever the result of `verdict` may change."""
        self._graphs: dict[Hashable, int] = {}
        self._other_graphs: set[Hashable] = set()

    def look_at_graph(self, kind: Hashable, products: int, *, is_counted: bool) -> None:
        """If `is_counted`, store the number of matrix products in a loss graph; else compare it with the stored one."""
        if is_counted and len(self._graphs) < _MOST_KINDS:
            self._graphs[kind] = products
        elif self._graphs.get(kind, products) != products:
            self._other_graphs.add(kind)
            self.version += 1

    def add(
        self,
        kind: Hashable,
        pattern: Hashable,
        priced: PhaseFlops | None,
        count: StepCount,
        *,
        calls_are_sure: bool = True,
    ) -> None:
        """Add a step whose FLOPs were counted as it ran.

        Args:
            kind: The calls of the step, with sizes.
            pattern: The calls of the step, without sizes.
            priced: FLOPs of the calls according to the formulas; None if unknown.
            count: The counted FLOPs.
            calls_are_sure: Whether `priced` is exact. If so, a smaller `count` means that part of the step was missed.
        """
        if calls_are_sure and priced is not None and count.phases.forward < priced.forward and count.failure is None:
            count = replace(count, failure="a part of the step ran where it was not seen, such as another thread")
        self.version += 1
        if len(self._kinds) >= _MOST_KINDS:
            self._kinds.clear()
        total = None if priced is None else priced.total
        self._kinds.setdefault(kind, _Counted(total)).counts.append(count)
        is_whole = not count.uncounted and count.failure is None
        ratio = count.phases.total / total if total and is_whole else None
        if pattern not in self._patterns and len(self._patterns) >= _MOST_PATTERNS:
            del self._patterns[next(iter(self._patterns))]  # from now on, steps with this oldest pattern are not exact
        self._patterns.setdefault(pattern, _Ratios()).add(ratio)
        self.runs_more = self.runs_more or ratio != 1

    def needs_another(self, kind: Hashable, pattern: Hashable) -> bool:
        """Whether one more counted step with these calls (`kind`, `pattern`) could make their FLOPs exact."""
        known = self._kinds.get(kind)
        if known is not None and _differs(known):
            return len(known.counts) < _ENOUGH_COUNTS
        ratios = self._patterns.get(pattern)
        return ratios is None or ratios.steps < _ENOUGH_AGREEING

    def verdict(self, kind: Hashable, pattern: Hashable) -> Verdict:
        known = self._kinds.get(kind)
        if kind in self._other_graphs:
            reason = "the loss was computed with other matrix products than in the counted step with the same calls"
            return Verdict("differs", reason=reason)
        if known is not None and _differs(known):
            return _of_counts(known)
        ratios = self._patterns.get(pattern)
        if ratios is None:
            return Verdict("unseen", reason="no step with such calls was counted as it ran")
        if not ratios.unknown and ratios.low == ratios.high == 1:
            if ratios.steps >= _ENOUGH_AGREEING:
                return Verdict("agrees")
            return Verdict(
                "agrees", reason=f"only {ratios.steps} steps with such calls were counted as they ran so far"
            )
        is_known = ratios.unknown < ratios.steps
        spread = f"{ratios.low:.3g} to {ratios.high:.3g} times" if is_known else "not all of"
        return Verdict("differs", reason=f"counted steps with such calls ran {spread} the FLOPs of the model's calls")

    def node_counts_determine_costs(self, kind: tuple[Hashable, ...]) -> bool:
        """Whether the number of autograd's operations determines the FLOPs of steps whose FLOPs vary randomly.

        True for layers that are skipped at random, which changes the number of operations. False for a random size,
        which does not. To tell the two apart, this checks that counted steps with the same calls have equal FLOPs for
        equal numbers of operations, and that not all have the same FLOPs.
        """
        calls, _, *outside = kind
        alike = [
            known
            for key, known in self._kinds.items()
            if isinstance(key, tuple) and key[0] == calls and [*key[2:]] == outside
        ]
        costs = [{count.phases.total for count in known.counts} for known in alike]
        return all(len(cost) == 1 for cost in costs) and len(set().union(*costs)) > 1


def _differs(known: _Counted) -> bool:
    return any(
        count.phases.total != known.priced or count.uncounted or count.failure is not None for count in known.counts
    )


def _of_counts(known: _Counted) -> Verdict:
    last = known.counts[-1]
    if last.failure is not None:
        return Verdict("counted", last, f"counting such a step as it ran failed: {last.failure}")
    if last.uncounted:
        ops = ", ".join(last.uncounted)
        return Verdict("counted", last, f"the step runs ops without a formula ({ops}), so its FLOPs are a lower bound")
    totals = [count.phases.total for count in known.counts]
    if len(set(totals)) > 1:
        return Verdict(
            "counted",
            last,
            f"counted steps with these calls ran between {min(totals):,} and {max(totals):,} FLOPs: an estimate",
        )
    if len(totals) < _ENOUGH_COUNTS:
        return Verdict(
            "counted", last, "the step runs more than the model's calls, and such a step was counted only once so far"
        )
    return Verdict("counted", last, last.doubt)


@dataclass(frozen=True, slots=True)
class StepCalls:
    """How the model was called in a step.

    Attributes:
        kinds: The recorded calls. If none was recorded, the calls to expect from the batches.
        own_prices: For each call, its FLOPs if the call was counted separately, otherwise None.
        doubt: Why the calls are not fully known; None if they are.
        count: FLOPs of the step, if it was counted as it ran.
        book: The FLOP formulas (laws) at the time of the step.
        certificates: Results of the steps whose FLOPs were counted up to this step.
        nodes: Number of operations that autograd recorded, and how often some parameters received a gradient.
        outside: Hashes of the modules outside the model that the step called.
    """

    kinds: tuple[CallKind, ...] = ()
    own_prices: tuple[CallPrice | None, ...] = ()
    doubt: str | None = None
    count: StepCount | None = None
    book: LawBook | None = None
    certificates: Certificates | None = None
    nodes: tuple[int | None, int] = (None, 0)
    outside: OutsideWork = field(default_factory=OutsideWork)

    @property
    def kind(self) -> tuple[tuple[CallKind, ...], tuple[int | None, int], int | None]:
        """A key that is equal for steps that make the same calls with the same sizes."""
        return self.kinds, self.nodes, self.outside.sized

    def prices(self, book: LawBook) -> list[CallPrice] | None:
        """FLOPs of all calls; None if there are no calls or the FLOPs of one are unknown."""
        prices = [own or book.price(kind) for kind, own in zip(self.kinds, self.own_prices, strict=True)]
        return None if None in prices or not prices else [price for price in prices if price is not None]

    @property
    def pattern(self) -> tuple[object, ...]:
        """`kind` without sizes."""
        return tuple(kind.family for kind in self.kinds), self.nodes, self.outside.unsized


NO_CALLS = StepCalls()


class WatchPlan:
    """Chooses in which steps FLOPs are counted: by a schedule, and where too few similar steps were counted so far.

    Attributes:
        not_before: A step with a smaller index than this is counted only if the step before it requests that.
    """

    def __init__(self, *, is_alone: bool) -> None:
        """If `is_alone` is False, only the schedule chooses steps to count, so that all ranks count the same steps."""
        self._is_alone = is_alone
        self.not_before = 0
        self._watches = self._futile_watches = 0
        self._settled: tuple[Any, ...] = ()
        """The calls of the newest step that needs no further counting, and `Certificates.version` at that time."""
        self._last_met: dict[Any, int] = {}
        """For each kind of step whose FLOPs must be counted again, the index of its last step."""
        self._due: set[int] = set()
        """Indices of future steps to count, because a kind of step in `_last_met` is expected to recur there."""

    def forget(self) -> None:
        """Allow every kind of step to be counted again, because the FLOP formulas have changed."""
        self._settled = ()

    def take_turn(self, index: int, *, wants_next: bool) -> bool:
        """Whether FLOPs must be counted in the step that begins; `wants_next` is True if the last step requested it."""
        is_scheduled = is_watched if self._is_alone else is_watched_by_ranks
        if is_scheduled(index) or (self._is_alone and (wants_next or index in self._due)):
            self._due.discard(index)
            return True
        self.not_before = min([next_watched(index, is_scheduled), *(due for due in self._due if due > index)])
        return False

    def note_watch(self) -> None:
        self._watches += 1

    def note_futile(self) -> None:
        """Record a counted step in which the model did not run. After two of these, steps no longer request counts."""
        self._futile_watches += 1

    def would_another_count_help(self, calls: StepCalls, certificates: Certificates, steps: int) -> bool:
        """Whether FLOPs should be counted in the next step, because too few steps like the last one were counted.

        `calls` are the calls of the last step, `steps` is the number of steps so far.
        """
        if steps < _FIRST_ADAPTIVE or not self._is_alone:
            return False
        if self._watches >= _MOST_WATCHES + steps * _SHARE_WATCHED or self._futile_watches > 1:
            return False
        seen = *calls.kind, certificates.version
        if seen == self._settled:
            return False
        if not certificates.needs_another(calls.kind, calls.pattern):
            self._settled = seen
            return False
        return self._is_met_in_a_row(calls.kind, steps)

    def _is_met_in_a_row(self, kind: Any, steps: int) -> bool:
        """True if this kind of step is new or occurred twice in a row; otherwise, plan to count its next occurrence."""
        if len(self._last_met) >= _MOST_WAITING:
            self._last_met, self._due = {}, set()
        gap = steps - self._last_met.get(kind, steps)
        self._last_met[kind] = steps
        if gap > 1:
            self._due.add(steps - 1 + gap)
            self.not_before = min(self.not_before, steps - 1 + gap)
        return gap <= 1
