"""Records passes and fetches of batches on the tape.

A forward pass is an outermost call of a module, or a call of compiled code. A backward pass begins with the node that
made the output of such a call, and ends with torch's engine. So the time between passes has a name of its own: what a
step does outside of its passes and its optimizer is the loss, reading values, or fetching the next batch.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from flopwatch.guard import Guard
from flopwatch.monitor.timing.tape import BACKWARD, BACKWARD_END, FORWARD, FORWARD_END, GRADIENT, REGION, UNSEEN, Tape
from flopwatch.torch_internals.autograd import at_end_of_backward
from flopwatch.torch_internals.modules import is_in_transform

_MOST_TENSORS, _DEEPEST = 16, 4


class PassHooks:
    """Records the passes of the steps in which the tape times them. Its methods run in the training and never raise."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self.guard = Guard("passes", lambda *_: tape.note(UNSEEN))

    def forward_begins(self, code: int = FORWARD) -> None:
        tape = self._tape
        if tape.times_parts and tape.in_pass is None:
            tape.in_pass = FORWARD
            tape.add(code)

    def forward_ends(self, output: Any) -> None:
        """End a forward pass, and listen for the backward pass of its output."""
        tape = self._tape
        if tape.in_pass != FORWARD:
            return
        tape.in_pass = None
        tape.add(FORWARD_END)
        with self.guard:  # the output may be anything
            self._listen(output)

    def region_begins(self) -> Callable[[Any], None] | None:
        """Begin a call of compiled code. Returns a function that ends it, or None."""
        self.forward_begins(REGION)
        return self.forward_ends if self._tape.in_pass == FORWARD else None

    def gradient_arrived(self) -> None:
        """A parameter got its gradient, which shows that a backward pass runs."""
        if self._tape.times_parts:
            self._tape.note(GRADIENT)

    def backward_begins(self) -> None:
        tape = self._tape
        if not tape.times_parts or tape.in_pass is not None:
            return
        tape.in_pass = BACKWARD
        tape.add(BACKWARD)
        if not at_end_of_backward(self._own_backward_ends):
            tape.note(UNSEEN)

    def _own_backward_ends(self) -> None:
        # Queued once more, so that it runs after what DDP and FSDP do at the end.
        at_end_of_backward(self._backward_ends)

    def _backward_ends(self) -> None:
        if self._tape.in_pass == BACKWARD:
            self._tape.in_pass = None
            self._tape.add(BACKWARD_END)

    def _listen(self, output: Any) -> None:
        if is_in_transform():  # gradients are computed by a transform, not by the engine
            self._tape.note(UNSEEN)
            return
        hook = partial(_backward_begins, weakref.ref(self))
        for node in {id(node): node for node in _nodes_of(output, _DEEPEST)}.values():
            node.register_prehook(hook)


def _backward_begins(hooks: "weakref.ref[PassHooks]", _: Any) -> None:
    found = hooks()
    if found is not None:
        with found.guard:
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


def plain_iterator(value: list[Any] | tuple[Any, ...]) -> Iterator[Any]:
    return list.__iter__(value) if isinstance(value, list) else tuple.__iter__(value)


Batch = TypeVar("Batch")


class WaitTimer(Protocol):
    """Measures how long it takes to fetch a batch."""

    def begin_wait(self) -> bool:
        """Begin to time a fetch. Returns False if this fetch is not timed."""

    def end_wait(self, *, has_batch: bool = True) -> None:
        """End the fetch that `begin_wait` began to time; `has_batch` says whether the fetch returned a batch."""


class TimedIterator(Generic[Batch]):
    __slots__ = ("_iterator", "_timer")

    def __init__(self, iterator: Iterator[Batch], timer: WaitTimer) -> None:
        self._iterator = iterator
        self._timer = timer

    def __iter__(self) -> "TimedIterator[Batch]":
        return self

    def __next__(self) -> Batch:
        is_timed = self._timer.begin_wait()
        has_batch = False
        try:
            batch = next(self._iterator)
            has_batch = True
        finally:
            if is_timed:
                self._timer.end_wait(has_batch=has_batch)
        return batch


class TimedBatches(Generic[Batch]):
    """A loader that times each fetch. It has the loader's length and attributes, and can be iterated again."""

    def __init__(self, loader: Iterable[Batch], timer: WaitTimer) -> None:
        self._loader = loader
        self._timer = timer

    def __iter__(self) -> Iterator[Batch]:
        is_timed = self._timer.begin_wait()  # the start of the loader's workers is input wait, too
        try:
            iterator = iter(self._loader)
        finally:
            if is_timed:
                self._timer.end_wait(has_batch=False)
        return TimedIterator(iterator, self._timer)

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
