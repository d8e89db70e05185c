"""Tears down trainings of several ranks at random moments, and checks that they end as without the monitor.

    python benchmarks/ranks/teardowns.py                                    # every kind 200 times
    python benchmarks/ranks/teardowns.py --count 20 --kinds fake fork       # with any environment's python

The kinds: a fake process group (`fake`); the store's process killed or frozen (`store`); a rank killed (`kill`); a rank
that ends while the others continue (`exit`); a fork, by `os.fork` or for a DataLoader (`fork`). The moment is between
the start of the monitor and shortly after its close. The same trainings without the monitor are the control, because
gloo itself can hang or abort. Ranks are forked from this process, which has imported everything but has started no
thread and no process group.
"""

import argparse
import faulthandler
import gc
import json
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

KINDS = ("fake", "store", "kill", "exit", "fork")
WAYS = {
    "fake": ("closed", "raises", "exits", "forgotten"),
    "store": ("killed", "frozen"),
    "kill": ("killed",),
    "exit": ("closed", "raises", "exits", "forgotten"),
    "fork": ("worker", "child_exits", "child_runs_atexit", "child_returns"),
}
WORDS = ("STARTED", "STEP", "ACTS", "CHILD", "CLOSING", "CLOSED", "DONE")
"""The lines that a rank prints when it reaches each stage."""
EXIT_CODES = {"raises": 1, "exits": 3}
TRAINING_SECONDS = 1.0
"""About how long a training with the monitor takes on an idle machine, from the monitor's start to after its close."""
LARGEST_SHARE = 1.1
"""Moments are drawn up to this share of the training, so about a tenth of them is after its end."""
HANG_SECONDS = 180.0
"""A training that has not ended by then counts as a hang, even on a busy machine.

The script's gloo group times out after 60 s, and the monitor may take 10 s to close and 25 s more at the exit of the
process. `slowest_seconds` shows trainings that end late.
"""
Outcome = int | str
"""Exit code of a rank, negative for a signal; or `hangs` and the place of the hang."""


@dataclass
class Teardown:
    """One training that is torn down. It is drawn from its kind and number, so both modes have the same trainings."""

    kind: str
    number: int
    mode: str
    folder: Path
    world_size: int = 2
    pids: dict[int, int] = field(default_factory=dict)
    store_pid: int | None = None
    started_at: float = 0.0
    acts_at: float | None = None
    acted_during: str | None = None
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    seconds: float = 0.0

    def __post_init__(self) -> None:
        dice = random.Random(f"{self.kind}/{self.number}")
        self.way = dice.choice(WAYS[self.kind])
        self.moment_share = dice.uniform(0.0, LARGEST_SHARE)
        # A fork of a process with a gloo group cannot exit normally, because gloo then waits for threads that only the
        # parent process has.
        self.has_fake_group = self.kind == "fake" or self.way == "child_returns"
        self.acting_rank = 0 if self.has_fake_group else dice.randrange(self.world_size)
        self.has_ddp = not self.has_fake_group and dice.random() < 0.5
        self.is_forgotten = dice.random() < 0.5
        self.child_seconds = dice.uniform(0.0, 0.2)

    @property
    def ranks(self) -> int:
        return 1 if self.has_fake_group else self.world_size

    @property
    def is_over(self) -> bool:
        return len(self.outcomes) == self.ranks

    def output(self, rank: int, name: str) -> Path:
        return self.folder / f"rank{rank}.{name}"

    def allowed(self, rank: int) -> set[Outcome]:
        """The exit codes that the script itself can have on this rank."""
        # A rank whose neighbour has ended raises an error in its next all-reduce, unless its last one is already done.
        codes: set[Outcome] = {0, 1} if self.has_ddp and self.kind in ("kill", "exit") else {0}
        if rank != self.acting_rank:
            return codes
        if self.kind == "kill":
            return codes | {-signal.SIGKILL}
        return {EXIT_CODES.get(self.way, 0)} if "ACTS" in self.said(rank) else codes

    @property
    def faults(self) -> list[str]:
        """What must not happen, by flopwatch or torch: signals, hangs, other exit codes, forked children that fail."""
        found = []
        for rank, outcome in sorted(self.outcomes.items()):
            if outcome not in self.allowed(rank):
                found.append(named(outcome))
            elif outcome == 1 and "/flopwatch/" in self.raised_in(rank):
                found.append("raised by flopwatch")
            children = [line for line in self.said(rank) if line.startswith("CHILD") and line != "CHILD 0"]
            found += [f"forked {line.partition(' ')[2]}" for line in children]
        return found

    def raised_in(self, rank: int) -> str:
        """The last frame of the traceback with which the rank has ended."""
        lines = self.output(rank, "err").read_text(errors="replace").splitlines()
        return next((line for line in reversed(lines) if '  File "' in line), "")

    def said(self, rank: int) -> list[str]:
        path = self.output(rank, "out")
        lines = path.read_text().splitlines() if path.exists() else []
        return [line for line in lines if line.partition(" ")[0] in WORDS]  # gloo writes to the output too

    @property
    def notices(self) -> list[str]:
        logs = self.folder.glob("run*/training_log.jsonl")
        records = [json.loads(line) for log in logs for line in log.read_text().splitlines() if line.endswith("}")]
        return [record["code"] for record in records if record["type"] == "notice"]


def named(outcome: Outcome) -> str:
    if isinstance(outcome, str):
        return outcome
    return signal.Signals(-outcome).name if outcome < 0 else f"exit code {outcome}"


class _ThisIsARankError(Exception):
    """Raised in a forked rank, to leave the stack frames of the process that supervises the ranks."""

    def __init__(self, teardown: Teardown, rank: int) -> None:
        super().__init__(rank)
        self.teardown, self.rank = teardown, rank


def run_all(teardowns: list[Teardown], at_once: int) -> None:
    waiting, running, done = list(teardowns), list[Teardown](), 0
    while waiting or running:
        while waiting and len(running) < at_once:
            running.append(waiting.pop(0))
            start(running[-1])
        for teardown in running:
            look_after(teardown)
        for teardown in [teardown for teardown in running if teardown.is_over]:
            running.remove(teardown)
            tidy(teardown)
            done += 1
            if teardown.faults:
                tell(teardown)
            if done % 50 == 0:
                sys.stderr.write(f"{done} of {len(teardowns)}\n")
        time.sleep(0.005)


def start(teardown: Teardown) -> None:
    teardown.folder.mkdir(parents=True)
    teardown.started_at = time.monotonic()
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(teardown.world_size)}
    if teardown.kind == "store":
        place["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # as under torchrun, the store is in a process of its own
        teardown.store_pid = fork_store(int(place["MASTER_PORT"]))
    for rank in range(teardown.ranks):
        pid = os.fork()
        if pid == 0:
            os.setsid()  # so that forks of the rank can be killed with it
            os.environ.update(place, RANK=str(rank))
            raise _ThisIsARankError(teardown, rank)
        teardown.pids[rank] = pid


def fork_store(port: int) -> int:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    campaign = os.getpid()
    readable, writable = os.pipe()
    pid = os.fork()
    if pid == 0:
        _server = TCPStore("127.0.0.1", port, None, True, wait_for_workers=False)
        os.write(writable, b"x")
        while os.getppid() == campaign:  # so that the store ends with the campaign
            time.sleep(0.5)
        os._exit(0)
    os.close(writable)
    os.read(readable, 1)
    os.close(readable)
    return pid


def look_after(teardown: Teardown) -> None:
    now = time.monotonic()
    for rank, pid in teardown.pids.items():
        if rank not in teardown.outcomes:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                teardown.outcomes[rank] = os.waitstatus_to_exitcode(status)
                teardown.seconds = now - teardown.started_at
    if teardown.kind in ("store", "kill") and teardown.acted_during is None:
        if teardown.acts_at is None:
            if "STARTED" in teardown.said(teardown.acting_rank):
                teardown.acts_at = now + teardown.moment_share * TRAINING_SECONDS
        elif now >= teardown.acts_at:
            act(teardown)
    if now - teardown.started_at > HANG_SECONDS:
        end_hanging(teardown)


def act(teardown: Teardown) -> None:
    teardown.acted_during = (teardown.said(teardown.acting_rank) or [""])[-1].split()[0]
    if teardown.acting_rank in teardown.outcomes and teardown.kind == "kill":
        teardown.acted_during = "after its end"
    elif teardown.kind == "kill":
        os.kill(teardown.pids[teardown.acting_rank], signal.SIGKILL)
    elif teardown.store_pid is not None:
        os.kill(teardown.store_pid, signal.SIGKILL if teardown.way == "killed" else signal.SIGSTOP)


def end_hanging(teardown: Teardown) -> None:
    """Kill ranks that hang; before that, each writes the Python stacks of all its threads to its error file."""
    hanging = {rank: pid for rank, pid in teardown.pids.items() if rank not in teardown.outcomes}
    for pid in hanging.values():  # all before the first is killed, because that ends the waits of the others
        os.killpg(pid, signal.SIGUSR2)
    time.sleep(0.3)
    for rank, pid in hanging.items():
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        teardown.outcomes[rank] = f"hangs {place_of_hang(teardown.output(rank, 'err').read_text(errors='replace'))}"
        teardown.seconds = HANG_SECONDS


def place_of_hang(stacks: str) -> str:
    """Where the main thread is, from the output of `faulthandler`, to distinguish hangs of the monitor and of torch.

    >>> place_of_hang('Thread 0x1: File "/flopwatch/monitor/exchange.py" Thread 0x2: File "/torch/c10d.py" File "a.py"')
    'in torch'
    >>> place_of_hang('Thread 0x2: File "/threading.py" File "/flopwatch/monitor/exchange.py" File "a.py"')
    'in flopwatch'
    """
    frames = stacks.rpartition("hread 0x")[2]  # the main thread, the oldest one, comes last
    if "File " not in frames:
        return "outside Python"  # for example, in the destructors that run after the end of the interpreter
    return "in flopwatch" if "/flopwatch/monitor/" in frames else "in torch" if "/torch/" in frames else "in Python"


def tidy(teardown: Teardown) -> None:
    for pid in teardown.pids.values():
        with suppress(ProcessLookupError):  # the rank has left no process behind
            os.killpg(pid, signal.SIGKILL)
    if teardown.store_pid is not None:
        os.kill(teardown.store_pid, signal.SIGKILL)
        os.waitpid(teardown.store_pid, 0)


def tell(teardown: Teardown) -> None:
    what = f"{teardown.kind} {teardown.number} {teardown.mode} {teardown.way} ddp={teardown.has_ddp}"
    sys.stderr.write(f"{what}: {', '.join(teardown.faults)}; in {teardown.folder}\n")


def be_a_rank(teardown: Teardown, rank: int) -> None:
    for stream, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(teardown.output(rank, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2)
    from testbeds import teardown_rank

    teardown_rank.main(teardown, rank)


def free_port() -> int:
    while True:
        port = random.randrange(10_000, 30_000)  # below the ports that the system gives to other processes
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


def summary(kind: str, teardowns: list[Teardown]) -> dict[str, object]:
    def faults(mode: str) -> Counter[str]:
        return Counter(fault for one in teardowns if one.mode == mode for fault in one.faults)

    def slowest(mode: str) -> float:
        return round(max((one.seconds for one in teardowns if one.mode == mode), default=0.0), 1)

    monitored = [one for one in teardowns if one.mode == "monitored"]
    moments = Counter(one.acted_during or acted_during(one) for one in monitored)
    return {
        "kind": kind,
        "teardowns": len(monitored),
        "as_without": sum(not one.faults for one in monitored),
        "faults": dict(faults("monitored")),
        "only_with_monitor": sorted(set(faults("monitored")) - set(faults("bare"))),
        "control": len(teardowns) - len(monitored),
        "control_faults": dict(faults("bare")),
        "slowest_seconds": slowest("monitored"),
        "control_slowest_seconds": slowest("bare"),
        "moments": dict(moments.most_common()),
        "notices": dict(Counter(code for one in monitored for code in set(one.notices)).most_common()),
    }


def acted_during(teardown: Teardown) -> str:
    """The stage that the acting rank had reached when it acted by itself."""
    said = teardown.said(teardown.acting_rank)
    before = said[: said.index("ACTS")] if "ACTS" in said else said
    return (before or ["before its start"])[-1].split()[0]


def table(summaries: list[dict[str, object]]) -> str:
    lines = [
        "| kind | teardowns | as without | signals, hangs, exit codes | slowest | without the monitor | notices |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in summaries:
        control = f"{row['control']}: {listed(row['control_faults'])}, slowest {row['control_slowest_seconds']} s"
        slowest = f"{row['slowest_seconds']} s"
        cells = (row["kind"], row["teardowns"], row["as_without"], listed(row["faults"]), slowest, control)
        lines.append(f"| {' | '.join(map(str, cells))} | {listed(row['notices'])} |")
    return "\n".join(lines)


def listed(counts: object) -> str:
    assert isinstance(counts, dict)
    return ", ".join(f"{count} x {what}" for what, count in counts.items()) or "none"


def import_everything() -> None:
    import torch._dynamo  # the first optimizer imports it
    import torch.distributed.fsdp
    import torch.distributed.tensor
    import torch.testing._internal.distributed.fake_pg

    import flopwatch.monitor.training_monitor
    from testbeds import teardown_rank

    del torch, flopwatch, teardown_rank
    gc.freeze()  # otherwise garbage collection in each rank would go through, and so copy, everything imported
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"{threads} threads: a process with threads must not be forked"


def run(
    kinds: list[str], count: int, control: int, folder: Path, *, at_once: int, ranks: int = 2, first: int = 0
) -> list[dict[str, object]]:
    os.environ["OMP_NUM_THREADS"] = "1"
    import_everything()
    found = []
    for kind in kinds:
        teardowns = [Teardown(kind, n, "monitored", folder / kind / f"{n}", ranks) for n in range(first, first + count)]
        teardowns += [
            Teardown(kind, n, "bare", folder / kind / f"{n}-bare", ranks) for n in range(first, first + control)
        ]
        run_all(teardowns, at_once)
        found.append(summary(kind, teardowns))
        sys.stderr.write(json.dumps(found[-1]) + "\n")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="number of the first training, to continue a campaign")
    parser.add_argument("--control", type=int, default=50, help="trainings of each kind without the monitor")
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="keep the output of the ranks in this folder")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="flopwatch-teardowns-"))
    counts = {"at_once": options.at_once, "ranks": options.ranks, "first": options.first}
    try:
        summaries = run(list(options.kinds), options.count, options.control, folder, **counts)
    except _ThisIsARankError as rank:
        this = rank
    else:
        import torch

        print(f"torch {torch.__version__}, Python {sys.version.split()[0]}\n\n{table(summaries)}")
        print(json.dumps({"torch": torch.__version__, "python": sys.version.split()[0], "kinds": summaries}))
        if not options.folder and not any(row["faults"] for row in summaries):
            shutil.rmtree(folder)
        sys.exit(any(row["only_with_monitor"] for row in summaries))
    be_a_rank(this.teardown, this.rank)


if __name__ == "__main__":
    main()
