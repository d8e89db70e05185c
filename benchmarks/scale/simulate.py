"""Trainings of 1,024 and 16,384 virtual ranks: what goes over the wire and through the store, and when a row comes.

    python benchmarks/scale/simulate.py                  # writes nothing
    python benchmarks/scale/simulate.py --write          # also puts the table into docs/scale.md

The messages, the tree, the sums and the calls to the store are those of the real code: `reports.aligned`,
`layout.children`, the functions of `meeting`. Only the time is virtual: ranks take turns in one process, the clock
jumps from one event to the next, and a message takes as long as `growth.py` has measured plus 0.1 ms. The order of the
calls in `_meet` is that of `RankLink._connect`, which needs a thread per rank.
"""

import argparse
import heapq
import itertools
import random
import re
from collections import Counter
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from torch.distributed import Store  # type: ignore[attr-defined]

from flopwatch.monitor.measured_step import MeasuredStep
from flopwatch.monitor.ranks import layout, meeting, wire
from flopwatch.monitor.ranks.job_store import JobStore, probe
from flopwatch.monitor.ranks.reports import REPORT_BYTES, Profile, RankReport, aligned, report_of

RANKS = (1024, 16384)
PER_HOST = 8
WINDOWS, WINDOW_SECONDS = 3, 10.0
TOKENS = 8192
HOP_SECONDS = 1e-4
START_SECONDS = 5.0
"""The ranks' first steps are spread over this time."""
PLAN_SECONDS = 15.0
"""When the logging rank has counted and measured its first window."""
CALL_SECONDS = 9e-6
"""Processor time of a TCPStore's only thread for a call: 7 to 12 µs for `check` and `add`, measured on 2026-11-16."""
LATE_SECONDS = 5.0
_KEY = meeting.RunKey(logging_rank=0, number=1, log="runs/log/1")
PAGE = Path(__file__).parents[2] / "docs" / "scale.md"
MARKERS = "<!-- simulate -->", "<!-- /simulate -->"


class CountingStore(Store):
    """A store in this process that notes each call and its virtual time, and which keys were written."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.answered = self.longest_wait = 0.0
        self.calls: Counter[str] = Counter()
        self.per_second: Counter[int] = Counter()
        self.written: set[str] = set()
        self._values: dict[str, bytes] = {}

    def _note(self, name: str) -> None:
        """Count a call. The store has one thread, so a call is answered after all calls before it."""
        self.calls[name] += 1
        self.answered = max(self.answered, self.now) + CALL_SECONDS
        self.longest_wait = max(self.longest_wait, self.answered - self.now)
        self.per_second[int(self.answered)] += 1

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]  # the prefix store passes bytes
        self._note("set")
        self.written.add(key)
        self._values[key] = value

    def get(self, key: str) -> bytes:
        self._note("get")
        return self._values[key]

    def add(self, key: str, amount: int) -> int:
        self._note("add")
        self.written.add(key)
        value = int(self._values.get(key, b"0")) + amount
        self._values[key] = str(value).encode()
        return value

    def check(self, keys: list[str]) -> bool:
        self._note("check")
        return all(key in self._values for key in keys)

    def deleteKey(self, key: str) -> bool:  # noqa: N802  # the name in C++, by which `delete_key` finds it
        self._note("delete_key")
        return self._values.pop(key, None) is not None


@dataclass
class Job:
    """A training, and what its virtual ranks have sent.

    Attributes:
        died: By rank, the window before which its host was lost.
        messages: By rank, how many reports it has sent.
        received: By rank, how many it has received.
    """

    ranks: int
    per_host: int = PER_HOST
    died: dict[int, int] = field(default_factory=dict)
    messages: Counter[int] = field(default_factory=Counter)
    received: Counter[int] = field(default_factory=Counter)
    bytes_sent: int = 0

    def children(self, rank: int) -> list[int]:
        return layout.children(rank, 0, self.ranks, self.per_host)

    def parent(self, rank: int) -> int | None:
        return layout.parent(rank, 0, self.ranks, self.per_host)

    def below(self, rank: int) -> set[int]:
        """The rank and all ranks whose reports pass through it."""
        return {rank}.union(*map(self.below, self.children(rank)))

    def depth(self, rank: int) -> int:
        above = self.parent(rank)
        return 0 if above is None else 1 + self.depth(above)

    def own_reports(self, rank: int) -> Iterator[RankReport]:
        for window in range(WINDOWS):
            if window >= self.died.get(rank, WINDOWS):
                return
            steps = [MeasuredStep(window, seconds=0.2, tokens=TOKENS, model_flops=10**15 + rank)]
            yield report_of(rank, steps, peak_flops_per_s=1e15, profile=Profile(0.0, 0.1, 1e-9 * rank))

    def sums(self, rank: int) -> Iterator[RankReport]:
        """What a rank sends up: its reports and those of its children, by the code that adds them up."""
        return aligned([self.own_reports(rank), *(self.over_the_wire(child, rank) for child in self.children(rank))])

    def over_the_wire(self, child: int, rank: int) -> Iterator[RankReport]:
        for window, report in enumerate(self.sums(child)):
            if window >= self.died.get(child, WINDOWS):
                return  # what the child has received cannot be sent any more
            message = report.pack()
            self.messages[child] += 1
            self.received[rank] += 1
            self.bytes_sent += len(message)
            yield RankReport.unpack(message)


@dataclass(frozen=True)
class Costs:
    """Processor time of a window, measured by `growth.py`: a part for each rank, and one for each child."""

    rank_seconds: float
    child_seconds: float


def measured_costs() -> Costs:
    """The line that `growth.py` has written into docs/scale.md."""
    found = re.search(r"A line through these points is (\d+) µs \+ (\d+) µs", PAGE.read_text())
    assert found is not None, "run growth.py --write first"
    return Costs(1e-6 * int(found[1]), 1e-6 * int(found[2]))


def row_seconds(job: Job, costs: Costs, late: dict[int, float], rank: int = 0) -> float:
    """When the sum of a rank is ready after the window's end; `late` says who hands its report in later."""
    now = late.get(rank, 0.0)
    for child in job.children(rank):
        arrival = row_seconds(job, costs, late, child) + HOP_SECONDS
        now = max(now, arrival) + costs.child_seconds
    return now + costs.rank_seconds


@dataclass(frozen=True)
class Meeting:
    """What the start of a training asks of the store.

    Attributes:
        calls: By name.
        busiest_second: The most calls in one second.
        seconds: When the last rank was connected to its parent and knew who shares its device.
        longest_wait_seconds: The longest time that a call has waited for its answer.
        calls_after: Calls after the plan was sent.
    """

    calls: dict[str, int]
    busiest_second: int
    seconds: float
    longest_wait_seconds: float
    calls_after: int


class _Clock:
    """Stands in for the module `time` in `meeting`."""

    def __init__(self, store: CountingStore) -> None:
        self._store = store

    def monotonic(self) -> float:
        return self._store.now


def meet(job: Job, store: CountingStore) -> Meeting:
    """Let all ranks find each other in a store; each `yield` of a rank is a pause in seconds."""
    dice = random.Random(0)
    connected: dict[int, float] = {}
    order = itertools.count()
    ranks = [_rank(job, rank, store, connected) for rank in range(job.ranks)]
    turns = [(dice.uniform(0.0, START_SECONDS), next(order), rank) for rank in ranks]
    heapq.heapify(turns)
    with patch.object(meeting, "time", _Clock(store)):
        while turns:
            store.now, _, rank = heapq.heappop(turns)
            pause = next(rank, None)
            if pause is not None:
                heapq.heappush(turns, (max(store.now, store.answered) + pause, next(order), rank))
    after = sum(count for second, count in store.per_second.items() if second > PLAN_SECONDS)
    return Meeting(
        dict(store.calls), max(store.per_second.values()), max(connected.values()), store.longest_wait, after
    )


def _rank(job: Job, rank: int, all_keys: CountingStore, connected: dict[int, float]) -> Generator[float, None, None]:
    """The calls of `RankLink._connect` for one rank."""
    with JobStore(None, direct=all_keys).open(wire.Sockets()) as job_store:
        yield from _meet(job, rank, job_store)
    connected[rank] = max(all_keys.now, all_keys.answered)
    if rank == 0:
        yield max(0.0, PLAN_SECONDS - connected[rank])
        meeting.check_single(meeting.run_store(job_store, _KEY.run))
        meeting.has_plan(meeting.run_store(job_store, _KEY.run))


def _meet(job: Job, rank: int, job_store: Any) -> Generator[float, None, None]:
    probe(job_store)
    store = meeting.run_store(job_store, _KEY.run)
    census = meeting.DeviceCensus(store, f"host{rank // job.per_host}/gpu{rank % job.per_host}", job.ranks)
    devices: int | None = None
    if rank == 0:
        meeting.publish_run(job_store, _KEY, meeting.Terms(wire.new_token(), job.per_host))
    else:
        pauses = meeting.pauses(job.ranks)
        while (run := meeting.find_run(job_store, _KEY, rank)) is None:
            yield next(pauses)
            devices = census.ranks() if devices is None else devices
        store = meeting.join_run(job_store, run, rank)
        meeting.terms_of(store)
    if job.children(rank):
        meeting.publish_address(store, rank, "10.0.0.1:40000")
    above = job.parent(rank)
    for pause in meeting.pauses(job.ranks) if above is not None else ():
        if above is not None and meeting.find_address(store, above) is not None:
            meeting.terms_of(store)
            break
        yield pause
        devices = census.ranks() if devices is None else devices
    for pause in meeting.pauses(job.ranks):
        if devices is not None:
            break
        yield pause
        devices = census.ranks()


def count_windows(job: Job) -> list[RankReport]:
    """Send all windows; return the rows of the logging rank."""
    rows = list(job.sums(0))
    assert len(rows) == WINDOWS, "every row comes"
    assert rows[0].ranks == job.ranks
    assert rows[0].total("tokens").total == TOKENS * job.ranks
    return rows


def lose_host(ranks: int, host: int, per_host: int = PER_HOST) -> tuple[list[RankReport], set[int]]:
    """Lose a host before the second window; return the rows, and the ranks that are not in the last one."""
    dead = range(host * per_host, (host + 1) * per_host)
    job = Job(ranks, per_host, died=dict.fromkeys(dead, 1))
    rows = count_windows(job)
    lost = set[int]().union(*map(job.below, dead))
    assert rows[-1].ranks == ranks - len(lost)
    return rows, lost


def vanished_seconds() -> int:
    """How long a parent waits for a host that has vanished without closing its connections."""
    settings = wire._TCP_OPTIONS
    return settings["TCP_KEEPIDLE"] + settings["TCP_KEEPINTVL"] * settings["TCP_KEEPCNT"]


def simulate(ranks: int, costs: Costs, per_host: int = PER_HOST) -> dict[str, str]:
    """All rows of the table for one number of ranks, by name."""
    job = Job(ranks, per_host)
    rows = count_windows(job)
    met = meet(job, CountingStore())
    last = max(range(ranks), key=job.depth)
    _, few = lose_host(ranks, last // per_host, per_host)
    _, many = lose_host(ranks, 1, per_host)  # the tree is filled from the left, so most hosts are below this one
    on_time = row_seconds(job, costs, {})
    after_the_late = row_seconds(job, costs, {last: LATE_SECONDS})
    assert after_the_late >= LATE_SECONDS
    calls = sum(met.calls.values())
    own = f"{START_SECONDS:.0f} s of them for the start of the ranks themselves"
    return {
        "ranks": f"{ranks:,}",
        "messages per window": f"{sum(job.messages.values()) // len(rows):,} of {REPORT_BYTES} bytes",
        "bytes per window": f"{job.bytes_sent / len(rows) / 1e6:.2f} MB",
        "sent by a rank": f"{max(job.messages.values()) // len(rows)} message",
        "received by a rank, at most": f"{max(job.received.values()) // len(rows)} messages",
        "levels of the tree": f"{job.depth(last)}",
        "calls to the store until all ranks have met": f"{calls:,}, {calls / ranks:.0f} per rank",
        "answered in the busiest second": f"{met.busiest_second:,} of at most {1 / CALL_SECONDS:,.0f}",
        "longest wait for an answer": f"{1e3 * met.longest_wait_seconds:,.0f} ms",
        "all ranks have met after": f"{met.seconds:.1f} s, {own}",
        "calls to the store after the plan": f"{met.calls_after}, and one when the run ends",
        "time to the row": f"{1e3 * on_time:.1f} ms",
        f"time to the row, a rank {LATE_SECONDS:.0f} s late": f"{after_the_late:.4f} s; the row is complete",
        "a host lost that has no host below it": f"{len(few):,} ranks missing, rows come",
        "the host with the most ranks below it lost": f"{len(many):,} ranks missing, rows come",
    }


def as_text(results: list[dict[str, str]], costs: Costs) -> str:
    lines = ["| | " + " | ".join(result["ranks"] + " ranks" for result in results) + " |"]
    lines.append("| --- |" + " --- |" * len(results))
    names = [name for name in results[0] if name != "ranks"]
    lines += [f"| {name} | " + " | ".join(result[name] for result in results) + " |" for name in names]
    lines += [
        "",
        f"Times with {1e6 * costs.rank_seconds:.0f} µs per rank and {1e6 * costs.child_seconds:.0f} µs per child (the "
        f"line above) and {1e3 * HOP_SECONDS:.1f} ms per hop. A rank whose process is killed is noticed at once, a "
        f"host that vanishes from the network after {vanished_seconds()} s; rows after that have the logging rank's "
        "own numbers.",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    costs = measured_costs()
    text = as_text([simulate(ranks, costs) for ranks in options.ranks], costs)
    print(text)
    if options.write:
        before, _, rest = PAGE.read_text().partition(MARKERS[0])
        after = rest.partition(MARKERS[1])[2]
        PAGE.write_text(f"{before}{MARKERS[0]}\n{text}\n{MARKERS[1]}{after}")


if __name__ == "__main__":
    main()
