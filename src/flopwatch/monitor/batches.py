"""Batches whose arrival is timed: `for batch in monitor.batches(loader)`."""

from collections.abc import Iterable, Iterator
from typing import Any, Generic, Protocol, TypeVar

Batch = TypeVar("Batch")


class WaitTimer(Protocol):
    """Is told when a batch is being fetched."""

    def begin_wait(self) -> bool:
        """False means that this one is not timed."""

    def end_wait(self, *, has_batch: bool = True) -> None:
        """The fetching has ended, with a batch or without."""


class TimedIterator(Generic[Batch]):
    """An iterator, with every `next` timed."""

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
    """A loader whose batches are timed. It has the loader's length and attributes, and can be gone through again."""

    def __init__(self, loader: Iterable[Batch], timer: WaitTimer) -> None:
        self._loader = loader
        self._timer = timer

    def __iter__(self) -> Iterator[Batch]:
        is_timed = self._timer.begin_wait()  # starting the loader's workers is waiting, too
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
