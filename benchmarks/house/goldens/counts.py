"""What `count_flops` and a monitored training say a step of each architecture costs, with and without padding.

    python -m house.goldens.counts LINES.json [WORDS]    # in a process with the code of the tree

The 26 architectures of the testbeds and the 45 further ones. Each runs in a fork under the clock of the loops, so that
what the monitor counts depends on nothing but the training.
"""

import json
import logging
import os
import random
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from house.goldens.loop_rows import SameRandom, StepTime
from house.goldens.tree import Tree

_LENGTHS = (32, 20, 13)
_STEPS, _STEP_SECONDS = 6, 0.01
_COLUMNS = ("model_flops", "hardware_flops")


def record(tree: Tree, match: str = "") -> dict[str, list[str]]:
    """The lines of each architecture whose name has these words in it."""
    with tempfile.TemporaryDirectory() as made:
        path = Path(made) / "lines.json"
        tree.run("house.goldens.counts", str(path), match, cwd=Path(made))
        found: dict[str, list[str]] = json.loads(path.read_text())
        return found


def main() -> None:
    clock = StepTime()
    clock.stop_real_time()
    random.Random = SameRandom  # type: ignore[misc, assignment]
    from accuracy.more_architectures import architectures
    from testbeds.architectures import ARCHITECTURES

    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    words = sys.argv[2] if len(sys.argv) > 2 else ""
    chosen = [each for each in (*ARCHITECTURES, *architectures()) if words in each.name]
    Path(sys.argv[1]).write_text(json.dumps({each.name: _in_a_fork(each, clock) for each in chosen}))


def _in_a_fork(architecture: Any, clock: StepTime) -> list[str]:
    with tempfile.TemporaryDirectory() as made:
        child = os.fork()
        if child == 0:
            _write_lines(architecture, clock, Path(made))
        os.waitpid(child, 0)
        lines = Path(made) / "lines.json"
        return json.loads(lines.read_text()) if lines.exists() else ["the process of this architecture died"]


def _write_lines(architecture: Any, clock: StepTime, folder: Path) -> None:
    """Never returns."""
    try:
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # until this process ends
        lines = [f"{name}: {line}" for name, batch in _batches(architecture) for line in _counted(architecture, batch)]
        for name, batch in _batches(architecture):
            lines += [f"{name}, live: {line}" for line in _live(architecture, batch, clock, folder / name)]
    except BaseException as error:
        lines = [f"failed: {line}" for line in traceback.format_exception_only(error)]
    (folder / "lines.json").write_text(json.dumps(lines))
    os._exit(0)


def _batches(architecture: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "whole", architecture.batch(len(_LENGTHS), max(_LENGTHS))
    batch = architecture.batch(len(_LENGTHS), max(_LENGTHS))
    if "attention_mask" in batch:
        for row, length in enumerate(_LENGTHS):
            batch["attention_mask"][row, length:] = 0
        yield "padded", batch


def _counted(architecture: Any, batch: dict[str, Any]) -> Iterator[str]:
    import torch

    import flopwatch

    model = architecture.build()
    torch.manual_seed(0)  # some leave layers out by chance
    try:
        count = flopwatch.count_flops(model, batch)
    except Exception as error:
        yield f"{type(error).__name__}: {error}"
        return
    for name in ("model", "hardware", "forward", "backward", "recompute", "padding"):
        yield f"{name} {getattr(count, f'{name}_flops'):,}"
    yield f"counted by {count.method}, coverage {count.coverage}, notes {count.notes}"


def _live(architecture: Any, batch: dict[str, Any], clock: StepTime, folder: Path) -> Iterator[str]:
    import torch

    import flopwatch

    model = architecture.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    torch.manual_seed(0)
    with flopwatch.TrainingMonitor(folder, model=model, peak_flops_per_s=1e12, log_every=2) as monitor:
        for _ in range(_STEPS):
            with monitor.step(batch):
                optimizer.zero_grad()
                model(**batch).loss.backward()
                optimizer.step()
                clock.seconds += _STEP_SECONDS
    (log,) = folder.rglob("training_log.jsonl")
    for record in map(json.loads, log.read_text("utf-8").splitlines()):
        if record["type"] == "row":
            flops = ", ".join(f"{name} {record['steps'].get(name)}" for name in _COLUMNS)
            yield f"row {record['step']}: {flops}, exact {record.get('exact')}, notes {record.get('notes') or []}"


if __name__ == "__main__":
    main()
