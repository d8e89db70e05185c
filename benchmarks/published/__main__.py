"""Compares every published row with our count, prints the tables, and writes docs/published.md.

    PYTHONPATH=benchmarks python -m published            # counts every model afresh; some seven minutes
    PYTHONPATH=benchmarks python -m published --stored   # with the counts of the last run; a second
    PYTHONPATH=benchmarks python -m published --csv FILE # also writes every row with what became of it

Ends with status 1 if fewer than 400 rows were processed, or less than 99 % of the rows with a stated convention and
tokens per second that are not rounded are within 0.5 %.
"""

import argparse
import sys
from pathlib import Path

from rich.console import Console

from published.counts import Counts
from published.page import section, tables, write, write_csv
from published.rows import all_rows
from published.verdicts import of_group, tally, verdicts

FEWEST_ROWS = 400
LEAST_SHARE = 0.99


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m published", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--stored", action="store_true", help="use the counts of the last run")
    parser.add_argument("--no-page", action="store_true", help="write nothing")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write every row")
    options = parser.parse_args()
    counts = Counts(afresh=not options.stored)
    found = verdicts(all_rows(), counts)
    console = Console(width=None if sys.stdout.isatty() else 200)
    for table in tables(found):
        console.print(table)
    if options.csv is not None:
        write_csv(options.csv, found)
    if not options.no_page:
        counts.write()
        write(section(found))
    stated = tally([*of_group(found, "stated"), *of_group(found, "own term")])
    share = stated.unrounded_within / stated.unrounded
    print(
        f"{len(found)} rows, {stated.unrounded_within} of {stated.unrounded} with a stated convention and unrounded "
        f"tokens/s within 0.5 % ({share:.1%})"
    )
    return int(len(found) < FEWEST_ROWS or share < LEAST_SHARE)


if __name__ == "__main__":
    raise SystemExit(main())
