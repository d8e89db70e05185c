"""A small real training on the CPU in which one thing can be changed, for tests that have to find the change.

    changed_training.py <change> [<width> [<folder>]]        changes: see CHANGES

With a folder, a TrainingMonitor is written in; without one, the script is meant for `flopwatch run`. Prints one line of
JSON behind the word RESULT: what the change cost by the script's own clock, and the sizes that it changes.
"""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

import flopwatch

WIDTH, SEQUENCES, LENGTH, STEPS = 32, 8, 64, 30
PER_STEP_SECONDS, ONCE_SECONDS = 0.4, 12.0
NESTED = 5
"""How often a recomputed layer runs again: checkpoints in checkpoints, to be more than the noise of a busy machine."""

CHANGES = {
    "loader": "input_wait",
    "collate": "input_wait",
    "forward": "passes",
    "backward": "passes",
    "optimizer": "optimizer",
    "logging": "host",
    "between the passes": "between",
    "between steps": "between",
    "evaluation": "eval",
    "checkpoint": "checkpoint",
    "pause": "pause",
    "start-up": "start_up",
    "recomputation": "passes",
    "more padding per batch": "passes",
    "smaller batch": "passes",
}
"""Each change, and the key that `flopwatch compare` has to name first."""


class Injected:
    """Sleeps where the change says so, and adds up how long that took."""

    def __init__(self, change: str) -> None:
        self.change, self.seconds, self.layer_calls = change, 0.0, 0

    def sleep(self, place: str, seconds: float = PER_STEP_SECONDS) -> None:
        with self.timed(place):
            if place == self.change:
                time.sleep(seconds)

    @contextmanager
    def timed(self, place: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        if place == self.change:
            self.seconds += time.perf_counter() - began


class Sentences(Dataset[dict[str, torch.Tensor]]):
    def __init__(self, injected: Injected, length: int) -> None:
        self.injected, self.length = injected, length

    def __len__(self) -> int:
        return STEPS * SEQUENCES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index % SEQUENCES == 0:
            self.injected.sleep("loader")
        mask = torch.ones(self.length, dtype=torch.long)
        if self.injected.change == "more padding per batch":
            mask[LENGTH:] = 0
        return {"input_ids": torch.randint(0, 100, (self.length,)), "attention_mask": mask}


class SlowBackward(torch.autograd.Function):
    """Passes its input on, and sleeps when its gradient comes back."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, injected: Injected) -> torch.Tensor:
        ctx.injected = injected
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.injected.sleep("backward")
        return gradients[0], None


class Model(nn.Module):
    def __init__(self, width: int, injected: Injected) -> None:
        super().__init__()
        self.injected = injected
        self.embedding = nn.Embedding(100, width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width)) for _ in range(2)
        )

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(input_ids)
        if self.injected.change == "backward":
            hidden = SlowBackward.apply(hidden, self.injected)
        self.injected.sleep("forward")
        for layer in self.layers:
            hidden = hidden + self._called(layer, hidden, NESTED if self.injected.change == "recomputation" else 0)
        loss: torch.Tensor = (hidden.square().mean(-1) * attention_mask).sum() / attention_mask.sum()
        return loss

    def _called(self, layer: nn.Module, hidden: torch.Tensor, times_again: int) -> Any:
        if times_again:
            return checkpoint(self._called, layer, hidden, times_again - 1, use_reentrant=True)
        self.injected.layer_calls += 1
        return layer(hidden)


class Adam(torch.optim.AdamW):
    def __init__(self, parameters: Any, injected: Injected) -> None:
        super().__init__(parameters)
        self.injected = injected

    def step(self, closure: Any = None) -> Any:
        self.injected.sleep("optimizer")
        return super().step(closure)


def train(change: str, width: int, folder: str | None) -> dict[str, Any]:
    injected = Injected(change)
    injected.sleep("start-up", ONCE_SECONDS)
    torch.manual_seed(0)
    model = Model(width, injected)
    optimizer = Adam(model.parameters(), injected)
    length = 4 * LENGTH if change == "more padding per batch" else LENGTH
    size = 1 if change == "smaller batch" else SEQUENCES

    def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        injected.sleep("collate")
        return {name: torch.stack([sample[name] for sample in samples][:size]) for name in samples[0]}

    loader: Any = DataLoader(Sentences(injected, length), batch_size=SEQUENCES, collate_fn=collate)
    monitor = None
    if folder is not None:
        monitor = flopwatch.TrainingMonitor(folder, model=model, log_every=10, sinks=[])
        loader = monitor.batches(loader)

    def phase(name: str) -> AbstractContextManager[None]:
        return nullcontext() if monitor is None else monitor.phase(name)

    tokens = real_tokens = steps = 0
    began = time.perf_counter()
    for number, batch in enumerate(loader):
        loss = model(**batch)
        injected.sleep("between the passes")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        injected.sleep("logging")
        if monitor is not None:
            monitor.log_step(number, loss=loss, batch=batch)
        tokens, real_tokens, steps = batch["input_ids"].numel(), int(batch["attention_mask"].sum()), steps + 1
        injected.sleep("between steps")
        if number in (STEPS // 2, STEPS - 5):
            with phase("eval"), torch.no_grad():
                model.eval()
                model(**batch)
                injected.sleep("evaluation", ONCE_SECONDS / 2)
                model(**batch)
                model.train()
            with phase("checkpoint"):
                injected.sleep("checkpoint", ONCE_SECONDS / 2)
            with phase("sampling"):
                injected.sleep("pause", ONCE_SECONDS / 2)
    seconds = time.perf_counter() - began
    if monitor is not None:
        monitor.close()
    sizes = {"tokens": tokens, "real_tokens": real_tokens, "layer_calls": injected.layer_calls}
    return {"injected_ms_per_step": 1000 * injected.seconds / steps, "ms_per_step": 1000 * seconds / steps, **sizes}


def main(change: str = "", width: str = str(WIDTH), folder: str | None = None) -> None:
    torch.set_num_threads(1)
    sys.stdout.write(f"RESULT {json.dumps(train(change, int(width), folder))}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
