"""A step of the training as it runs."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from flopwatch.flops.tracing.live import LiveStep, StepCount
from flopwatch.flops.tracing.observed import ObservedStep
from flopwatch.flops.tracing.scaling import Axes
from flopwatch.monitor.counting.batch_reader import BatchLayout, BatchReader
from flopwatch.monitor.counting.calls import batch_of_call, failure_of
from flopwatch.records.flops import AttentionConvention


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
    live: LiveStep | ObservedStep | None = None
    reason: str | None = None
    optimizer_call: tuple[Any, ...] | None = None

    def __init__(self, batch: Any = None) -> None:
        self.batch = batch

    def begin_count(self, attention: AttentionConvention, model: nn.Module | None, *, observes: bool) -> None:
        parameters = () if model is None else nn.Module.parameters(model)
        self.live = ObservedStep(attention) if observes else LiveStep(attention, parameters)
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
