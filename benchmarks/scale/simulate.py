"""What trainings of 1,024 and 16,384 ranks ask of the job's store, measured with a real `TCPStore`.

    python benchmarks/scale/simulate.py                  # writes nothing
    python benchmarks/scale/simulate.py --write          # also puts the table into docs/scale.md

The store is torch's, in a process of its own. The ranks are virtual: this process takes their turns one after the
other, with the real code for messages, sums, the tree and the calls to the store. Measured are the calls, their bytes,
and the processor time of the store's process, which all ranks of such a training would share. The time to a row is
computed from that processor time and the pauses between two looks.
"""

import argparse
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from flopwatch.monitor.measured_step import MeasuredStep
from flopwatch.monitor.ranks import layout
from flopwatch.monitor.ranks.job_store import (
    ON_ANY_DEVICE,
    PLAN,
    PUBLISHED,
    Outbox,
    RunKey,
    alive,
    open_slots,
    pauses,
    peek,
    prefix,
    read_slots,
)
from flopwatch.monitor.ranks.reports import Message, Profile, RankReport, merge, report_of

RANKS = (1024, 16384)
PER_HOST = 8
WINDOWS = 3
TOKENS = 8192
KEY = RunKey(logging_rank=0, number=1, log="runs/log/1")
PAGE = Path(__file__).parents[2] / "docs" / "scale.md"
MARKERS = "<!-- simulate -->", "<!-- /simulate -->"
STORE = """
import sys
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


class NotedStore:
    """A client of a store, with a prefix as torch's `PrefixStore`, that notes the commands to the server."""

    def __init__(self, store: Any, prefix: str = "", noted: "Counter[str] | None" = None) -> None:
        self._store = store
        self._prefix = prefix
        self.noted = Counter[str]() if noted is None else noted

    def under(self, prefix: str) -> "NotedStore":
        return NotedStore(self._store, f"{self._prefix}{prefix}/", self.noted)

    def _note(self, *texts: str | bytes) -> None:
        self.noted["calls"] += 1
        self.noted["bytes"] += sum(map(len, texts))

    def set(self, key: str, value: str) -> None:
        self._note(self._prefix + key, value)
        self._store.set(self._prefix + key, value)

    def add(self, key: str, amount: int) -> int:
        self._note(self._prefix + key)
        return int(self._store.add(self._prefix + key, amount))

    def check(self, keys: list[str]) -> bool:
        keys = [self._prefix + key for key in keys]
        self._note(*keys)
        return bool(self._store.check(keys))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        found = bytes(self._store.compare_set(self._prefix + key, expected, desired))
        self._note(self._prefix + key, expected, desired, found)
        return found

    def multi_get(self, keys: list[str]) -> list[bytes]:
        keys = [self._prefix + key for key in keys]
        found = list(self._store.multi_get(keys))
        self._note(*keys)  # torch's client asks whether the keys exist, and then for their values
        self._note(*keys, *found)
        return found

    def multi_set(self, keys: list[str], values: list[str]) -> None:
        keys = [self._prefix + key for key in keys]
        self._note(*keys, *values)
        self._store.multi_set(keys, values)

    def delete_key(self, key: str) -> bool:
        self._note(self._prefix + key)
        return bool(self._store.delete_key(self._prefix + key))


class StoreProcess:
    """A `TCPStore` in a process of its own."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._pid = process.pid
        assert process.stdout is not None
        self._port = int(process.stdout.readline())

    def connect(self) -> NotedStore:
        return NotedStore(TCPStore("127.0.0.1", self._port, is_master=False, wait_for_workers=False))

    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self._pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def store_process() -> Iterator[StoreProcess]:
    command = [sys.executable, "-c", STORE]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield StoreProcess(process)
    finally:
        process.kill()
        process.communicate()


@dataclass(frozen=True)
class Load:
    """What the store had to do: commands, bytes of keys and values in both directions, seconds of its processor."""

    calls: float
    bytes: float
    cpu_seconds: float


class Job:
    """A training of virtual ranks on a store.

    Attributes:
        below: The ranks that report to a rank, for those that have any.
        levels: The ranks by their distance from the logging rank.
    """

    def __init__(self, ranks: int, client: NotedStore, per_host: int = PER_HOST) -> None:
        self.ranks = ranks
        self.per_host = per_host
        self._job_store = client.under(prefix({}, ranks))
        self._store = self._job_store.under(KEY.run)
        self._outboxes = [Outbox(self._store, rank) for rank in range(ranks)]
        below = [layout.children(rank, 0, ranks, per_host) for rank in range(ranks)]
        self.below = {rank: children for rank, children in enumerate(below) if children}
        self.levels = [[0]]
        while deeper := [child for rank in self.levels[-1] for child in self.below.get(rank, ())]:
            self.levels.append(deeper)

    def under(self, rank: int) -> set[int]:
        """The rank and all ranks whose reports pass through it."""
        return {rank}.union(*map(self.under, self.below.get(rank, ())))

    def meet(self) -> None:
        """The calls of `RankLink._lead` and `_follow`, if no rank has to wait for another one."""
        for rank in range(self.ranks):
            device = f"on_device/host{rank // self.per_host}/gpu{rank % self.per_host}"
            self._store.add(device, 1)
            self._store.add(ON_ANY_DEVICE, 1)
            self._lead() if rank == 0 else self._follow(rank)
            self._store.add(ON_ANY_DEVICE, 0)
            self._store.add(device, 0)
            open_slots(self._store, self.below.get(rank, ()))

    def _lead(self) -> None:
        self._store.add(PUBLISHED, 1)
        self._store.set("log", KEY.log)
        self._job_store.set(KEY.by_log, KEY.run)
        self._store.set(PLAN, "[50, 8]")

    def _follow(self, rank: int) -> None:
        assert peek(self._job_store, KEY.by_log) == KEY.run
        self._store.add(alive(rank), 1)
        assert self._store.check([PLAN])
        assert peek(self._store, PLAN) is not None

    def window(self, window: int) -> RankReport:
        """Pass the reports of a window up the tree; return the sum."""
        sums: dict[int, RankReport] = {}
        for level in reversed(self.levels):
            for rank in level:
                sums[rank] = self._sum(rank, window)
                if rank != 0:
                    self._outboxes[rank].write(Message([sums.pop(rank)], None, False))
        assert sums[0].ranks == self.ranks
        assert sums[0].total("tokens").total == TOKENS * self.ranks
        return sums[0]

    def _sum(self, rank: int, window: int) -> RankReport:
        steps = [MeasuredStep(window, seconds=0.2, tokens=TOKENS, model_flops=10**15 + rank)]
        reports = [report_of(rank, steps, peak_flops_per_s=1e15, profile=Profile(0.0, 0.1, 1e-9 * rank))]
        children = self.below.get(rank, [])
        for looked_at in (children[:-1], children[-1:]):  # as if the last one were a little late
            if looked_at:
                messages = read_slots(self._store, looked_at)
                reports += [each for message in messages.values() for each in message.reports]
        return merge(reports)


def load_of(work: Callable[[], object], store: StoreProcess, client: NotedStore, times: int = 1) -> Load:
    """The load on the store while `work` runs, divided by `times`."""
    noted, cpu_seconds = client.noted.copy(), store.cpu_seconds()
    work()
    calls, size = (client.noted[name] - noted[name] for name in ("calls", "bytes"))
    return Load(calls / times, size / times, (store.cpu_seconds() - cpu_seconds) / times)


def simulate(ranks: int, per_host: int = PER_HOST) -> dict[str, str]:
    """All rows of the table for one number of ranks, by name."""
    with store_process() as store:
        client = store.connect()
        job = Job(ranks, client, per_host)
        meeting = load_of(job.meet, store, client)
        window = load_of(lambda: [job.window(number) for number in range(WINDOWS)], store, client, WINDOWS)
    pause = next(pauses(ranks // layout.FAN_OUT))
    depth = len(job.levels) - 1
    row_seconds = window.cpu_seconds + 2 * depth * pause
    few, many = (job.under(host * per_host) for host in (ranks // per_host - 1, 1))
    return {
        "ranks": f"{ranks:,}",
        "commands to the store per window": f"{window.calls:,.0f}, {window.calls / ranks:.2f} per rank",
        "bytes per window, keys included": f"{window.bytes / 1e6:.2f} MB, {window.bytes / ranks:,.0f} per rank",
        "the store's process is busy per window": f"{window.cpu_seconds:.2f} s",
        "of that per command": f"{1e6 * window.cpu_seconds / window.calls:.0f} µs",
        "written by a rank": "1 message",
        "read by a rank, at most": f"{max(map(len, job.below.values()))} messages",
        "levels of the tree": f"{depth}",
        "time to the row, computed": f"{row_seconds:.2f} s",
        "commands until all ranks have met": f"{meeting.calls:,.0f}, {meeting.calls / ranks:.0f} per rank",
        "the store's process is busy with these": f"{meeting.cpu_seconds:.2f} s",
        "a host lost that has no host below it": f"{len(few):,} ranks missing, rows come",
        "the host with the most ranks below it lost": f"{len(many):,} ranks missing, rows come",
    }


def as_text(results: list[dict[str, str]]) -> str:
    lines = ["| | " + " | ".join(result["ranks"] + " ranks" for result in results) + " |"]
    lines.append("| --- |" + " --- |" * len(results))
    names = [name for name in results[0] if name != "ranks"]
    lines += [f"| {name} | " + " | ".join(result[name] for result in results) + " |" for name in names]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    text = as_text([simulate(ranks) for ranks in options.ranks])
    print(text)
    if options.write:
        before, _, rest = PAGE.read_text().partition(MARKERS[0])
        after = rest.partition(MARKERS[1])[2]
        PAGE.write_text(f"{before}{MARKERS[0]}\n{text}\n{MARKERS[1]}{after}")


if __name__ == "__main__":
    main()
