"""How many steps must be counted as they run until the FLOPs of new shapes are known, and are they right?

    python benchmarks/live_formulas.py [--only NAME ...] [--learning 40] [--shapes 20]

Each architecture of `testbeds.architectures` trains on batches of random shapes with a `TrainingMonitor`, and a second
time from the same seed under a counter that knows nothing of flopwatch. Prints a table in Markdown. The exit status is
1 if a step that is called exact is wrong.
"""

import argparse
import json
import logging
import random
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from flopwatch import TrainingMonitor
from testbeds.architectures import ARCHITECTURES, Architecture, image_batch, qwen_vl_batch
from zoo.truth import ProductCounter

Batch = dict[str, Any]


class StepCounter(ProductCounter):
    """Knows the products of experts too, for which torch has no formula."""

    def _flops(self, packet: Any, args: Any, kwargs: Any, out: Any) -> int:
        if packet is torch.ops.aten._grouped_mm:
            left, right = args[:2]
            rows = left.shape[-2] if right.ndim == 2 else left.numel() // left.shape[-1]
            return int(2 * rows * left.shape[-1] * right.shape[-1])
        return super()._flops(packet, args, kwargs, out)


# Batches of random shapes


def _texts(architecture: Architecture, draw: random.Random) -> Batch:
    return architecture.batch(draw.randint(1, 6), draw.randint(18, 64))


def _images(architecture: Architecture, draw: random.Random) -> Batch:
    return image_batch(draw.randint(2, 6), 0, size=32 * draw.randint(1, 4))  # batch norm needs two


def _segmented_images(architecture: Architecture, draw: random.Random) -> Batch:
    size = 32 * draw.randint(1, 3)
    return image_batch(draw.randint(1, 4), 0, size=size, labels=(size, size))


def _images_in_patches(architecture: Architecture, draw: random.Random) -> Batch:
    grid = (1, 2 * draw.randint(1, 5), 2 * draw.randint(1, 5))
    return qwen_vl_batch(draw.randint(1, 3), draw.randint(30, 80), grid)


def _waves(architecture: Architecture, draw: random.Random) -> Batch:
    batch = draw.randint(1, 4)
    return {"input_values": torch.randn(batch, draw.randint(1000, 2400)), "labels": torch.randint(1, 30, (batch, 5))}


DRAWN: dict[str, Callable[[Architecture, random.Random], Batch]] = {
    "resnet": _images,
    "convnext": _images,
    "segformer": _segmented_images,
    "qwen2_vl": _images_in_patches,
    "qwen2_5_vl": _images_in_patches,
    "wav2vec2": _waves,
}
"""All others are given a batch size and a length, which the model of images alone ignores."""


def drawn_batch(architecture: Architecture, draw: random.Random) -> Batch:
    return DRAWN.get(architecture.name, _texts)(architecture, draw)


# One architecture


@dataclass(frozen=True)
class MonitoredStep:
    """What the log says of a step, and what it has taken."""

    flops: int | None
    is_exact: bool
    is_counted: bool
    truth: int

    @property
    def is_wrong(self) -> bool:
        return self.is_exact and self.flops != self.truth


@dataclass(frozen=True)
class Outcome:
    """The steps of one training, of which the last `shapes` are those that were asked for."""

    name: str
    steps: list[MonitoredStep]
    shapes: int

    @property
    def wrong(self) -> int:
        return sum(step.is_wrong for step in self.steps)

    @property
    def counts(self) -> int:
        return sum(step.is_counted for step in self.steps)

    @property
    def first_known(self) -> int | None:
        """The first step that is exact without having been counted."""
        known = (number for number, step in enumerate(self.steps) if step.is_exact and not step.is_counted)
        return next(known, None)

    @property
    def counts_until_known(self) -> int | None:
        """How many steps were counted before that one."""
        first = self.first_known
        return None if first is None else sum(step.is_counted for step in self.steps[:first])

    @property
    def exact_at_last(self) -> int:
        return sum(step.is_exact for step in self.steps[-self.shapes :])


def measure(architecture: Architecture, learning: int, shapes: int, folder: Path) -> Outcome:
    """Both trainings of one architecture."""
    truth: list[int] = []

    def count(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
        counter = StepCounter(as_it_runs=True)
        with counter:
            _step(model, optimizer, batch)
        truth.append(counter.total)

    _train(architecture, learning + shapes, lambda model: count)
    _monitored(architecture, learning + shapes, folder)
    return Outcome(architecture.name, _logged_steps(folder, truth), shapes)


def _monitored(architecture: Architecture, steps: int, folder: Path) -> None:
    """One row per step, so that each says whether it is exact."""
    monitors: list[TrainingMonitor] = []

    def watch(model: nn.Module) -> Callable[[nn.Module, torch.optim.Optimizer, Batch], None]:
        monitors.append(TrainingMonitor(folder, model=model, peak_flops_per_s=1e12, log_every=1))
        return step

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
        with monitors[0].step(batch) as of_monitor:
            of_monitor.log(loss=_step(model, optimizer, batch))

    _train(architecture, steps, watch)
    monitors[0].close()


def _train(architecture: Architecture, steps: int, start: Callable[[nn.Module], Callable[..., None]]) -> None:
    model = architecture.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    draw = random.Random(architecture.name)
    torch.manual_seed(1)
    step = start(model)
    for _ in range(steps):
        step(model, optimizer, drawn_batch(architecture, draw))


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> torch.Tensor:
    loss: torch.Tensor = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def _logged_steps(folder: Path, truth: list[int]) -> list[MonitoredStep]:
    """From the log. A step that was counted has `counted`; in older logs it is marked as one of the warm-up."""
    found: dict[int, MonitoredStep] = {}
    for record in map(json.loads, (folder / "training_log.jsonl").read_text("utf-8").splitlines()):
        if record["type"] != "row":
            continue
        columns = record["steps"]
        unknown = [None] * len(columns["step"])
        flops = columns.get("hardware_flops", unknown)
        counted = columns.get("counted", columns.get("warm_up", unknown))
        for number, *values in zip(columns["step"], flops, counted, strict=True):
            found[number] = MonitoredStep(values[0], bool(record.get("exact")), bool(values[1]), truth[number])
    return [found[number] for number in sorted(found)]


# The table

HEAD = """| architecture | counted steps until others are exact | at step | counted in all | exact of the last | wrong |
| --- | --- | --- | --- | --- | --- |"""


def line(outcome: Outcome) -> str:
    until = "never" if outcome.counts_until_known is None else outcome.counts_until_known
    first = "" if outcome.first_known is None else outcome.first_known
    of_last = f"{outcome.exact_at_last} of {outcome.shapes}"
    cells = (outcome.name, until, first, f"{outcome.counts} of {len(outcome.steps)}", of_last, outcome.wrong)
    return "| " + " | ".join(map(str, cells)) + " |"


def summary(done: list[Outcome]) -> str:
    known = [outcome.counts_until_known for outcome in done if outcome.counts_until_known is not None]
    exact = sum(outcome.exact_at_last for outcome in done)
    shapes = sum(outcome.shapes for outcome in done)
    wrong = sum(outcome.wrong for outcome in done)
    until = f"the median needs {median(known):g} counted steps, the worst {max(known)}" if known else "none is known"
    return (
        f"Of {len(done)} architectures, {len(known)} are exact on steps that are not counted: {until}. Of the last "
        f"{shapes} shapes {exact} are exact. {wrong} steps are called exact and wrong."
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[], help="names of architectures")
    parser.add_argument("--learning", type=int, default=40, help="steps before those that are asked for")
    parser.add_argument("--shapes", type=int, default=20, help="steps with random shapes after these")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    for name in ("flopwatch", "transformers"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    print(HEAD, flush=True)
    done = []
    for architecture in ARCHITECTURES:
        if (options.only and architecture.name not in options.only) or architecture.absence():
            continue
        with tempfile.TemporaryDirectory() as folder:
            done.append(measure(architecture, options.learning, options.shapes, Path(folder)))
        print(line(done[-1]), flush=True)
    print(f"\n{summary(done)}")
    return int(any(outcome.wrong for outcome in done))


if __name__ == "__main__":
    sys.exit(main())
