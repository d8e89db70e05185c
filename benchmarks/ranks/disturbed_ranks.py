"""Does a training of two ranks behave as without the monitor, whatever happens? Each case many times, with and without.

    python benchmarks/ranks/disturbed_ranks.py                              # every case 20 times
    python benchmarks/ranks/disturbed_ranks.py --repeats 3 --cases killed_0 killed_1

The outcome of a rank is its exit code, the steps it did, what it raised and in which call, and all its parameters.
"""

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from testbeds.disturbed_training import TO_THE_MONITOR, TO_THE_TRAINING, disturbed, outcome
from testbeds.slow_link import why_not

SECONDS_PER_TRAINING = 60.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--at-once", type=int, default=6, help="trainings that run side by side")
    parser.add_argument("--cases", nargs="+", default=[*TO_THE_TRAINING, *TO_THE_MONITOR])
    options = parser.parse_args()
    say("| case | trainings with the monitor | ended as without | hung | longest close | ways it ended |")
    say("| --- | --- | --- | --- | --- | --- |")
    for case in options.cases:
        if case == "cut" and (reason := why_not()) is not None:
            say(f"| {case} | {reason} | | | | |")
            continue
        say(table_row(case, run(case, options.repeats, options.at_once)))


def run(case: str, repeats: int, at_once: int) -> list[dict[str, Any]]:
    cases = [f"{case}:bare", f"{case}:monitored"] * repeats
    with tempfile.TemporaryDirectory(prefix="flopwatch-disturbed-") as folder:
        seconds = SECONDS_PER_TRAINING * len(cases)
        records: list[dict[str, Any]] = disturbed(cases, Path(folder), at_once=at_once, seconds=seconds)
        return records


def table_row(case: str, records: list[dict[str, Any]]) -> str:
    bare, monitored = records[::2], records[1::2]
    seen = {tuple(map(outcome, record["ranks"])) for record in bare}
    same = sum(tuple(map(outcome, record["ranks"])) in seen for record in monitored)
    ranks = [rank for record in monitored for rank in record["ranks"]]
    hung = sum(rank["exit_code"] is None for rank in ranks)
    closes = [rank["result"]["close_seconds"] for rank in ranks if rank["result"] is not None]
    ways = Counter(" / ".join(map(ending, record["ranks"])) for record in monitored)
    shown = "; ".join(f"{count} x {way}" for way, count in ways.most_common())
    return f"| {case} | {len(monitored)} | {same} | {hung} | {max(closes):.2f} s | {shown} |"


def ending(rank: dict[str, Any]) -> str:
    if rank["result"] is None:
        return f"exit code {rank['exit_code']}"
    error = rank["result"]["error"]
    return f"{rank['result']['steps_done']} steps" + ("" if error is None else f", {error['message'].splitlines()[0]}")


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
