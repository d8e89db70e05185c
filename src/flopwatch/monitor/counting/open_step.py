"""A step of the training as it runs: its count, which parameters it trains, and what compiled code runs in it.

In a process that compiles, calls of modules are not seen, so that steps are told apart by the calls of compiled code
and by their batches, and what compiled code costs is counted from its graphs.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import islice
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from flopwatch.flops.tracing import regions
from flopwatch.flops.tracing.live import LiveStep, SeenRegion, StepCount, may_compile
from flopwatch.flops.tracing.region_counts import with_regions
from flopwatch.flops.tracing.scaling import Axes
from flopwatch.monitor.counting.batch_reader import BatchLayout, BatchReader, Reading
from flopwatch.monitor.counting.call_kinds import COMPILED, CallKind
from flopwatch.monitor.counting.calls import batch_of_call, failure_of
from flopwatch.monitor.counting.evidence import ENOUGH, StepKind
from flopwatch.records.flops import AttentionConvention, PhaseFlops
from flopwatch.torch_internals.autograd import compiled_graphs


class OpenStep:
    """A step that has begun. Its defaults are attributes of the class, so that a new step costs little.

    Attributes:
        batch: The batch, if the loop has passed it when it opened the step.
        layout: The layout of the micro-batch that runs, as far as it is known.
        nodes_before: How many operations autograd had recorded before.
        nodes_outside: How many of those since then belong to no step.
        may_count: Whether it may be counted as it runs.
        is_late: Whether the count began with the first call of a module, and not with the step.
        began_without_model: Whether the model was not known when it began.
        optimizer_call: The optimizer step that is under way, with its arguments.
    """

    layout: BatchLayout | None = None
    began = 0.0
    nodes_before: int | None = None
    nodes_outside = 0
    may_count = is_wanted = is_late = began_without_model = False
    live: LiveStep | None = None
    reason: str | None = None
    optimizer_call: tuple[Any, ...] | None = None

    def __init__(self, batch: Any = None) -> None:
        self.batch = batch

    def begin_count(self, attention: AttentionConvention, model: nn.Module | None) -> None:
        parameters = () if model is None else nn.Module.parameters(model)
        self.live = LiveStep(attention, parameters)
        if self.optimizer_call is not None and self.is_late:  # the step's first call comes from a closure
            self.live.enter_optimizer(*self.optimizer_call)

    def end_count(self, axes: Axes | None = None) -> StepCount | None:
        live, self.live = self.live, None
        return None if live is None else live.end(axes)

    def read_axes(self, reader: BatchReader) -> None:
        """Tell the count the shape of the micro-batch that the loop has passed."""
        if self.live is not None and self.batch is not None:  # a failure is reported when the step ends

            def read() -> None:
                self.layout = reader.read(self.batch).layout

            failure_of(read)
        if self.live is not None:
            self.live.set_axes(None if self.layout is None else self.layout.axes)

    def read_axes_of_call(
        self, reader: BatchReader, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Tell the count the shape of a call's arguments, for a loop that passes its batch only after the step."""
        live = self.live
        if live is not None and self.layout is None:
            failure_of(lambda: live.set_axes(reader.read(batch_of_call(module, args, kwargs)).layout.axes))


_MOST_PARAMETERS = 4096
_LISTENED_PARAMETERS = 4
"""Number of parameters with a gradient hook. The first, the last and two in between show which parts are trained."""
_MOST_BACKWARDS = 1 << 12


class TrainedModel:
    """The model, which is not kept alive.

    Attributes:
        model: Returns the model; None if it is gone.
        backwards: How many gradients each of the four parameters got, as digits of a number in base `_MOST_BACKWARDS`.
        state: A hash of which parameters were trained when `has_changed` was called.
    """

    def __init__(self, model: nn.Module, on_gradient: Callable[[], None] = lambda: None) -> None:
        self.model = weakref.ref(model)
        self.backwards = self.state = 0
        self._on_gradient = on_gradient
        self._parameters = [weakref.ref(p) for p in islice(nn.Module.parameters(model), _MOST_PARAMETERS)]
        self._flags: list[bool] | None = None
        self._handles: list[RemovableHandle] = []
        self._structure: int | None = None
        self.has_changed()

    def has_changed(self) -> bool:
        """Whether other parameters are trained than at the last call."""
        flags = [(p := ref()) is not None and p.requires_grad for ref in self._parameters]
        if flags == self._flags:
            return False
        self._flags, self.state = flags, hash(tuple(flags))
        self._listen()
        return True

    def has_other_parameters(self) -> bool:
        """Whether the model has other parameters than at the last call; False if it is gone."""
        model, before = self.model(), self._structure
        if model is None:
            return False
        parameters = (p for p in nn.Module.parameters(model) if not is_lazy(p))
        self._structure = hash(tuple((p.shape, p.dtype, p.requires_grad) for p in parameters))
        return before is not None and before != self._structure

    def stop(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _listen(self) -> None:
        self.stop()
        found = [p for ref in self._parameters if (p := ref()) is not None]
        trained = [p for p in found if p.requires_grad and p.is_leaf and type(p) is nn.Parameter]
        last = len(trained) - 1
        chosen = dict.fromkeys(last * part // (_LISTENED_PARAMETERS - 1) for part in range(_LISTENED_PARAMETERS))
        for part, index in enumerate(chosen if trained else ()):
            hook = partial(_count_backward, weakref.ref(self), _MOST_BACKWARDS**part)
            self._handles.append(trained[index].register_post_accumulate_grad_hook(hook))


def _count_backward(owner: "weakref.ref[TrainedModel]", of_part: int, _: Tensor) -> None:
    found = owner()
    if found is not None:
        found.backwards += of_part
        found._on_gradient()


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

    def counted(self, live: LiveStep, count: StepCount, axes: Axes | None) -> StepCount:
        """Add to a count what compiled code ran in it."""
        self._ran_nothing_else = False
        if not live.region_calls:
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
