"""What a trace counted, event by event, so that the events of one layer can be told again for another."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from flopwatch.flops.tally import Tally


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """All that a tally asks of a tensor."""

    shape: torch.Size | tuple[int, ...]
    dtype: torch.dtype
    is_nested: bool = False


def _facts(tensor: torch.Tensor) -> TensorFacts:
    return TensorFacts(() if tensor.is_nested else tensor.shape, tensor.dtype, tensor.is_nested)


@dataclass(frozen=True, slots=True)
class Event:
    """One call of a method of `Tally`; `module` is the path it is put down to, None where there is none."""

    method: str
    module: str | None
    op: str
    rest: tuple[Any, ...]
    options: tuple[tuple[str, Any], ...] = ()

    def moved(self, old: str, new: str) -> "Event":
        """The same event in the layer at `new`."""
        if self.module is None or not (self.module == old or self.module.startswith(old + ".")):
            return self
        return Event(self.method, new + self.module[len(old) :], self.op, self.rest, self.options)

    def add_to(self, tally: Tally) -> None:
        if self.module is None:
            getattr(tally, self.method)(self.op, *self.rest)
        else:
            getattr(tally, self.method)(self.op, self.module, *self.rest, **dict(self.options))


Tell = Callable[[], Iterable[Event]]


class EventLog(Tally):
    """Takes what a tally takes, and keeps it in order.

    Args:
        listen: Is told of each event when it happens.
    """

    def __init__(self, listen: Callable[[Event], None] = lambda event: None) -> None:
        super().__init__()
        self._listen = listen
        self._entries: list[Event | Tell] = []

    def add(self, op: str, module: str, *rest: Any, **options: Any) -> None:
        self._keep(Event("add", module, op, rest, tuple(options.items())))

    def add_uncounted(self, op: str, module: str, tensors: Iterable[torch.Tensor], *rest: Any, **options: Any) -> None:
        facts = tuple(map(_facts, tensors))
        self._keep(Event("add_uncounted", module, op, (facts, *rest), tuple(options.items())))

    def note(self, text: str | None) -> None:
        if text:
            self._keep(Event("note", None, text, ()))

    def _keep(self, event: Event) -> None:
        self._entries.append(event)
        self._listen(event)

    def tell_later(self, tell: Tell) -> None:
        """Events that belong here and are known at the end only."""
        self._entries.append(tell)

    def tally(self) -> Tally:
        """Everything added up."""
        tally = Tally()
        self.tell(tally)
        return tally

    def tell(self, tally: Tally) -> None:
        """Everything told to another tally, in order."""
        for entry in self._entries:
            for event in [entry] if isinstance(entry, Event) else entry():
                event.add_to(tally)
