"""Whether prices explain what steps really ran: a few steps are counted as they run, and held against their price.

Pure arithmetic. A pattern is the calls of a step without their sizes: where every counted step of a pattern cost what
its calls cost by law, nothing ran besides, and the laws hold for the pattern's other sizes too. Where steps ran more, a
step kind (a pattern with its sizes) has the cost that was counted, once two counts agree.
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
"""Steps of a session before which only the schedule decides."""
_MOST_WATCHES, _SHARE_WATCHED = 24, 0.002
"""Steps that may be counted as they run because of a doubt: so many, and this share of all."""
_MOST_WAITING = 64
_ENOUGH_COUNTS = 2
_ENOUGH_AGREEING = 3
"""Counted steps of a pattern that must equal their price before the pattern's other steps count as exact."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is known of a step.

    Attributes:
        finding: `agrees`: steps like it ran what their calls cost. `counted`: this kind of step was counted as it ran.
            `differs`: steps like it ran more or less than their calls cost. `unseen`: none was counted.
        count: Of this kind of step, where it was counted and differs from its price.
        reason: Why its FLOPs are not exact; None when they are.
    """

    finding: Finding
    count: StepCount | None = None
    reason: str | None = None


@dataclass
class _Ratios:
    """The FLOPs of the counted steps of one pattern, each divided by the sum of the prices of its calls."""

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
    """What the counted steps of a run have shown."""

    def __init__(self) -> None:
        self._kinds: dict[Hashable, _Counted] = {}
        self._patterns: dict[Hashable, _Ratios] = {}
        self.runs_more = False
        """True once a counted step has cost more or less than its calls."""
        self.version = 0
        """Raised whenever a verdict may change."""
        self._graphs: dict[Hashable, int] = {}
        self._other_graphs: set[Hashable] = set()

    def look_at_graph(self, kind: Hashable, products: int, *, is_counted: bool) -> None:
        """Compare the products in the graph of a step's loss with those of a counted step of this kind."""
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
        """A step was counted as it ran.

        Args:
            kind: Of step.
            pattern: The same without sizes.
            priced: What its calls cost by law; None when that is not known.
            count: What ran.
            calls_are_sure: Whether the calls were seen, and their price is exact: then they must be in the count.
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
            del self._patterns[next(iter(self._patterns))]  # the oldest: its steps are no longer called exact
        self._patterns.setdefault(pattern, _Ratios()).add(ratio)
        self.runs_more = self.runs_more or ratio != 1

    def needs_another(self, kind: Hashable, pattern: Hashable) -> bool:
        """Whether one more count of such a step would settle what it costs."""
        known = self._kinds.get(kind)
        if known is not None and _differs(known):
            return len(known.counts) < _ENOUGH_COUNTS
        ratios = self._patterns.get(pattern)
        return ratios is None or ratios.steps < _ENOUGH_AGREEING

    def verdict(self, kind: Hashable, pattern: Hashable) -> Verdict:
        known = self._kinds.get(kind)
        if kind in self._other_graphs:
            reason = "the loss comes from other products than in the step of this kind that was counted"
            return Verdict("differs", reason=reason)
        if known is not None and _differs(known):
            return _of_counts(known)
        ratios = self._patterns.get(pattern)
        if ratios is None:
            return Verdict("unseen", reason="no step of this kind was counted as it ran")
        if not ratios.unknown and ratios.low == ratios.high == 1:
            if ratios.steps >= _ENOUGH_AGREEING:
                return Verdict("agrees")
            return Verdict("agrees", reason=f"only {ratios.steps} steps like it were counted as they ran so far")
        is_told = ratios.unknown < ratios.steps
        spread = f"{ratios.low:.3g} to {ratios.high:.3g} times" if is_told else "not all of"
        return Verdict(
            "differs", reason=f"steps like it that were counted as they ran had {spread} the FLOPs of the model's calls"
        )

    def node_counts_determine_costs(self, kind: tuple[Hashable, ...]) -> bool:
        """Whether what steers such a step shows in what is seen of every step.

        Layers that are left out by chance are missing among autograd's operations; a size that is drawn is not seen,
        and two counted steps may have drawn the same. So steps with the same calls must have been counted with other
        numbers of operations at another cost, and never with the same number at two costs.
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
        return Verdict("counted", last, f"the count of a step as it ran failed: {last.failure}")
    if last.uncounted:
        ops = ", ".join(last.uncounted)
        return Verdict("counted", last, f"the step runs ops without a formula ({ops}), so its FLOPs are a lower bound")
    totals = [count.phases.total for count in known.counts]
    if len(set(totals)) > 1:
        return Verdict(
            "counted",
            last,
            f"steps of this kind cost between {min(totals):,} and {max(totals):,} FLOPs: this is an estimate",
        )
    if len(totals) < _ENOUGH_COUNTS:
        return Verdict("counted", last, "the step runs more than the model's calls, and was counted only once so far")
    return Verdict("counted", last, last.doubt)


@dataclass(frozen=True, slots=True)
class StepCalls:
    """How the model was called in a step.

    Attributes:
        kinds: The calls, or, where none was seen, those that the given batches suggest.
        own_prices: Of calls that were counted for themselves, because values steer what they cost.
        doubt: Why the calls are not known, or not all; None when they are.
        count: What the step ran, where it was counted as it ran.
        book: The laws that held then.
        certificates: What counted steps had shown of them.
        nodes: Operations that autograd recorded in the step, and how often gradients reached the model.
        outside: Which other modules it called.
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
        """Identifies steps that run the same, as far as the monitor sees."""
        return self.kinds, self.nodes, self.outside.sized

    def prices(self, book: LawBook) -> list[CallPrice] | None:
        """Prices of all its calls; None when there are no calls, or one has no price."""
        prices = [own or book.price(kind) for kind, own in zip(self.kinds, self.own_prices, strict=True)]
        return None if None in prices or not prices else [price for price in prices if price is not None]

    @property
    def pattern(self) -> tuple[object, ...]:
        """`kind` without sizes."""
        return tuple(kind.family for kind in self.kinds), self.nodes, self.outside.unsized


NO_CALLS = StepCalls()


class WatchPlan:
    """Which steps of a session are counted as they run: those of the schedule, and those that would settle a doubt.

    Attributes:
        not_before: Index of a step; no earlier one is to be counted, unless the step before it asked for that.
    """

    def __init__(self, *, is_alone: bool) -> None:
        """With `is_alone` False, all ranks count the same steps, those of the schedule."""
        self._is_alone = is_alone
        self.not_before = 0
        self._watches = self._futile_watches = 0
        self._settled: tuple[Any, ...] = ()
        """The newest kind of step of which another count would show nothing more."""
        self._last_met: dict[Any, int] = {}
        """When a kind of step was last met that should be counted once more."""
        self._due: set[int] = set()
        """Steps on which such a kind is expected again."""

    def forget(self) -> None:
        """The laws have changed, so every kind of step may need another count."""
        self._settled = ()

    def take_turn(self, index: int, *, wants_next: bool) -> bool:
        """Whether the step that begins is to be counted; `wants_next` when the one before asked for it."""
        is_scheduled = is_watched if self._is_alone else is_watched_by_ranks
        if is_scheduled(index) or (self._is_alone and (wants_next or index in self._due)):
            self._due.discard(index)
            return True
        self.not_before = min([next_watched(index, is_scheduled), *(due for due in self._due if due > index)])
        return False

    def note_watch(self) -> None:
        self._watches += 1

    def note_futile(self) -> None:
        """A step was counted and nothing was seen of the model."""
        self._futile_watches += 1

    def would_another_count_help(self, calls: StepCalls, certificates: Certificates, steps: int) -> bool:
        """Whether the next step should be counted as it runs, because steps like this one were not, or only once.

        Args:
            calls: Of the step that ends.
            certificates: What counted steps have shown.
            steps: How many have ended.
        """
        if steps < _FIRST_ADAPTIVE or not self._is_alone:  # the first are spread, so that rows in between have rates
            return False
        if self._watches >= _MOST_WATCHES + steps * _SHARE_WATCHED or self._futile_watches > 1:
            return False
        seen = *calls.kind, certificates.version
        if seen == self._settled:  # the same as the step before
            return False
        if not certificates.needs_another(calls.kind, calls.pattern):
            self._settled = seen
            return False
        return self._is_met_in_a_row(calls.kind, steps)

    def _is_met_in_a_row(self, kind: Any, steps: int) -> bool:
        """Whether the next step is likely of this kind; one that recurs after a gap is expected after the same gap."""
        if len(self._last_met) >= _MOST_WAITING:
            self._last_met, self._due = {}, set()
        gap = steps - self._last_met.get(kind, steps)
        self._last_met[kind] = steps
        if gap > 1:
            self._due.add(steps - 1 + gap)
            self.not_before = min(self.not_before, steps - 1 + gap)
        return gap <= 1
