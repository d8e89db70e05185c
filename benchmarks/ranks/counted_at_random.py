"""Do ranks that count different steps ever hang, or change a training?

    python benchmarks/ranks/counted_at_random.py [--runs 200] [--ranks 2]

Trains the layouts of `testbeds.sharded` over and over on gloo ranks. Each rank counts steps of its own choice, drawn at
random, which flopwatch itself never does: its ranks plan to count the same steps. Prints how many runs ended, with the
weights of a run without a monitor, and how many rows were exact.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any

STEPS = 8
LAYOUTS = [
    "ddp",
    "fsdp1",
    "fsdp2",
    "tp",
    "cp",
    "pp_gpipe",
    "pp_1f1b",
    "pp_interleaved",
    "ddp_compiled",
    "fsdp2_compiled",
]


def as_rank(folder: str, names: list[str]) -> None:
    from flopwatch.monitor.counting.schedule import Schedule
    from testbeds.sharded import train

    chance = Random(1000 * int(os.environ["RANK"]) + len(names))
    Schedule.is_due = lambda self, index: chance.random() < 0.5  # type: ignore[method-assign]
    own = train.run

    def in_a_folder_of_its_own(folder: str, name: str, steps: int) -> dict[str, Any]:
        return own(tempfile.mkdtemp(dir=folder) if folder != "bare" else folder, name, steps)

    # Only rank 0 writes the log, so that folders need not be the same on all ranks.
    train.run = in_a_folder_of_its_own
    train.main(folder, str(STEPS), *names)


def launched(folder: str, names: list[str], ranks: int) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), __file__]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--as-rank", folder, *names], stdout=subprocess.PIPE, text=True, env=environment, check=True
    )
    return [json.JSONDecoder().raw_decode(part)[0] for part in done.stdout.split("RESULT ")[1:]]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--as-rank", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.as_rank:
        as_rank(given.as_rank[0], given.as_rank[1:])
        return
    # A process never forgets that it has compiled, so that the layouts that compile come last.
    names = sorted((LAYOUTS[run % len(LAYOUTS)] for run in range(given.runs)), key=LAYOUTS.index)
    began = time.time()
    bare = {(each["layout"], each["rank"]): each["checksum"] for each in launched("bare", LAYOUTS, given.ranks)}
    with tempfile.TemporaryDirectory() as folder:
        found = launched(str(Path(folder)), names, given.ranks)
    equal = [each["checksum"] == bare[each["layout"], each["rank"]] for each in found]
    rows = [row["exact"] for each in found for row in each["rows"]]
    print(f"{len(found) // given.ranks} of {given.runs} runs on {given.ranks} ranks ended, {time.time() - began:.0f} s")
    print(f"weights as without a monitor: {sum(equal)} of {len(equal)}; rows exact: {sum(rows)} of {len(rows)}")


if __name__ == "__main__":
    main()
