"""Runs every loop of tests/monitor/loops beside an op-by-op count of its steps and writes the table of docs/loops.md.

python benchmarks/pages/loops_table.py
"""

import logging
import tempfile
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "loops.md"
_MOST_WORDS = 180

HEAD = """# Loops

Every kind of training loop below is run twice from the same seed: once without flopwatch, each step counted op by op
with torch's own formulas, and once with the monitor. A row of the monitor's log that says it is `exact` must have the
count to the FLOP; any other must say why it is not. The weights after both runs must be the same bit by bit.
Products that an optimizer computes itself (Muon, Shampoo) are in neither count.

Written by `python benchmarks/pages/loops_table.py`; the same loops are tests (`tests/monitor/test_loops.py`). The
first rows of a run are told, because a kind of step has to be counted as it runs a few times before its rows are called
exact.
"""


def main() -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    audit, loops = import_module("testbeds.loops.audit").audit, import_module("testbeds.loops.loops").LOOPS
    audited = []
    for loop in loops:
        with tempfile.TemporaryDirectory() as folder:
            audited.append((loop, audit(loop, Path(folder))))
    PAGE.write_text(page(audited), encoding="utf-8")
    print(f"wrote {PAGE}: {summary(audited)}")


def page(audited: list[tuple[Any, Any]]) -> str:
    lines = [HEAD, summary(audited), "", "| loop | rows | exact | told | wrong and exact | why told |"]
    lines.append("| --- | --- | --- | --- | --- | --- |")
    for loop, outcome in audited:
        wrong = sum(row.is_wrong_and_exact for row in outcome.rows)
        told = len(outcome.rows) - outcome.exact_rows
        why = f"known hole: {loop.hole}" if loop.hole else _why(outcome)
        cells = [_in_cell(loop.what), len(outcome.rows), outcome.exact_rows, told, wrong, why]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def summary(audited: list[tuple[Any, Any]]) -> str:
    outcomes = [outcome for _, outcome in audited]
    in_the_end = sum(outcome.rows[-1].is_exact is True for outcome in outcomes)
    wrong = sum(any(row.is_wrong_and_exact for row in outcome.rows) for outcome in outcomes)
    same = sum(outcome.is_same_training for outcome in outcomes)
    return (
        f"{len(outcomes)} loops: {in_the_end} are exact in the end, {len(outcomes) - in_the_end} are told, {wrong} "
        f"have a row that is wrong and called exact; {same} trained the same bit by bit."
    )


def _why(outcome: Any) -> str:
    """The last reason is the one that stays."""
    told = [row for row in outcome.rows if not row.is_exact]
    if not told:
        return ""
    reason = told[-1].notes[-1] if told[-1].notes else "; ".join(outcome.warnings)
    return _in_cell(reason if len(reason) <= _MOST_WORDS else reason[:_MOST_WORDS].rsplit(" ", 1)[0] + " …")


def _in_cell(words: str) -> str:
    return words.replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    main()
