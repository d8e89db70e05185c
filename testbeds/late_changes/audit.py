"""Runs a training twice from the same seed, counted op by op and monitored, and compares."""

import json
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flopwatch import TrainingMonitor
from testbeds.late_changes.loops import Loop
from testbeds.loops.truth import OpCounter

LOG_EVERY = 5


@dataclass(frozen=True)
class Plan:
    """How long a training is and when it changes.

    Attributes:
        steps: Of the whole training.
        change: The first step that is another one.
    """

    steps: int
    change: int

    @classmethod
    def drawn(cls, name: str, seed: int = 0) -> "Plan":
        """150 to 400 steps, with a change after step 50 and long before the end."""
        draw = random.Random(f"{name} {seed}")
        steps = draw.randint(150, 400)
        return cls(steps, draw.randint(51, steps - 60))


class Records:
    """A sink that keeps every record in the order in which it came, so rows as they were before they were amended."""

    name = "records"

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def write(self, record: Any) -> None:
        self.kept.append(record)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class LoggedStep:
    """A step as a row tells it."""

    flops: int | None
    is_exact: bool


@dataclass(frozen=True)
class Outcome:
    """Of one training.

    Attributes:
        plan: Its steps and its change.
        wrong: Steps of rows that are called exact in the file, whose FLOPs are not the truth.
        missing: Steps that no row has.
        noticed: The first step by which the monitor knew of the change; None if it never did.
        exact: Steps in rows that are called exact in the file.
        doubts: Steps at which earlier rows were doubted.
    """

    plan: Plan
    wrong: list[int]
    missing: list[int]
    noticed: int | None
    exact: int
    doubts: list[int]

    @property
    def delay(self) -> int | None:
        return None if self.noticed is None else self.noticed - self.plan.change


def audit(loop: Loop, folder: Path, plan: Plan, clock: Callable[[], float] = time.monotonic) -> Outcome:
    """Both runs of a training, compared step by step. The monitor's `clock` decides how often it can count."""
    truth: list[int] = []
    _train(loop, plan, _Counted(truth))
    records = Records()
    monitored = _Monitored(folder, records, clock)
    _train(loop, plan, monitored)
    monitored.close()
    file = [json.loads(line) for line in (folder / "training_log.jsonl").read_text("utf-8").splitlines()]
    at_last = _steps([record for record in file if record["type"] == "row"])
    doubts = [
        record["step"] for record in file if record["type"] == "notice" and record["code"].startswith("rows_in_doubt")
    ]
    at_first = _steps_at_first(records.kept)
    wrong = [number for number, step in at_last.items() if step.is_exact and step.flops != truth[number]]
    missing = sorted(set(range(plan.steps)) - set(at_last))
    exact = sum(step.is_exact for step in at_last.values())
    return Outcome(plan, wrong, missing, _noticed(loop, plan, truth, at_first, doubts), exact, doubts)


def _noticed(
    loop: Loop, plan: Plan, truth: list[int], at_first: dict[int, LoggedStep], doubts: list[int]
) -> int | None:
    """The first changed step whose row was right, or not called exact, or the first doubt after the change."""
    changed = [number for number in range(plan.steps) if loop.is_late(number, plan.change)]
    known = [number for number in changed if _is_told(at_first.get(number), truth[number])]
    later = [step for step in doubts if step >= plan.change]
    return min([*known, *later], default=None)


def _is_told(step: LoggedStep | None, truth: int) -> bool:
    return step is not None and (not step.is_exact or step.flops == truth)


def _steps(rows: list[Any]) -> dict[int, LoggedStep]:
    """By number, every step of the rows; if it is in several, the last one is the amended one."""
    found = {}
    for row in rows:
        flops = row["steps"].get("hardware_flops") or [None] * len(row["steps"]["step"])
        for number, value in zip(row["steps"]["step"], flops, strict=True):
            found[number] = LoggedStep(value, bool(row.get("exact")))
    return found


def _steps_at_first(kept: list[Any]) -> dict[int, LoggedStep]:
    """The same from the records of the sink, as each row was when it was written first."""
    rows = [{"steps": dict(record.steps), "exact": record.exact} for record in kept if record.type == "row"]
    return _steps(rows[::-1])


class _Counted:
    """Counts each step op by op."""

    def __init__(self, truth: list[int]) -> None:
        self._truth = truth

    def watch(self, model: Any) -> None:
        pass

    @contextmanager
    def step(self, batch: Any) -> Iterator[Any]:
        counter = OpCounter()
        counter.__enter__()
        try:
            yield None
        finally:
            counter.leave()
        self._truth.append(counter.flops)


class _Monitored:
    """`with monitor.step(batch)`."""

    def __init__(self, folder: Path, records: Records, clock: Callable[[], float]) -> None:
        self._folder = folder
        self._records = records
        self._clock = clock

    def watch(self, model: Any) -> None:
        options: dict[str, Any] = {
            "peak_flops_per_s": 1e12,
            "log_every": LOG_EVERY,
            "sinks": [self._records],
            "clock": self._clock,
        }
        self._monitor = TrainingMonitor(self._folder, model=model, **options)

    def step(self, batch: Any) -> Any:
        return self._monitor.step(batch)

    def close(self) -> None:
        self._monitor.close()


def _train(loop: Loop, plan: Plan, run: _Counted | _Monitored) -> None:
    torch.manual_seed(0)
    training = loop.make()
    modules = (training.model, *training.with_weights)
    optimizer = torch.optim.SGD([one for module in modules for one in module.parameters()], lr=0.01)
    run.watch(training.model)
    for number in range(plan.steps):
        batch = training.batch()
        with run.step(batch) as step:
            loss = training.loss(batch, loop.is_late(number, plan.change))
            if loss is not None:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step is not None and loss is not None and loop.logged != "nothing":
                step.log(loss=loss if loop.logged == "tensor" else loss.item())
