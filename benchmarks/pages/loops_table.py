"""Runs every loop of testbeds/loops beside an op-by-op count of its steps and writes the table of docs/loops.md.

python benchmarks/pages/loops_table.py
"""

import logging
import tempfile
import warnings
from collections.abc import Iterator
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

Model FLOPs, the numerator of MFU, are compared too. Their truth is the count without what checkpoints run again and,
for batches with padding, that of a third run in which every row of a batch is called by itself at its own length.

A row is not exact while too few steps of its kind have been counted as they ran. A column gives the number of rows
that are not exact, and the last column the reason of the last such row. The second table has loops whose steps
differ, with 300 steps instead of about 12. Most of these are not counted themselves, and how many rows are exact
depends on how fast the machine is. The page is written by
`python benchmarks/pages/loops_table.py`; the same loops are tests (`tests/monitor/test_loops.py`).
"""

KNOWN = """## Known

- A loop with a known gap stands in the table with it, and is in the list of its test, so that a new one fails.
- `count_flops` and a live step disagree on an op made by `torch.library.custom_op`: `count_flops` counts the products
  of its body, while a live step names it as an op without a formula, so that its FLOPs are a lower bound. Give such
  an op a formula (`@flopwatch.formula("mine::product")`), and both count the same. If the op has the name of one of
  torch's products (`mine::mm`), no live step is counted, and the rows say so with a `KeyError`.
"""


def main() -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    audit, table = import_module("testbeds.loops.audit").audit, import_module("testbeds.loops.loops")
    audited, long = [], []
    for loop in table.LOOPS:
        with tempfile.TemporaryDirectory() as folder:
            audited.append((loop, audit(loop, Path(folder))))
    for loop in table.LONG:
        with tempfile.TemporaryDirectory() as folder:
            long.append((loop, audit(loop, Path(folder), steps=table.LONG_STEPS)))
    PAGE.write_text(page(audited, long), encoding="utf-8")
    print(f"wrote {PAGE}: {summary(audited)}")


def page(audited: list[tuple[Any, Any]], long: list[tuple[Any, Any]]) -> str:
    return "\n".join([HEAD, summary(audited), "", *_table(audited), "", "## 300 steps", "", *_table(long), "", KNOWN])


def _table(audited: list[tuple[Any, Any]]) -> Iterator[str]:
    yield "| loop | rows | exact | not exact | called exact but wrong | only model FLOPs wrong | why not exact |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for loop, outcome in audited:
        wrong = sum(row.is_wrong_and_exact for row in outcome.rows)
        model_wrong = sum(row.is_only_model_wrong_and_exact for row in outcome.rows)
        not_exact = len(outcome.rows) - outcome.exact_rows
        gap = loop.gap or loop.model_gap
        why = f"known gap: {gap}" if gap else _why(outcome)
        cells = [_in_cell(loop.what), len(outcome.rows), outcome.exact_rows, not_exact, wrong, model_wrong, why]
        yield f"| {' | '.join(map(str, cells))} |"


def summary(audited: list[tuple[Any, Any]]) -> str:
    outcomes = [outcome for _, outcome in audited]
    in_the_end = sum(outcome.rows[-1].is_exact is True for outcome in outcomes)
    wrong = sum(any(row.is_wrong_and_exact for row in outcome.rows) for outcome in outcomes)
    model_wrong = sum(any(row.is_only_model_wrong_and_exact for row in outcome.rows) for outcome in outcomes)
    same = sum(outcome.is_same_training for outcome in outcomes)
    return (
        f"{len(outcomes)} loops: the last row is exact in {in_the_end} and not exact in {len(outcomes) - in_the_end}; "
        f"rows that are called exact and are wrong occur in {wrong}, and in {model_wrong} more only their model FLOPs "
        f"are wrong; {same} end with the same weights."
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
