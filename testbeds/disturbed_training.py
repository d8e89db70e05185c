"""Starts trainings of two ranks, does to them what their case says, and prints what became of every rank as JSON.

    python -m testbeds.disturbed_training killed_1:bare killed_1:monitored stopped:bare --folder /tmp/x

Trainings run side by side: what is disturbed waits, it does not compute. Every rank is a process forked here before
there is any thread or connection, since importing torch anew for each would take longer than all the rest.
"""

import argparse
import ctypes
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from testbeds.slow_link import Link, slow_link

STEPS = 30
WINDOW_STEPS = 5
DISTURBED_STEP = 14
"""Right after it a window ends, so the monitor's threads have something to do when it happens."""
DISTURBED_SECONDS = 10.0
GONE = "the connection to another rank is lost"
LINK_DELAY_MS = 5.0
TO_THE_TRAINING = (
    *("stopped", "stopped_too_long", "cut"),
    *("killed_0", "killed_1", "raises_on_0", "raises_on_1"),
    *("destroyed_before_close", "destroyed_after_close", "never_closed", "forgotten_while_the_other_dies"),
)
TO_THE_MONITOR = tuple(
    f"{what}_on_{rank}"
    for what in (
        "made_only",
        "closed_early",
        "note_step_raises",
        "thread_raises",
        "thread_never_starts",
        "no_connection",
    )
    for rank in (0, 1)
)
"""In these the training itself is not disturbed."""
_LONG_TIMEOUT_SECONDS, _SHORT_TIMEOUT_SECONDS = 120.0, 4.0
"""Of the training's process group: it bears the disturbance, or it gives up."""
_CLONE_NEWNET = 0x40000000


@dataclass
class Training:
    """Two ranks, and when what happened to them.

    Attributes:
        started_at: On the clock of all times here.
        pids: Of the ranks.
        exit_codes: By rank, minus the signal for killed ones; None for a rank that had to be ended.
        result_at: By rank, when it had said its result.
        exit_at: By rank, when it was gone.
        disturbed_at: When the disturbance began that we have to end.
    """

    case: str
    mode: str
    folder: Path
    link: Link | None = None
    started_at: float = 0.0
    pids: list[int] = field(default_factory=list)
    exit_codes: dict[int, int | None] = field(default_factory=dict)
    result_at: dict[int, float] = field(default_factory=dict)
    exit_at: dict[int, float] = field(default_factory=dict)
    disturbed_at: float | None = None
    is_mended: bool = False

    def output(self, rank: int, name: str) -> Path:
        return self.folder / f"rank{rank}.{name}"

    @property
    def is_over(self) -> bool:
        return len(self.exit_codes) == len(self.pids) == 2


class _ThisIsARankError(Exception):
    """Raised in the forked process, to leave everything that belongs to the one that looks after the ranks."""

    def __init__(self, training: Training, rank: int, port: int) -> None:
        super().__init__(rank)
        self.training, self.rank, self.port = training, rank, port


def disturbed(cases: list[str], folder: Path, *, at_once: int, seconds: float = 300.0) -> list[dict[str, Any]]:
    """Run this file on `case:mode` and so on; one record per training, in their order."""
    command = [
        sys.executable,
        "-m",
        "testbeds.disturbed_training",
        *cases,
        "--folder",
        str(folder),
        "--at-once",
        str(at_once),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    records: list[dict[str, Any]] = json.loads(done.stdout)
    return records


def outcome(rank: dict[str, Any]) -> tuple[Any, ...]:
    """All that a training leaves; None for what a killed rank could not say."""
    said = rank["result"] or {}
    error = said.get("error")
    raised = None if error is None else tuple(error.values())
    return rank["exit_code"], said.get("steps_done"), raised, said.get("parameters")


def run_all(trainings: list[Training], at_once: int, limit_seconds: float) -> list[dict[str, Any]]:
    waiting, running = list(trainings), list[Training]()
    while waiting or running:
        while waiting and len(running) < at_once:
            running.append(waiting.pop(0))
            start(running[-1])
        for training in running:
            look_after(training)
            if time.monotonic() - training.started_at > limit_seconds:
                end_hanging(training)
        running = [training for training in running if not training.is_over]
        time.sleep(0.02)
    return [record(training) for training in trainings]


def start(training: Training) -> None:
    training.folder.mkdir(parents=True)
    training.started_at = time.monotonic()
    port = free_port()
    for rank in range(2):
        training.output(rank, "out").touch()
        pid = os.fork()
        if pid == 0:
            raise _ThisIsARankError(training, rank, port)
        training.pids.append(pid)


def be_a_rank(training: Training, rank: int, port: int) -> None:
    for stream, name in ((1, "out"), (2, "err")):
        file = os.open(training.output(rank, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, stream)
    place = {"MASTER_ADDR": "127.0.0.1"}
    if training.link is not None:
        enter(training.link.namespaces["ab"[rank]])
        place = training.link.environment
    os.environ.update(place, MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
    timeout = _SHORT_TIMEOUT_SECONDS if training.case.endswith("too_long") else _LONG_TIMEOUT_SECONDS
    from testbeds import disturbed_rank

    disturbed_rank.main(training.case, training.mode, str(training.folder / "run"), timeout)


def enter(namespace: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    file = os.open(namespace, os.O_RDONLY)
    if libc.setns(file, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"{namespace} could not be entered")
    os.close(file)


def look_after(training: Training) -> None:
    """Note which ranks have said their result and which are gone; end a disturbance whose time is over."""
    now = time.monotonic()
    for rank, pid in enumerate(training.pids):
        if b"RESULT " in training.output(rank, "out").read_bytes():
            training.result_at.setdefault(rank, now)
        if rank not in training.exit_codes:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                training.exit_codes[rank] = os.waitstatus_to_exitcode(status)
                training.exit_at[rank] = now
    if training.disturbed_at is None:
        if b"AT " in training.output(1, "out").read_bytes() and begin(training):
            training.disturbed_at = now
    elif not training.is_mended and now - training.disturbed_at >= DISTURBED_SECONDS:
        training.is_mended = True
        mend(training)


def begin(training: Training) -> bool:
    """Whether something has begun that we have to end."""
    if training.case.startswith("cut") and training.link is not None:
        training.link.cut()
        return True
    return training.case.startswith("stopped") and psutil.Process(training.pids[1]).status() == psutil.STATUS_STOPPED


def mend(training: Training) -> None:
    if training.link is not None:
        training.link.mend()
    else:
        os.kill(training.pids[1], signal.SIGCONT)


def end_hanging(training: Training) -> None:
    """Those that have not ended by themselves have no exit code."""
    for rank, pid in enumerate(training.pids):
        if rank not in training.exit_codes:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            training.exit_codes[rank] = None


def record(training: Training) -> dict[str, Any]:
    return {
        "case": training.case,
        "mode": training.mode,
        "ranks": [rank_record(training, rank) for rank in range(len(training.pids))],
        "rows": rows(training.folder / "run" / "training_log.jsonl"),
    }


def rows(log: Path) -> list[tuple[int, int | None]]:
    """Of the monitor's log: up to which step, and how many ranks are in it."""
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    return [(line["step"], line["values"].get("ranks/reporting")) for line in lines if line["type"] == "row"]


def rank_record(training: Training, rank: int) -> dict[str, Any]:
    """What it printed (None when it was killed), its exit code (None when it hung), and how long it took to end."""
    _, _, result = training.output(rank, "out").read_text().partition("RESULT ")
    knows_both = rank in training.exit_at and rank in training.result_at
    return {
        "result": json.loads(result) if result else None,
        "exit_code": training.exit_codes[rank],
        "errors": training.output(rank, "err").read_text(),
        "exit_seconds": training.exit_at[rank] - training.result_at[rank] if knows_both else None,
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", metavar="case:mode")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--limit-seconds", type=float, default=90)
    options = parser.parse_args()
    import_everything()
    links = ExitStack()  # not `with`: a forked rank leaves this function too
    trainings = []
    for number, (case, _, mode) in enumerate(text.partition(":") for text in options.cases):
        link = links.enter_context(slow_link(LINK_DELAY_MS)) if case.startswith("cut") else None
        trainings.append(Training(case, mode, options.folder / f"{number}-{case}-{mode}", link))
    try:
        records = run_all(trainings, options.at_once, options.limit_seconds)
    except _ThisIsARankError as rank:
        be_a_rank(rank.training, rank.rank, rank.port)
        return
    links.close()
    sys.stdout.write(json.dumps(records))


def import_everything() -> None:
    import torch._dynamo  # the first optimizer imports it

    import flopwatch.monitor.training_monitor
    from testbeds import disturbed_rank

    del disturbed_rank, torch, flopwatch
    gc.freeze()  # else every rank would copy, and at its end look through, all that was imported
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"{len(threads)} threads: a process with threads must not be forked"


if __name__ == "__main__":
    main()
