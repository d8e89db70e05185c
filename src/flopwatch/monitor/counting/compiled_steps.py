"""What is different in steps of a process that compiles.

Calls of modules are not seen there, so that steps are told apart by the calls of compiled code and by their batches,
and what compiled code costs is counted from its graphs.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from flopwatch.flops.tracing import regions
from flopwatch.flops.tracing.live import LiveStep, SeenRegion, StepCount, may_compile
from flopwatch.flops.tracing.observed import ObservedStep
from flopwatch.flops.tracing.region_counts import with_regions
from flopwatch.flops.tracing.scaling import Axes
from flopwatch.monitor.counting.batch_reader import Reading
from flopwatch.monitor.counting.call_kinds import COMPILED, CallKind
from flopwatch.monitor.counting.evidence import ENOUGH, StepKind
from flopwatch.records.flops import AttentionConvention, PhaseFlops
from flopwatch.torch_internals.autograd import compiled_graphs

_MOST_BATCHES = 4096


class CompiledSteps:
    """What is known of steps in a process that compiles, besides their calls.

    Attributes:
        batches: The batches that the monitor was given in the step.
    """

    def __init__(
        self, attention: AttentionConvention, in_count_phase: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self.batches: list[CallKind] = []
        self._attention, self._in_count_phase = attention, in_count_phase
        self._met: Counter[CallKind] = Counter()
        self._graphs_before = 0
        self._ran_nothing_else = False
        self._known: dict[Any, bool] = {}
        """For families of compiled code, whether counted steps ran no product outside of it."""
        self._before_grad: list[int] = []
        """Products without gradients with which the last two counted steps began."""

    def begin_step(self) -> None:
        self._graphs_before = compiled_graphs() if may_compile() and not regions.state.is_calling else 0

    def has_compiled(self) -> bool:
        """Whether code was compiled in the step, which records operations too."""
        return may_compile() and compiled_graphs() != self._graphs_before

    def take_batches(self) -> list[CallKind]:
        batches, self.batches = self.batches, []
        return batches

    def is_new(self, batch: CallKind) -> bool:
        """Whether such a batch began a step only a few times so far."""
        if len(self._met) >= _MOST_BATCHES:
            self._met.clear()
        self._met[batch] += 1
        # One more than enough, because the first step may compile code, and then differs from the others.
        return self._met[batch] <= ENOUGH + 1

    def counted(self, live: LiveStep | ObservedStep, count: StepCount, axes: Axes | None) -> StepCount:
        """Add to a count what compiled code ran in it."""
        self._ran_nothing_else = False
        if not isinstance(live, LiveStep) or not live.region_calls:
            return count
        once = all(seen.backwards == seen.has_grad and seen.phase == "forward" for seen in live.region_calls)
        self._ran_nothing_else = once and not count.phases.total and not count.uncounted and not count.doubt
        with self._in_count_phase():
            return with_regions(count, live.region_calls, self._attention, axes)

    def has_evaluated(self, count: StepCount) -> bool:
        """Whether a step that was counted began with an evaluation outside of compiled code, whose calls are not seen.

        Products without gradients that came first in three counts, and were equal, are taken for a part of the step.
        """
        before, self._before_grad = self._before_grad, [*self._before_grad[-1:], count.before_grad]
        return may_compile() and bool(count.before_grad) and before != [count.before_grad] * 2

    def note(self, kind: StepKind) -> None:
        """Note that the newest count is of a step of this kind."""
        self._known[_families(kind)] = self._ran_nothing_else and self._known.get(_families(kind), True)

    def by_graphs(self, kind: StepKind, readings: Sequence[Reading]) -> StepCount | None:
        """Count a step that runs only compiled code from the graphs of this code; None if that fails."""
        compiled = [call for call in kind.calls if call.name == COMPILED]
        found = [(regions.by_number.get(call.family[1]), call) for call in compiled]  # type: ignore[index]
        # All micro-batches make the same number of calls, so the calls are divided evenly among them.
        axes = [reading.layout.axes for reading in readings] if readings and not len(found) % len(readings) else [None]
        seen = []
        for index, (region, call) in enumerate(found):
            if region is None:
                return None
            own = axes[index * len(axes) // len(found)]
            seen.append(
                SeenRegion(region, call.sizes, call.has_grad, "forward", own, False, backwards=int(call.has_grad))
            )
        with self._in_count_phase():
            count = with_regions(StepCount(PhaseFlops()), seen, self._attention, axes_of(readings))
        return count if count.failure is None else None

    def runs_nothing_else(self, kind: StepKind) -> bool:
        """Whether counted steps with such calls ran no product outside of compiled code."""
        return kind.calls[:1] != () and kind.calls[0].name == COMPILED and self._known.get(_families(kind)) is True


def _families(kind: StepKind) -> Any:
    return tuple(call.family for call in kind.calls), kind.backwards


def axes_of(readings: Sequence[Reading]) -> Axes | None:
    """The shape of the step's micro-batches; None if they differ."""
    shapes = {reading.layout.axes for reading in readings}
    return shapes.pop() if len(shapes) == 1 else None
