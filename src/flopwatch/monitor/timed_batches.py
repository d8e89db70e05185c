"""A loader whose fetches are timed."""

from collections.abc import Iterable, Iterator
from typing import Any, Generic, Protocol, TypeVar

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
