"""Kill or freeze the process that has the job's store while real ranks train: does any of them wait, or hang?

    python benchmarks/ranks/store_dies.py                    # 2 and 32 ranks; writes nothing
    python benchmarks/ranks/store_dies.py --write            # also puts the table into docs/ranks.md

Every training is also run without the monitor. Ranks are forked here before there is any thread, because importing
torch anew for each of them would take longer than all the rest.
"""

import argparse
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

import flopwatch
import flopwatch.monitor.training_monitor
from flopwatch.monitor.ranks import exchange

RANKS = (2, 32)
SIGNALS = {"killed": signal.SIGKILL, "frozen": signal.SIGSTOP}
STEPS, WINDOW_STEPS, PLAN_STEP, DISTURBED_STEP = 60, 5, 20, 31
LIMIT_SECONDS = 180.0
PAGE = Path(__file__).parents[2] / "docs" / "ranks.md"
MARKERS = "<!-- store_dies -->", "<!-- /store_dies -->"

STORE = """
import sys
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


@contextmanager
def store_process() -> Iterator[tuple[int, int]]:
    """The identity and the port of a process that has a `TCPStore`."""
    command = [sys.executable, "-c", STORE]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.pid, int(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


@dataclass(frozen=True)
class Training:
    """What became of the ranks of one training.

    Attributes:
        exit_codes: By rank; None for a rank that had to be ended.
        results: What each rank has said, by rank; None for one that has said nothing.
        rows: Of the log, the last step of each row and how many ranks are in it.
    """

    exit_codes: list[int | None]
    results: list[dict[str, Any] | None]
    rows: list[tuple[int, int | None]]

    def longest(self, name: str) -> float:
        return float(max(result[name] for result in self.results if result is not None))

    def typical_step(self, *, after: bool) -> float:
        """Median of the steps before or after the disturbance, of the rank on which it is largest."""
        steps = slice(DISTURBED_STEP, None) if after else slice(WINDOW_STEPS, DISTURBED_STEP)
        return float(max(median(result["steps"][steps]) for result in self.results if result is not None))


def train(ranks: int, what: str, folder: Path, *, is_monitored: bool) -> Training:
    """A training whose store is killed or frozen by rank 0 at the disturbed step."""
    folder.mkdir(parents=True)
    with store_process() as (store_pid, port):
        pids = []
        for rank in range(ranks):
            if (pid := os.fork()) == 0:
                be_a_rank(rank, ranks, port, store_pid, SIGNALS[what], folder, is_monitored=is_monitored)
            pids.append(pid)
        exit_codes = [exit_code_of(pid, time.monotonic() + LIMIT_SECONDS) for pid in pids]
    files = [folder / f"{rank}.json" for rank in range(ranks)]
    log = folder / "run" / "training_log.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    return Training(
        exit_codes,
        [json.loads(file.read_text()) if file.exists() else None for file in files],
        [(line["step"], line["values"].get("ranks/reporting")) for line in lines if line["type"] == "row"],
    )


def be_a_rank(
    rank: int, ranks: int, port: int, store_pid: int, number: signal.Signals, folder: Path, *, is_monitored: bool
) -> None:
    output = os.open(folder / f"{rank}.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    try:
        torch.set_num_threads(1)
        store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
        layers = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Tanh(), torch.nn.Linear(32, 32))
        model = torch.nn.parallel.DistributedDataParallel(layers)
        settings = {"flopwatch": {"log_every": WINDOW_STEPS, "detailed_log_every": WINDOW_STEPS}}
        monitor = flopwatch.TrainingMonitor(folder / "run", config=settings, model=model) if is_monitored else None
        steps = []
        for step in range(STEPS):
            if step == PLAN_STEP and rank > 0 and monitor is not None:  # on a busy machine the ranks may meet late
                assert monitor._run is not None
                assert monitor._run.ranks.link is not None
                assert monitor._run.ranks.link.wait_for_plan(60.0)
            if step == DISTURBED_STEP and rank == 0:
                os.kill(store_pid, number)
            began = time.perf_counter()
            batch = torch.randn(4, 32)
            with monitor.step(batch) if monitor is not None else nullcontext():
                model(batch).square().mean().backward()
            steps.append(time.perf_counter() - began)
            time.sleep(0.02)
        began = time.perf_counter()
        if monitor is not None:
            monitor.close()
        closed = time.perf_counter()
        exchange._leave_all()  # as at the exit of the process
        result: dict[str, Any] = {"steps": steps, "longest": max(steps[DISTURBED_STEP:]), "close": closed - began}
        summary = getattr(monitor, "summary", None)
        result |= {"exit": time.perf_counter() - closed, "told": [] if summary is None else list(summary.notices)}
        (folder / f"{rank}.json").write_text(json.dumps(result))
        dist.barrier()
        os._exit(0)  # torch 2.13 can hang in the teardown of gloo
    finally:
        traceback.print_exc()
        os._exit(1)


def exit_code_of(pid: int, deadline: float) -> int | None:
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def table_row(ranks: int, what: str, monitored: Training, bare: Training) -> str:
    def milliseconds(*trainings: float) -> str:
        return ", ".join(f"{1e3 * seconds:.0f} ms" for seconds in trainings)

    cells = [
        f"{ranks}",
        what,
        f"{sum(code != 0 for code in monitored.exit_codes)}, {sum(code != 0 for code in bare.exit_codes)}",
        milliseconds(monitored.typical_step(after=False), bare.typical_step(after=False)),
        milliseconds(monitored.typical_step(after=True), bare.typical_step(after=True)),
        milliseconds(monitored.longest("longest"), bare.longest("longest")),
        f"{monitored.longest('close'):.1f} s",
        f"{monitored.longest('exit'):.1f} s",
        f"{monitored.rows[0][1]}, then {monitored.rows[-1][1]}",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--what", nargs="+", choices=SIGNALS, default=list(SIGNALS))
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--json", action="store_true", help="print everything that each rank has said, for a test")
    options = parser.parse_args()
    gc.freeze()  # else every rank would copy, and at its end look through, all that was imported
    lines = [
        "| ranks | the store's process is | ranks that failed or hung | step before, median | step after, median "
        "| longest step after | longest `close()` | longest exit after it | ranks in the log |",
        "| --- |" + " --- |" * 8,
    ]
    with tempfile.TemporaryDirectory(prefix="flopwatch-store-") as folder:
        for ranks in options.ranks:
            for what in options.what:
                place = Path(folder) / f"{ranks}-{what}"
                both = [train(ranks, what, place / str(each), is_monitored=each) for each in (True, False)]
                if options.json:
                    print(json.dumps([vars(each) for each in both]))
                lines.append(table_row(ranks, what, *both))
    text = "\n".join(lines)
    print(text, file=sys.stderr if options.json else sys.stdout)
    if options.write:
        before, _, rest = PAGE.read_text().partition(MARKERS[0])
        PAGE.write_text(f"{before}{MARKERS[0]}\n{text}\n{MARKERS[1]}{rest.partition(MARKERS[1])[2]}")


if __name__ == "__main__":
    main()
