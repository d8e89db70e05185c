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
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from flopwatch.monitor.measured_step import MeasuredStep
from flopwatch.monitor.ranks import layout
from flopwatch.monitor.ranks.job_store import (
    ON_ANY_DEVICE,
    PLAN,
    PUBLISHED,
    RunKey,
    StoreOutbox,
    alive,
    open_slots,
    pauses,
    peek,
    prefix,
    read_slots,
)
from flopwatch.monitor.ranks.reports import Message, RankReport, merge, report_of

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


@dataclass
class Notes:
    """What the virtual ranks have asked of the store, by rank.

    Attributes:
        rank: Whose turn it is.
        calls: Commands to the server.
        bytes: Of keys and values, in both directions.
        cpu_seconds: Processor time of the rank's thread, this process being that thread.
        is_checking: Whether to check that no command would wait.
    """

    rank: int = 0
    calls: Counter[int] = field(default_factory=Counter)
    bytes: Counter[int] = field(default_factory=Counter)
    cpu_seconds: Counter[int] = field(default_factory=Counter)
    is_checking: bool = False

    @contextmanager
    def turn(self, rank: int) -> Iterator[None]:
        self.rank, began = rank, time.thread_time()
        yield
        self.cpu_seconds[rank] += time.thread_time() - began  # type: ignore[assignment]


class NotedStore:
    """A client of a store, with a prefix as torch's `PrefixStore`, that notes the commands to the server.

    It has no command that waits for a key, except `multi_get`, whose keys must be there.
    """

    def __init__(self, store: Any, prefix: str = "", notes: Notes | None = None) -> None:
        self._store = store
        self._prefix = prefix
        self.notes = notes or Notes()

    def under(self, prefix: str) -> "NotedStore":
        return NotedStore(self._store, f"{self._prefix}{prefix}/", self.notes)

    def _note(self, *texts: str | bytes) -> None:
        self.notes.calls[self.notes.rank] += 1
        self.notes.bytes[self.notes.rank] += sum(map(len, texts))

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
        assert not self.notes.is_checking or self._store.check(keys)
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
        self.pid = process.pid
        assert process.stdout is not None
        self.port = int(process.stdout.readline())

    def connect(self) -> NotedStore:
        return NotedStore(TCPStore("127.0.0.1", self.port, is_master=False, wait_for_workers=False))

    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
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
    """Commands, bytes of keys and values in both directions, and seconds of a processor."""

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
        self.notes = client.notes
        self._job_store = client.under(prefix({}, ranks))
        self._store = self._job_store.under(KEY.run)
        self._outboxes = [StoreOutbox(self._store, rank) for rank in range(ranks)]
        below = [layout.children(rank, 0, ranks, per_host) for rank in range(ranks)]
        self.below = {rank: children for rank, children in enumerate(below) if children}
        self.levels = [[0]]
        while deeper := [child for rank in self.levels[-1] for child in self.below.get(rank, ())]:
            self.levels.append(deeper)

    def under(self, rank: int) -> set[int]:
        """The rank and all ranks whose reports pass through it."""
        return {rank}.union(*map(self.under, self.below.get(rank, ())))

    def meet(self) -> None:
        """The calls of `Exchange._lead` and `_follow`, if no rank has to wait for another one."""
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
                with self.notes.turn(rank):
                    sums[rank] = self._sum(rank, window)
                    if rank != 0:
                        self._outboxes[rank].write(Message([sums.pop(rank)], None, False))
        assert sums[0].ranks == self.ranks
        assert sums[0].total("tokens").total == TOKENS * self.ranks
        return sums[0]

    def _sum(self, rank: int, window: int) -> RankReport:
        reports = [report_of_window(rank, window)]
        children = self.below.get(rank, [])
        for looked_at in (children[:-1], children[-1:]):  # as if the last one were a little late
            if looked_at:
                messages = read_slots(self._store, looked_at)
                reports += [each for message in messages.values() for each in message.reports]
        return merge(reports)

    def unread(self, windows: int) -> int:
        """Write windows that nobody reads before all are written; return the most commands of a rank for a window."""
        self.notes.is_checking = True
        most = 0
        for rank in range(1, self.ranks):
            for window in range(windows):
                self.notes.rank, before = rank, self.notes.calls[rank]
                self._outboxes[rank].write(Message([report_of_window(rank, window)], None, False))
                most = max(most, self.notes.calls[rank] - before)
        for children in self.below.values():
            messages = read_slots(self._store, children)
            assert [len(messages[child].reports) for child in children] == [windows] * len(children)
        return most


def report_of_window(rank: int, window: int) -> RankReport:
    steps = [MeasuredStep(window, seconds=0.2, tokens=TOKENS, model_flops=10**15 + rank, backward_seconds=1e-9 * rank)]
    return report_of(rank, steps, peak_flops_per_s=1e15)


def load_of(
    work: Callable[[], object], store: StoreProcess, client: NotedStore, times: int = 1
) -> tuple[Load, dict[int, Load]]:
    """The load on the store while `work` runs, and that of each rank, both divided by `times`."""
    notes, cpu_seconds = client.notes, store.cpu_seconds()
    for counter in (notes.calls, notes.bytes, notes.cpu_seconds):
        counter.clear()
    work()
    busy = store.cpu_seconds() - cpu_seconds
    whole = Load(notes.calls.total() / times, notes.bytes.total() / times, busy / times)
    ranks = {
        rank: Load(calls / times, notes.bytes[rank] / times, notes.cpu_seconds[rank] / times)
        for rank, calls in notes.calls.items()
    }
    return whole, ranks


def simulate(ranks: int, per_host: int = PER_HOST) -> dict[str, str]:
    """All rows of the table for one number of ranks, by name."""
    with store_process() as store:
        client = store.connect()
        job = Job(ranks, client, per_host)
        meeting, _ = load_of(job.meet, store, client)
        window, of_ranks = load_of(lambda: [job.window(number) for number in range(WINDOWS)], store, client, WINDOWS)
        most = job.unread(WINDOWS)
    pause = next(pauses(ranks // layout.FAN_OUT))
    depth = len(job.levels) - 1
    row_seconds = window.cpu_seconds + 2 * depth * pause
    busiest = max(of_ranks, key=lambda rank: of_ranks[rank].bytes)
    few, many = (job.under(host * per_host) for host in (ranks // per_host - 1, 1))
    return {
        "ranks": f"{ranks:,}",
        "commands to the store per window": f"{window.calls:,.0f}, {window.calls / ranks:.2f} per rank",
        "bytes per window, keys included": f"{window.bytes / 1e6:.2f} MB, {window.bytes / ranks:,.0f} per rank",
        "the store's process is busy per window": f"{window.cpu_seconds:.2f} s",
        "of that per command": f"{1e6 * window.cpu_seconds / window.calls:.0f} µs",
        "of this by rank 0": as_cell(of_ranks[0]),
        "of this by the busiest rank": f"rank {busiest:,}: {as_cell(of_ranks[busiest])}",
        "of this by a rank without ranks below it": as_cell(of_ranks[ranks - 1]),
        "a rank whose reports nobody reads": f"at most {most} commands per window, and waits for nothing",
        "written by a rank": "1 message",
        "read by a rank, at most": f"{max(map(len, job.below.values()))} messages",
        "levels of the tree": f"{depth}",
        "time to the row, computed": f"{row_seconds:.2f} s",
        "commands until all ranks have met": f"{meeting.calls:,.0f}, {meeting.calls / ranks:.0f} per rank",
        "the store's process is busy with these": f"{meeting.cpu_seconds:.2f} s",
        "a host lost that has no host below it": f"{len(few):,} ranks missing, rows come",
        "the host with the most ranks below it lost": f"{len(many):,} ranks missing, rows come",
    }


def as_cell(load: Load) -> str:
    """The load of one rank per window."""
    return f"{load.calls:.0f} commands, {load.bytes / 1e3:.1f} kB, {1e3 * load.cpu_seconds:.2f} ms of a processor"


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
        _, _, after = rest.partition(MARKERS[1])
        PAGE.write_text(f"{before}{MARKERS[0]}\n{text}\n{MARKERS[1]}{after}")


if __name__ == "__main__":
    main()
