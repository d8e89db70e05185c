"""Times forward and backward passes, so that the time between them has a name of its own.

A forward pass is an outermost call of a module, or a call of compiled code. A backward pass begins with the node that
made the output of such a call, and ends with torch's engine. What a step does outside of its passes and its optimizer
is the loss, reading values, or fetching the next batch.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any

from torch import Tensor

from flopwatch.monitor.pricing.calls import plain_iterator
from flopwatch.monitor.timing.step_clock import Segments, StepClock
from flopwatch.torch_internals.autograd import at_end_of_backward
from flopwatch.torch_internals.modules import is_in_transform

_MOST_TENSORS, _DEEPEST = 16, 4


class PassHooks:
    """Times the passes of the steps that the clock divides. Its methods run in the training and never raise.

    If a part of a backward pass was not seen, the passes of the step are unknown.
    """

    def __init__(self, step_clock: Callable[[], StepClock]) -> None:
        self._step_clock = step_clock
        self._passes: list[tuple[Any, Any]] = []
        self._began: Any = None
        self._in_backward = self._is_unclear = False
        self._forwards = self._regions = self._backwards = 0

    def take(self) -> Segments | None:
        """The passes of the step that ends now; None if they are not known."""
        # Code between the regions of one forward pass is part of it, but cannot be told from code after it.
        is_whole = not self._regions or self._regions == self._backwards
        is_known = not self._is_unclear and self._began is None and self._forwards and self._backwards and is_whole
        passes = tuple(self._passes) if is_known else None
        self._passes, self._began = [], None
        self._in_backward = self._is_unclear = False
        self._forwards = self._regions = self._backwards = 0
        return passes

    def forward_begins(self) -> None:
        clock = self._step_clock()
        if clock.divides and self._began is None:
            self._began = clock.timer.mark()

    def forward_ends(self, output: Any) -> None:
        """End a forward pass, and listen for the backward pass of its output."""
        if self._began is None or self._in_backward:
            return
        self._end()
        self._forwards += 1
        try:
            self._listen(output)
        except Exception:  # the output may be anything
            self._is_unclear = True

    def region_begins(self) -> Callable[[Any], None] | None:
        """Begin a call of compiled code; what is returned ends it."""
        self.forward_begins()
        if self._began is None or self._in_backward:
            return None
        self._regions += 1
        return self.forward_ends

    def gradient_arrived(self) -> None:
        """A parameter got its gradient. Outside of a backward pass that was seen, the passes are not known."""
        if not self._in_backward:
            self._is_unclear = True

    def _listen(self, output: Any) -> None:
        if is_in_transform():  # gradients are computed by a transform, not by the engine
            self._is_unclear = True
            return
        hook = partial(_backward_begins, weakref.ref(self))
        for node in {id(node): node for node in _nodes_of(output, _DEEPEST)}.values():
            node.register_prehook(hook)

    def backward_begins(self) -> None:
        clock = self._step_clock()
        if not clock.divides or self._began is not None:
            return
        self._began, self._in_backward = clock.timer.mark(), True
        # Queued once more when the engine ends, so that it runs after what DDP and FSDP do at the end.
        if not at_end_of_backward(lambda: at_end_of_backward(self._backward_ends)):
            self._is_unclear = True

    def _backward_ends(self) -> None:
        if self._in_backward:
            self._end()
            self._in_backward = False
            self._backwards += 1

    def _end(self) -> None:
        self._passes.append((self._began, self._step_clock().timer.mark()))
        self._began = None


def _backward_begins(hooks: "weakref.ref[PassHooks]", _: Any) -> None:
    found = hooks()
    if found is not None:
        with suppress(Exception):  # must not reach the training
            found.backward_begins()


def _nodes_of(output: Any, depth: int) -> Iterator[Any]:
    """The nodes that made the tensors of an output, without calling code of the user's classes."""
    if isinstance(output, Tensor):
        if output.grad_fn is not None:
            yield output.grad_fn
    elif depth and isinstance(output, dict | list | tuple):
        items = dict.values(output) if isinstance(output, dict) else plain_iterator(output)
        for item in islice(items, _MOST_TENSORS):
            yield from _nodes_of(item, depth - 1)
    elif depth:
        for item in islice(getattr(output, "__dict__", {}).values(), _MOST_TENSORS):
            yield from _nodes_of(item, depth - 1)
