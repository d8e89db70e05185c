"""What does watching a training of two ranks cost? DDP with the monitor, in turns with the bare loop.

    python benchmarks/ranks/rank_overhead.py                 # steps of about 200 ms, on one machine
    python benchmarks/ranks/rank_overhead.py --link          # between two network namespaces: 20 ms each way, 1 % loss
    python benchmarks/ranks/rank_overhead.py --quick         # a short look

Both ranks run every step number once bare and once watched, in short turns whose order changes, with one monitor that
lives through the whole run and is paused in the bare turns: step numbers do not jump, and windows end every 50 watched
steps. What that leaves out of the ratio: its threads are there in bare turns too, so what they do for a window that
has just ended may fall on either side. The CPU time counts it wherever it falls, except that of gloo's own threads,
which carry one message of 512 bytes per window.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from flopwatch.models.presets import Preset
from overhead.contenders.watched import Watched
from overhead.intervals import Interval, bootstrap, ratio_of_blocks, ratio_of_medians
from overhead.training_loop import LARGE, LOG_EVERY, SMALL, Contender, Schedule, Size, Training, calibrated, interleave

ROOT = Path(__file__).parents[2]
_SETTLED_STEP = LOG_EVERY + 10
"""From here on CPU time counts: the first row is written, and sinks have loaded what they load for it."""
STEP_SECONDS, QUICK_STEP_SECONDS = 0.2, 0.02
SCHEDULE = Schedule(repeats=60, steps=15)
QUICK = Schedule(repeats=6, steps=20)
LINK_SCHEDULE = Schedule(repeats=60, steps=20)
LINK = {"delay_ms": 20.0, "loss": 0.01}
"""The delay is one way, so a round trip takes 40 ms: twice what "20 ms delay" may mean."""
LINK_SIZE = Size(Preset(64, 16, 1, 2), seq_len=64)
"""Gradients of 20 kB: TCP carries no more than about 400 kB/s over such a line."""


class WatchedRank(Watched):
    """Says where a step begins too."""

    def _get_ready(self) -> None:
        """Nothing to wait for: rows are made when both ranks have told their windows."""

    def _step(self, number: int) -> None:
        if number == _SETTLED_STEP:
            self._at_start = self._spent()
        cpu_before, before = time.thread_time(), time.perf_counter()
        noted = self.monitor.step(self._given["batch"], step=number)
        noted.__enter__()
        cpu, seconds = time.thread_time() - cpu_before, time.perf_counter() - before
        loss, grad_norm = self._training.step()
        cpu_before, before = time.thread_time(), time.perf_counter()
        noted.log(loss=loss, grad_norm=grad_norm)
        noted.__exit__(None, None, None)
        self.call_seconds.append(seconds + time.perf_counter() - before)
        self._call_cpu_seconds += cpu + time.thread_time() - cpu_before


def work(plan: dict[str, Any]) -> None:
    """One rank."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    size = plan["size"]
    training = Training(Size(Preset(**size["sizes"]), size["seq_len"], size["batch_size"]))
    training.model = torch.nn.parallel.DistributedDataParallel(training.model)
    watched: list[WatchedRank] = []

    def make() -> Contender:
        watched.append(WatchedRank(training, Path(plan["folder"]), call="batch"))
        return watched[0].contender()

    timings = interleave(training, {"flopwatch": make}, Schedule(**plan["schedule"]))
    assert not timings.failures, timings.failures
    summary = watched[0].monitor.summary
    result = {
        "pairs": timings.pairs["flopwatch"],
        **watched[0].figures(),
        "notices": [] if summary is None else list(summary.notices),
    }
    (Path(plan["folder"]) / f"rank{dist.get_rank()}.json").write_text(json.dumps(result))
    dist.barrier()
    os._exit(0)  # torch 2.13 can hang in the teardown of gloo


def measure(size: Size, schedule: Schedule, link_settings: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The results of both ranks."""
    with tempfile.TemporaryDirectory(prefix="flopwatch-ranks-") as folder, ExitStack() as stack:
        plan = json.dumps({"size": asdict(size), "schedule": asdict(schedule), "folder": folder})
        command = [sys.executable, __file__, "--worker", plan]
        commands = [command, command]
        place = {"MASTER_ADDR": "127.0.0.1"}
        if link_settings is not None:
            from testbeds.slow_link import slow_link

            link = stack.enter_context(slow_link(**link_settings))
            commands, place = [link.command_in(host, command) for host in "ab"], link.environment
        common = {**os.environ, **place, "MASTER_PORT": str(_free_port()), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
        ranks = [subprocess.Popen(command, env={**common, "RANK": str(rank)}) for rank, command in enumerate(commands)]
        try:
            if any(process.wait() for process in ranks):  # the first that fails ends the other
                raise SystemExit("a rank has failed: see above")
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        return [json.loads((Path(folder) / f"rank{rank}.json").read_text()) for rank in range(2)]


def report(results: list[dict[str, Any]]) -> str:
    lines = [
        "| rank | step | steps each | windows | ratio of medians | ratio of blocks | own CPU per step | of the step |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for rank, result in enumerate(results):
        pairs = [(without, watched) for without, watched in result["pairs"]]
        step = statistics.median(seconds for without, _ in pairs for seconds in without)
        steps = sum(len(watched) for _, watched in pairs)
        own = result["own_cpu_seconds_per_step"]
        lines.append(
            f"| {rank} | {1e3 * step:.1f} ms | {steps} | {steps // LOG_EVERY} "
            f"| {_shown(bootstrap(ratio_of_medians, pairs))} | {_shown(bootstrap(ratio_of_blocks, pairs))} "
            f"| {1e6 * own:.0f} µs, of it {1e6 * result['thread_seconds_per_step']:.0f} µs in threads "
            f"| {100 * own / step:.3f} % |"
        )
    counts = ", ".join(f"{1e3 * result['count_seconds']:.0f} ms on rank {rank}" for rank, result in enumerate(results))
    return "\n".join(
        [*lines, "", f"Counting FLOPs, once and apart: {counts}. Notices: {results[0]['notices'] or 'none'}."]
    )


def _shown(interval: Interval) -> str:
    return f"{interval.value:.4f} ({interval.low:.4f} to {interval.high:.4f})"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--link", action="store_true", help="over a slow and lossy line")
    parser.add_argument("--quick", action="store_true", help="few repeats, short steps")
    parser.add_argument("--repeats", type=int, help="of the turns")
    parser.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        work(options.worker)
    torch.set_num_threads(1)
    schedule = QUICK if options.quick else LINK_SCHEDULE if options.link else SCHEDULE
    if options.repeats is not None:
        schedule = Schedule(options.repeats, schedule.steps, schedule.turn)
    size = LINK_SIZE
    if not options.link:
        size = calibrated(SMALL, QUICK_STEP_SECONDS) if options.quick else calibrated(LARGE, STEP_SECONDS)
    began = time.perf_counter()
    results = measure(size, schedule, LINK if options.link else None)
    sys.stdout.write(f"{report(results)}\n{time.perf_counter() - began:.0f} s\n")


if __name__ == "__main__":
    main()
