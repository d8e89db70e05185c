"""A loader that sleeps, and knows itself how long the training waited for it."""

import time
from collections.abc import Iterator

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

WAIT_SECONDS = 0.03
WORK_SECONDS = 0.03
"""Of one micro-batch."""
MICRO_BATCHES = 48


class SlowBatches(IterableDataset[torch.Tensor]):
    """Ready-made batches; `waits` are the seconds that each of them took."""

    def __init__(self, count: int = MICRO_BATCHES, seconds: float = WAIT_SECONDS) -> None:
        self._count = count
        self._seconds = seconds
        self.waits: list[float] = []

    def __iter__(self) -> Iterator[torch.Tensor]:
        for _ in range(self._count):
            began = time.perf_counter()
            time.sleep(self._seconds)
            batch = torch.randn(4, 8)
            self.waits.append(time.perf_counter() - began)
            yield batch

    def loader(self) -> DataLoader[torch.Tensor]:
        return DataLoader(self, batch_size=None)


class SlowLinear(nn.Linear):
    """A model whose forward takes its time."""

    def __init__(self) -> None:
        super().__init__(8, 8)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        time.sleep(WORK_SECONDS)
        return super().forward(batch)


class Truth:
    """The share of the steps' time that was spent waiting, by the clocks of the loader and of this loop.

    `step_ends` are moments; the first step is left out, as it has no step before it.
    """

    def __init__(self, slow: SlowBatches, accumulation: int) -> None:
        self._slow = slow
        self._accumulation = accumulation
        self.step_ends: list[float] = []

    def step_ended(self) -> None:
        self.step_ends.append(time.perf_counter())

    def percent(self, seconds_outside: float) -> float:
        """Without what was told as time outside steps: a busy machine may hold the loop up between two of them."""
        steps = len(self.step_ends)
        waited = sum(self._slow.waits[self._accumulation : steps * self._accumulation])
        return 100 * waited / (self.step_ends[-1] - self.step_ends[0] - seconds_outside)
