"""Builds an environment per row, checks the install, runs the portable suite, and writes the tables of the docs.

    make matrix                                             # all rows; a few minutes each
    PYTHONPATH=benchmarks python -m matrix --only 2.6 2.15  # some rows
    PYTHONPATH=benchmarks python -m matrix --table          # runs nothing, writes the tables from stored results

Needs only the standard library. uv is installed into .cache/matrix unless the machine has it, and an environment is
deleted after its row. uv uses the indexes that pip is configured with, and its own variables (UV_CACHE_DIR,
UV_TORCH_BACKEND).
"""

import argparse
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import date
from pathlib import Path

from matrix.environments import WORK, CannotBuildError, build, build_wheel, committed, find_python
from matrix.rows import Row, chosen
from matrix.suite import Outcome, read_results, run_suite, write_results
from matrix.tables import lacks, suite_words, write_tables

RESULTS = Path(__file__).parent / "results.json"
"""Committed, so that rows can be run one by one and the tables can be written again."""


def main() -> int:
    options = _options()
    results = read_results(options.results)
    if not options.table:
        WORK.mkdir(parents=True, exist_ok=True)
        wheel, day, commit = build_wheel(), date.today().isoformat(), committed()
        with ThreadPoolExecutor(options.jobs) as pool:
            runs = [pool.submit(_run_row, row, wheel, options) for row in chosen(options.only)]
            done = [replace(run.result(), day=day, commit=commit) for run in runs]
        results.update({outcome.name: outcome for outcome in done})
        if options.write:
            write_results(options.results, results)
    if options.write:
        write_tables(results)
    return 0 if options.table else int(not all(outcome.is_green or outcome.not_run for outcome in done))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m matrix", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", nargs="+", default=[], help="rows: 2.6, 2.15-py3.13, lowest, oldest, newest")
    parser.add_argument("--jobs", type=int, default=1, help="rows at the same time")
    parser.add_argument("--quick", action="store_true", help="leave out the slowest tests, as CI does")
    parser.add_argument("--any-python", action="store_true", help="use this Python if the row's is not installed")
    parser.add_argument("--keep", action="store_true", help="do not delete the environments")
    parser.add_argument("--table", action="store_true", help="run nothing, write the tables from stored results")
    parser.add_argument("--no-write", dest="write", action="store_false", help="do not write results and docs")
    parser.add_argument("--results", type=Path, default=RESULTS)
    return parser.parse_args()


def _run_row(row: Row, wheel: Path, options: argparse.Namespace) -> Outcome:
    began = time.monotonic()

    def say(words: str) -> None:
        print(f"{row.name} [{time.monotonic() - began:4.0f} s] {words}", flush=True)

    python = find_python(row.python, or_this=options.any_python)
    if python is None:
        say(f"not run: there is no Python {row.python} on this machine")
        return Outcome(row.name, row.python, not_run=f"no Python {row.python} on the machine that ran the matrix")
    try:
        environment = build(row, python, wheel, say)
        say("running the portable suite")
        outcome = run_suite(row, environment, quick=options.quick)
    except CannotBuildError as error:
        say(f"the environment cannot be made: {error}")
        return Outcome(row.name, row.python, crash=f"the environment cannot be made: {error}")
    finally:
        if not options.keep:
            _keep_log(row)
            shutil.rmtree(WORK / row.name, ignore_errors=True)
    changed = ", ".join(outcome.changed_packages) or "nothing"
    say(f"{suite_words(outcome)}; the install changed {changed}; lacks {lacks(outcome)}")
    return outcome


def _keep_log(row: Row) -> None:
    log = WORK / row.name / "portable.log"
    if log.exists():
        shutil.copy(log, WORK / f"{row.name}.log")


if __name__ == "__main__":
    raise SystemExit(main())
