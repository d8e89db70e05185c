"""Runs every loop of testbeds/loops beside an op-by-op count of its steps and writes the table of docs/loops.md.

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

This page shows for which kinds of training loops the monitor's FLOPs are exact. Each loop below runs twice from the
same seed: once without flopwatch, while torch's own formulas count each step op by op, and once with the monitor.
Each row of the monitor's log covers a few steps. A row with `exact: true` must have the same FLOPs as the count; any
other row must give a reason. The weights after both runs must be equal bit by bit. Products that an optimizer
computes itself (Muon, Shampoo) are in neither count.

A row is not exact while too few steps of its kind have been counted as they ran. A column gives the number of rows
that are not exact, and the last column the reason of the last such row. The page is written by
`python benchmarks/pages/loops_table.py`; the same loops are tests (`tests/monitor/test_loops.py`).
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
    lines = [HEAD, summary(audited), "", "| loop | rows | exact | not exact | called exact but wrong | why not exact |"]
    lines.append("| --- | --- | --- | --- | --- | --- |")
    for loop, outcome in audited:
        wrong = sum(row.is_wrong_and_exact for row in outcome.rows)
        not_exact = len(outcome.rows) - outcome.exact_rows
        why = f"known gap: {loop.gap}" if loop.gap else _why(outcome)
        cells = [_in_cell(loop.what), len(outcome.rows), outcome.exact_rows, not_exact, wrong, why]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def summary(audited: list[tuple[Any, Any]]) -> str:
    outcomes = [outcome for _, outcome in audited]
    in_the_end = sum(outcome.rows[-1].is_exact is True for outcome in outcomes)
    wrong = sum(any(row.is_wrong_and_exact for row in outcome.rows) for outcome in outcomes)
    same = sum(outcome.is_same_training for outcome in outcomes)
    have = "has" if wrong == 1 else "have"
    return (
        f"{len(outcomes)} loops: the last row is exact in {in_the_end} and not exact in {len(outcomes) - in_the_end}; "
        f"{wrong} {have} a row that is called exact and is wrong; {same} end with the same weights."
    )


def _why(outcome: Any) -> str:
    """The reason of the last row that is not exact."""
    not_exact = [row for row in outcome.rows if not row.is_exact]
    if not not_exact:
        return ""
    reason = not_exact[-1].notes[-1] if not_exact[-1].notes else "; ".join(outcome.warnings)
    return _in_cell(reason if len(reason) <= _MOST_WORDS else reason[:_MOST_WORDS].rsplit(" ", 1)[0] + " …")


def _in_cell(words: str) -> str:
    return words.replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    main()
