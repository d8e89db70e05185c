"""One kind of training loop, run twice from the same seed: counted op by op, and monitored."""

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
from torch import nn

from flopwatch import TrainingMonitor
from flopwatch.flops.tracing import live
from flopwatch.records.run import is_doubted
from testbeds.loops.truth import OpCounter, recomputation_told
from testbeds.loops.unpadded import row_by_row

STEPS = 12
LOG_EVERY = 2
_TELLING = ("flops_unknown", "optimizer_products")
"""Notices about FLOPs."""


class Audit:
    """What a loop runs its steps through. Either it counts them op by op with the monitor off, or it monitors them.

    Attributes:
        is_counting: Which of the two.
        compiles: Whether the model is compiled in place before its first step, in a loop that does not do so itself.
        flops: By step number, what was counted.
        recomputed: By step number, what checkpoints ran again of it.
        monitor: The monitor, switched off while steps are counted.
    """

    def __init__(self, folder: Path, *, is_counting: bool, compiles: bool = False) -> None:
        self.folder = folder
        self.is_counting, self.compiles = is_counting, compiles
        self.flops: Counter[int] = Counter()
        self.recomputed: Counter[int] = Counter()
        self._next = 0
        self._open: OpCounter | None = None
        self._monitor: TrainingMonitor | None = None

    @property
    def monitor(self) -> TrainingMonitor:
        assert self._monitor is not None
        return self._monitor

    @monitor.setter
    def monitor(self, monitor: TrainingMonitor) -> None:
        self._monitor = monitor

    def watch(
        self, model: nn.Module | None, kind: Callable[..., TrainingMonitor] = TrainingMonitor, **more: Any
    ) -> None:
        if self.compiles and not self.is_counting and model is not None:
            for part in model if isinstance(model, nn.Sequential) else [model]:  # torch leaves a container as it is
                part.compile(backend="aot_eager")
        options = {"model": model, "peak_flops_per_s": 1e12, "log_every": LOG_EVERY, **more}
        self._monitor = kind(self.folder, **options)

    @contextmanager
    def counted(self, number: int) -> Iterator[None]:
        """What runs in here belongs to the step of this number."""
        if not self.is_counting:
            yield
            return
        counter = OpCounter()
        counter.__enter__()
        try:
            yield
        finally:
            counter.leave()
        self._add(number, counter)

    @contextmanager
    def step(self, batch: Any = None) -> Iterator[Any]:
        """A loop with `with monitor.step(batch)`."""
        number, self._next = self._next, self._next + 1
        with self.monitor.step(batch, step=number) as step, self.counted(number):
            yield step

    @contextmanager
    def body(self) -> Iterator[int]:
        """The work of a step in a loop that only calls `log_step`; the step's number."""
        number, self._next = self._next, self._next + 1
        with self.counted(number):
            yield number

    def begin(self) -> None:
        """For frameworks, which tell by callbacks that a step begins."""
        if self.is_counting and self._open is None:
            self._open = OpCounter()
            self._open.__enter__()

    def end(self, number: int) -> None:
        """The step of this number has ended."""
        if self._open is not None:
            self._open.leave()
            self._add(number, self._open)
            self._open = None

    def _add(self, number: int, counter: OpCounter) -> None:
        self.flops[number] += counter.flops
        self.recomputed[number] += counter.recomputed

    def close(self) -> None:
        if self._monitor is not None:
            self._monitor.close()


RunLoop = Callable[[Audit], list[nn.Module]]
"""Trains, and returns the modules it has trained."""


@dataclass(frozen=True)
class Loop:
    """A kind of training loop and what is expected of its rows.

    Attributes:
        run: The loop.
        exact_from: From this step on every row is exact; None when that is not promised.
        told: What the notes of rows that are not exact say, where exactness is not promised.
        is_compiled: Compiled code is run eagerly while it is counted.
        gap: Why a row of it is wrong and called exact: the gap between counts that docs/exactness.md describes.
        model_gap: Why model FLOPs of a row that is called exact are wrong.
        needs: What model FLOPs are compared with, besides recomputation, which they leave out: what was executed; in
            batches with padding, what each row executes by itself; "elsewhere" if another test compares them.
        is_slow: Takes more than a second or two, most of it for the law of a transformer.
    """

    run: RunLoop
    exact_from: int | None = 4
    told: str | None = None
    is_compiled: bool = False
    gap: str | None = None
    model_gap: str | None = None
    needs: Literal["executed", "row by row", "elsewhere"] = "executed"
    is_slow: bool = False

    @property
    def name(self) -> str:
        return self.run.__name__

    @property
    def what(self) -> str:
        return (self.run.__doc__ or "").strip().rstrip(".")


@dataclass(frozen=True)
class AuditedRow:
    """A row of the log beside the truth of its steps: executed FLOPs, and those that the model needs."""

    steps: tuple[int, ...]
    is_exact: bool | None
    notes: tuple[str, ...]
    logged: int | None
    truth: int
    logged_model: int | None
    true_model: int | None

    @property
    def is_wrong_and_exact(self) -> bool:
        return bool(self.is_exact) and self.logged != self.truth

    @property
    def is_only_model_wrong_and_exact(self) -> bool:
        """Whether what was executed is right, and what the model needs is not."""
        is_wrong = self.true_model is not None and self.logged_model != self.true_model
        return bool(self.is_exact) and not self.is_wrong_and_exact and is_wrong


@dataclass(frozen=True)
class Outcome:
    """Of both runs of a loop.

    Attributes:
        rows: Of the log.
        errors: Parts of the monitor that failed.
        warnings: What else the log tells about the FLOPs.
        is_same_training: Whether all parameters are bit by bit what they are without a monitor.
        total: Hardware FLOPs of the run as summed up in the end; None where they are not known.
        truth: Of all steps.
    """

    rows: list[AuditedRow]
    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    is_same_training: bool = True
    total: int | None = None
    truth: int = 0

    @property
    def exact_rows(self) -> int:
        return sum(bool(row.is_exact) for row in self.rows)

    @property
    def reasons(self) -> list[str]:
        return list(dict.fromkeys([*(note for row in self.rows for note in row.notes), *self.warnings]))

    def first_exact(self) -> int | None:
        """The step from which on every row is exact."""
        first = None
        for row in reversed(self.rows):
            if not row.is_exact:
                break
            first = row.steps[0]
        return first

    def is_told(self, words: str) -> bool:
        return any(re.search(words, note) for note in self.reasons)


def audit(loop: Loop, folder: Path, *, compiles: bool = False, steps: int = STEPS) -> Outcome:
    with mock.patch.dict(loop.run.__globals__, STEPS=steps):
        plain, counted = _count(loop, folder / "counted")
        needed = counted.flops - counted.recomputed if loop.needs != "elsewhere" else Counter()
        if loop.needs == "row by row":
            with row_by_row():
                _, alone = _count(loop, folder / "alone")
            needed = alone.flops - alone.recomputed
        monitored = Audit(folder / "monitored", is_counting=False, compiles=compiles)
        modules = _run(loop, monitored)
    records = [json.loads(line) for line in _log(monitored.folder).read_text().splitlines()]
    doubts = [record for record in records if record.get("doubted")]
    rows = [_audited(record, counted.flops, needed, doubts) for record in records if record["type"] == "row"]
    errors = [record["message"] for record in records if record.get("level") == "error"]
    warnings = [record["message"] for record in records if record.get("code") in _TELLING]
    summary = monitored.monitor.summary if monitored._monitor is not None else None
    total = summary.values.get("total/hardware_flops") if summary is not None else None
    return Outcome(rows, errors, warnings, _weights_equal(plain, modules), total, sum(counted.flops.values()))


def _count(loop: Loop, folder: Path) -> tuple[list[nn.Module], Audit]:
    counted = Audit(folder, is_counting=True)
    with mock.patch.dict(os.environ, {"FLOPWATCH_DISABLE": "1"}), recomputation_told():
        return _run(loop, counted), counted


def _run(loop: Loop, run: Audit) -> list[nn.Module]:
    run.folder.mkdir(parents=True)
    with ExitStack() as stack:
        stack.callback(run.close)
        if loop.is_compiled or run.compiles:
            _forget_compilations()
            stack.callback(torch._dynamo.utils.counters.clear)  # else later loops would count as compiled ones
            stack.callback(_forget_compilations)
            if run.is_counting:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
        torch.manual_seed(0)
        return loop.run(run)


def _forget_compilations() -> None:
    """Let the next loop run as if nothing had been compiled in this process."""
    torch._dynamo.reset()
    live._has_compiled.clear()


def _log(folder: Path) -> Path:
    (path,) = folder.rglob("training_log.jsonl")
    return path


def _audited(
    record: dict[str, Any], truth: dict[int, int], needed: Counter[int], doubts: list[dict[str, Any]]
) -> AuditedRow:
    """The reasons of a row that was doubted after it was written are in the notices that doubt it."""
    columns = record["steps"]
    steps = tuple(columns["step"])
    later = [doubt["message"] for doubt in doubts if is_doubted(steps, doubt["doubted"])]
    return AuditedRow(
        steps,
        record.get("exact"),
        tuple(dict.fromkeys([*record.get("notes", ()), *later])),
        _sum(columns.get("hardware_flops", [None])),
        sum(truth[number] for number in steps),
        _sum(columns.get("model_flops", [None])),
        sum(needed[number] for number in steps) if needed else None,
    )


def _sum(known: list[int | None]) -> int | None:
    return None if None in known else sum(filter(None, known))


def _weights_equal(left: list[nn.Module], right: list[nn.Module]) -> bool:
    pairs = zip(_tensors(left), _tensors(right), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


def _tensors(modules: list[nn.Module]) -> list[torch.Tensor]:
    return [tensor for module in modules for tensor in module.state_dict().values()]
