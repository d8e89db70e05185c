"""Compiled trainings: is every row that is called exact equal to what the same steps run without the compiler?

    python benchmarks/compiled/trainings.py [--only NAME ...] [--skip architectures|ways|loops ...]

Runs the ways to compile of `testbeds.compiled` and the architectures of `testbeds.architectures` (the model as a whole,
and its blocks), each with `monitor.step` and with `log_step`, and the loops of `testbeds.loops` with their model
compiled in place. Prints a table in Markdown. The exit status is 1 if a row that is called exact is wrong.
"""

import argparse
import json
import logging
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import flopwatch
from flopwatch.flops.tracing import live
from testbeds import architectures
from testbeds.compiled.trainings import TRAININGS, Compiler, batch_of, true_flops
from testbeds.loops.audit import audit
from testbeds.loops.loops import LOOPS

STEPS, LOG_EVERY = 12, 4
DOORS = ("step", "log_step")


@dataclass(frozen=True)
class Result:
    """Of one training: how many of its rows are exact, how many of these are wrong, and why others are not exact."""

    kind: str
    name: str
    door: str
    rows: int = 0
    exact: int = 0
    wrong: int = 0
    why: str = ""

    @property
    def verdict(self) -> str:
        if self.wrong:
            return "wrong"
        if not self.rows:
            return "does not run compiled"
        return "exact" if self.exact == self.rows else "exact in the end" if self.is_exact_in_the_end else "told"

    @property
    def is_exact_in_the_end(self) -> bool:
        return self.exact > 0 and not self.why.startswith("last: ")


def trained(
    folder: Path, door: str, model: nn.Module, batch: Callable[[int], Any], step: Callable[[Any], None]
) -> list[dict[str, Any]]:
    """Rows of a training with a monitor."""
    monitor = flopwatch.TrainingMonitor(folder, model=model, log_every=LOG_EVERY, peak_flops_per_s=1e12, sinks=[])
    for number in range(STEPS):
        now = batch(number)
        if door == "step":
            with monitor.step(now):
                step(now)
        else:
            step(now)
            monitor.log_step(number, batch=now)
    monitor.close()
    records = [json.loads(line) for line in (folder / "training_log.jsonl").read_text().splitlines()]
    return [record for record in records if record["type"] == "row"]


def judged(kind: str, name: str, door: str, rows: list[dict[str, Any]], truth: int) -> Result:
    wrong = [row for row in rows if row["exact"] and set(row["steps"].get("model_flops", [None])) != {truth}]
    notes = [("last: " if row is rows[-1] else "") + row["notes"][0] for row in rows if not row["exact"]]
    return Result(
        kind, name, door, len(rows), sum(row["exact"] for row in rows), len(wrong), notes[-1] if notes else ""
    )


def ways(only: list[str]) -> Iterator[Result]:
    for name in TRAININGS:
        for door in DOORS if not only or name in only else ():
            forget_compilations()
            torch.manual_seed(0)
            running = TRAININGS[name](Compiler("aot_eager"))
            with tempfile.TemporaryDirectory() as folder:
                rows = trained(Path(folder), door, running.model, lambda _: {"ids": batch_of(0)}, stepping(running))
            yield judged("way to compile", name, door, rows, true_flops(name, batch_of(0)))


def stepping(running: Any) -> Callable[[Any], None]:
    return lambda batch: running.step(batch["ids"])


def of_architectures(only: list[str]) -> Iterator[Result]:
    for each in architectures.ARCHITECTURES:
        for part in ("whole", "blocks") if not only or each.name in only else ():
            for door in DOORS:
                kind = f"architecture, {part}"
                try:
                    rows, truth = of_architecture(each, part, door)
                    yield judged(kind, each.name, door, rows, truth)
                except Exception as error:
                    why = f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"
                    yield Result(kind, each.name, door, why=why)


def of_architecture(each: Any, part: str, door: str) -> tuple[list[dict[str, Any]], int]:
    forget_compilations()
    batch = each.batch(2, 16)
    truth = architectures.true_flops(without_chance(each.build(eager=True)), batch)
    model = without_chance(each.build(eager=True))
    lists = [found for found in model.modules() if isinstance(found, nn.ModuleList)]
    for block in lists[0] if part == "blocks" and lists else [model]:
        block.compile(backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(batch: Any) -> None:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    with tempfile.TemporaryDirectory() as folder:
        return trained(Path(folder), door, model, lambda _: batch, step), truth


def without_chance(model: nn.Module) -> nn.Module:
    """The model without layers that are left out at random, so that every step costs the same."""
    if hasattr(model.config, "layerdrop"):
        model.config.layerdrop = 0.0
    return model


def of_loops(only: list[str]) -> Iterator[Result]:
    for loop in LOOPS:
        if only and loop.name not in only:
            continue
        with tempfile.TemporaryDirectory() as folder:
            try:
                outcome = audit(loop, Path(folder), compiles=not loop.is_compiled)
            except Exception as error:
                why = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:80]}"
                yield Result("loop", loop.name, "", why=why)
                continue
        rows = outcome.rows
        wrong = sum(row.is_wrong_and_exact and row.logged is not None for row in rows)
        notes = [("last: " if row is rows[-1] else "") + row.notes[0] for row in rows if not row.is_exact]
        yield Result("loop", loop.name, "", len(rows), outcome.exact_rows, wrong, notes[-1] if notes else "")


def forget_compilations() -> None:
    torch._dynamo.reset()
    live._has_compiled.clear()


def line(result: Result) -> str:
    cells = result.kind, result.name, result.door, result.verdict, f"{result.exact} of {result.rows}", result.why[:150]
    return "| " + " | ".join(cells) + " |"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[], help="names of ways, architectures or loops")
    parser.add_argument("--skip", nargs="*", default=[], choices=["ways", "architectures", "loops"])
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    print("| what | name | measured by | rows | exact | why not |\n| --- | --- | --- | --- | --- | --- |")
    parts = {"ways": ways, "architectures": of_architectures, "loops": of_loops}
    verdicts: Counter[str] = Counter()
    for name, part in parts.items():
        for result in part(given.only) if name not in given.skip else ():
            verdicts[result.verdict] += 1
            print(line(result), flush=True)
    print(f"\n{verdicts.total()} trainings: " + ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items()))
    return 1 if verdicts["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
