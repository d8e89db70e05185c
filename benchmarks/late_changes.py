"""Trainings that change late: is any row that is called exact wrong, and how soon is the change noticed?

    python benchmarks/late_changes.py [--only NAME ...] [--seeds N]

Each of the loops of `testbeds.late_changes` runs twice: counted op by op, and with a `TrainingMonitor`. Prints a table
in Markdown. The exit status is 1 if a step in a row that is called exact is wrong, or a change was never noticed.
"""

import argparse
import logging
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import torch

from testbeds.late_changes.audit import Outcome, Plan, audit
from testbeds.late_changes.loops import LOOPS, Loop


def outcomes(names: list[str], seeds: int) -> Iterator[tuple[Loop, Outcome]]:
    """Of all loops with these names, or of all, each with several plans."""
    for loop in LOOPS:
        for seed in range(seeds) if not names or loop.name in names else ():
            with tempfile.TemporaryDirectory() as folder:
                yield loop, audit(loop, Path(folder), Plan.drawn(loop.name, seed))


def line(loop: Loop, outcome: Outcome) -> str:
    plan, wrong = outcome.plan, outcome.wrong
    delay = "never" if outcome.delay is None else str(outcome.delay)
    of_wrong = f"{len(wrong)} (from step {wrong[0]} on)" if wrong else "0"
    cells = (loop.what, loop.logged, loop.recurrence, plan.steps, plan.change, outcome.exact, of_wrong, delay)
    return "| " + " | ".join(map(str, cells)) + " |"


HEAD = """| what changes | loss logged | recurs | steps | change at | exact steps | wrong among them | noticed after |
| --- | --- | --- | --- | --- | --- | --- | --- |"""


def summary(done: list[Outcome]) -> str:
    delays = [outcome.delay for outcome in done if outcome.delay is not None]
    wrong = sum(bool(outcome.wrong) for outcome in done)
    steps = sum(outcome.plan.steps for outcome in done)
    exact = sum(outcome.exact for outcome in done)
    noticed = f"{len(delays)} of {len(done)} changes were noticed"
    after = f", the median after {median(delays):g} steps, the last after {max(delays)}" if delays else ""
    return (
        f"{noticed}{after}. {exact} of {steps} steps are in rows that are called exact; in {wrong} trainings some of"
        " these are wrong."
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[], help="names of loops")
    parser.add_argument("--seeds", type=int, default=1, help="how many drawn lengths and changes of each loop")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("flopwatch").setLevel(logging.ERROR)
    print(HEAD, flush=True)
    done = []
    for loop, outcome in outcomes(options.only, options.seeds):
        print(line(loop, outcome), flush=True)
        done.append(outcome)
    print(f"\n{summary(done)}")
    return int(any(outcome.wrong or outcome.noticed is None for outcome in done))


if __name__ == "__main__":
    sys.exit(main())
