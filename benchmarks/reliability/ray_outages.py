"""Kill the raylet or the control service (GCS) of a Ray cluster during sweeps: all trials end, and what began is told.

    python benchmarks/reliability/ray_outages.py --kills 10

Each kill has a cluster of one node and a sweep of its own. It falls at a random moment; a random time later, a raylet
joins again, or a new head has the old address. Shell trials write down when they begin and end, and a lock shows two
at once, as in `never_twice.py`.
"""

import argparse
import contextlib
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flopwatch.records.sweep_results import read_results
from reliability.never_twice import Campaign, make_ready, running_trials, supervisors
from testbeds.real_ray import kill_gcs, kill_raylet, ray_cluster

VICTIMS = ("raylet", "gcs")
CORES, TRIALS = 2, 6
_END_SECONDS = 600.0
_CLEAR_SECONDS = 10.0


@dataclass
class Tally:
    """What the kills did; names of trials begin with the victim and the number of the kill."""

    kills: dict[str, int] = field(default_factory=lambda: dict.fromkeys(VICTIMS, 0))
    trials: int = 0
    ok: int = 0
    begins: int = 0
    lost_after_they_began: list[str] = field(default_factory=list)
    lost_without_having_begun: list[str] = field(default_factory=list)
    without_a_result: list[str] = field(default_factory=list)
    twice: list[str] = field(default_factory=list)
    finished_and_run_again: list[str] = field(default_factory=list)
    attempts_that_are_not_begins: list[str] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    slowest_sweep_seconds: float = 0.0

    @property
    def is_clean(self) -> bool:
        wrong = (self.lost_without_having_begun, self.without_a_result, self.twice, self.left)
        return not any((*wrong, self.finished_and_run_again, self.attempts_that_are_not_begins))


def outage(victim: str, cluster: Any, away_seconds: float, stack: ExitStack) -> None:
    """Kill the victim, and bring its service back after a while."""
    if victim == "raylet":
        kill_raylet(cluster.head_node)
        time.sleep(away_seconds)
        cluster.add_node(num_cpus=CORES)
        return
    port = int(cluster.address.rpartition(":")[2])
    kill_gcs(cluster)
    time.sleep(away_seconds)
    stack.close()  # a head that has lost its GCS is of no use: whoever operates it starts another
    stack.enter_context(head(port))


def head(port: int | None = None) -> AbstractContextManager[Any]:
    return ray_cluster(cpus=CORES, port=port)


def one_kill(folder: Path, victim: str, moment: float, away_seconds: float, tally: Tally) -> None:
    make_ready(folder)
    began = time.monotonic()
    with ExitStack() as stack:
        cluster = stack.enter_context(head())
        engine = ["--engine", "ray", "--engine-option", f"address={cluster.address}"]
        campaign = Campaign(folder, engine, "shell", TRIALS)
        runner = campaign.start()
        try:
            _wait(lambda: (folder / "starts.txt").exists() or runner.poll() is not None)
            time.sleep(moment)
            outage(victim, cluster, away_seconds, stack)
            tally.kills[victim] += 1
            with contextlib.suppress(subprocess.TimeoutExpired):
                runner.wait(_END_SECONDS)
        finally:
            runner.kill()
        tally.slowest_sweep_seconds = max(tally.slowest_sweep_seconds, time.monotonic() - began)
        _count(campaign, f"{victim} {tally.kills[victim]}", tally)


def _wait(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120.0
    while not is_so():
        assert time.monotonic() < deadline, "no trial began"
        time.sleep(0.05)


def _count(campaign: Campaign, kill: str, tally: Tally) -> None:
    begins, ends = (_sizes(campaign.folder / name) for name in ("starts.txt", "ends.txt"))
    results = read_results(campaign.sweep)
    by_size = {result.spec.batch_size: result for result in results.values()}
    tally.trials += TRIALS
    tally.begins += sum(begins.values())
    for size in range(1, TRIALS + 1):
        name, result = f"{kill}, trial {size}", by_size.get(size)
        if result is None:
            tally.without_a_result.append(name)
            continue
        tally.ok += result.outcome == "ok"
        told = f"{name}: {result.outcome}, {result.reason}"
        if result.outcome != "ok":
            (tally.lost_after_they_began if begins[size] else tally.lost_without_having_begun).append(told)
        if ends[size] > 1:
            tally.finished_and_run_again.append(name)
        if len(result.earlier_attempts) + 1 != begins[size]:
            tally.attempts_that_are_not_begins.append(f"{told}: {len(result.earlier_attempts) + 1} for {begins[size]}")
    if (campaign.folder / "twice.txt").exists():
        tally.twice += (campaign.folder / "twice.txt").read_text().splitlines()
    tally.left += _left(campaign)


def _sizes(file: Path) -> Counter[int]:
    return Counter(map(int, file.read_text().split())) if file.exists() else Counter()


def _left(campaign: Campaign) -> list[int]:
    deadline = time.monotonic() + _CLEAR_SECONDS
    while True:
        left = [pid for pids in running_trials(campaign.sweep).values() for pid in pids] + supervisors(campaign.sweep)
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10, help="Of each victim.")
    parser.add_argument("--victims", nargs="+", default=list(VICTIMS))
    parser.add_argument("--longest", type=float, default=10.0, help="Most seconds between the first begin and a kill.")
    parser.add_argument("--away", type=float, default=90.0, help="Most seconds until the service is back.")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    draw, tally = random.Random(asked.seed), Tally()
    root = Path(tempfile.mkdtemp(prefix="ray-outages-"))
    for number in range(asked.kills):
        for victim in asked.victims:
            folder = root / f"{victim}-{number}"
            folder.mkdir()
            moment, away = draw.uniform(0.0, asked.longest), draw.uniform(0.0, asked.away)
            one_kill(folder, victim, moment, away, tally)
            print(f"{victim} killed at {moment:.1f} s, away for {away:.0f} s: {tally}", file=sys.stderr, flush=True)
    print("clean" if tally.is_clean else f"NOT CLEAN, see {root}", tally)
    if not tally.is_clean:
        sys.exit(1)
    shutil.rmtree(root)


if __name__ == "__main__":
    main()
