"""Runs loops of testbeds/loops under a clock that only their steps move, and writes what their logs say.

    python -m house.goldens.loop_rows LINES.json [WORDS]

Each loop runs in a fork, so that none sees what another has imported, compiled or patched. Every step takes 10 ms and
what is between steps takes no time, so the times in the rows are known too; only what depends on this machine is left
out.
"""

import json
import logging
import os
import random
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from house.goldens.forms import leaves

_STEP_SECONDS = 0.01
_UNIX_TIME = 1_800_000_000.0
_OF_THIS_MACHINE = ("memory", "start_up", "wall", "restart", "goodput", "unix_time", "other_seconds", "loss")


class StepTime:
    """Seconds that pass only when a step of the loop runs."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds

    def stop_real_time(self) -> None:
        """Before flopwatch is imported, which takes `time.perf_counter` as its clock."""
        time.perf_counter = self
        time.time = lambda: _UNIX_TIME + self.seconds


class SameRandom(random.Random):
    """Draws the same numbers every time: the monitor draws which of many steps it counts again."""

    def __init__(self, seed: Any = 1) -> None:
        super().__init__(1 if seed is None else seed)


def main() -> None:
    clock = StepTime()
    clock.stop_real_time()
    random.Random = SameRandom  # type: ignore[misc, assignment]
    from testbeds.loops.loops import LOOPS

    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    words = sys.argv[2] if len(sys.argv) > 2 else ""
    told = {loop.name: _in_a_fork(loop, clock) for loop in LOOPS if words in f"loops/{loop.name}"}
    Path(sys.argv[1]).write_text(json.dumps(told))


def _in_a_fork(loop: Any, clock: StepTime) -> list[str]:
    with tempfile.TemporaryDirectory() as made:
        child = os.fork()
        if child == 0:
            _run(loop, clock, Path(made))
        os.waitpid(child, 0)
        lines = Path(made) / "lines.json"
        return json.loads(lines.read_text()) if lines.exists() else ["the process of this loop died"]


def _run(loop: Any, clock: StepTime, folder: Path) -> None:
    """Never returns."""
    from testbeds.loops import audit

    class TimedAudit(audit.Audit):  # type: ignore[misc, name-defined, unused-ignore]
        @contextmanager
        def counted(self, number: int) -> Iterator[None]:
            clock.seconds += _STEP_SECONDS / 2
            with super().counted(number):
                yield
            clock.seconds += _STEP_SECONDS / 2

        def end(self, number: int) -> None:
            clock.seconds += _STEP_SECONDS
            super().end(number)

    try:
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # until this process ends
        audit._run(loop, TimedAudit(folder / "run", is_counting=False))
        (log,) = (folder / "run").rglob("training_log.jsonl")
        lines = [line for record in log.read_text().splitlines() for line in lines_of(json.loads(record))]
    except BaseException as error:
        lines = [f"failed: {line}" for line in traceback.format_exception_only(error)]
    (folder / "lines.json").write_text(json.dumps(lines))
    os._exit(0)


def lines_of(record: dict[str, Any]) -> Iterator[str]:
    """What a record of the log says, without what depends on the machine."""
    kind = record["type"]
    about = {
        "row": ("exact", "notes", "detailed", "steps", "values", "ledger"),
        "notice": ("level", "code", "message", "doubted"),
        "provenance": ("mode", "method", "exact", "attention", "coverage", "notes", "law"),
        "summary": ("exact", "notes", "ended_by", "values"),
    }.get(kind, ())
    place = f"{kind} {record.get('step')}"
    for name in about:
        if record.get(name) is not None:
            for line in sorted(leaves(record[name], name)):
                if not any(word in line.split(" = ")[0] for word in _OF_THIS_MACHINE):
                    yield f"{place}: {line}"


if __name__ == "__main__":
    main()
