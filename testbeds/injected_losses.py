"""A real training on the CPU that loses known amounts of time and FLOPs, and measures them with its own clock.

    injected_losses.py <folder> <case> [<steps>]

Prints one line of JSON behind the word RESULT: the seconds of each use by the script's own clock, the FLOPs per step by
a closed formula, and the peak that was given. Cases: plain, input, eval, checkpoint, recompute, padding, optimizer,
restart (in two processes).
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import flopwatch

WIDTH, LAYERS, SEQUENCES, LENGTH = 384, 4, 8, 64
TOKENS = SEQUENCES * LENGTH
LAYER_FLOPS = 2 * TOKENS * WIDTH * WIDTH
STEPS, SLEEP_SECONDS = 150, 0.02
LAST_BEFORE_RESTART, CHECKPOINT_AFTER = 100, 60


class Timeline:
    """Seconds by use, measured with the script's own clock."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def time(self, use: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[use] = self.seconds.get(use, 0.0) + time.perf_counter() - began


def without_counting(times: dict[int, float], log: Path) -> float:
    """The sum of the optimizer's times; of steps that were counted, in which it is slow, the usual time."""
    records = [json.loads(line) for line in log.read_text().splitlines()]
    rows = [record["steps"] for record in records if record["type"] == "row"]
    is_slow = {step: slow for row in rows for step, slow in zip(row["step"], row.get("warm_up", ()), strict=False)}
    usual = median(seconds for step, seconds in times.items() if not is_slow.get(step))
    return sum(usual if is_slow.get(step) else seconds for step, seconds in times.items())


class Layers(nn.Module):
    """Pairs of linear layers on embedded tokens: every FLOP is 2 x tokens x width x width.

    If they are checkpointed, the first layer of each pair runs twice. The second does not: torch stops as soon as it
    has the input of the second layer, which is all that its backward pass needs.
    """

    def __init__(self, is_checkpointed: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, WIDTH)
        pairs = [(nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)) for _ in range(LAYERS // 2)]
        self.layers = nn.ModuleList([nn.Sequential(first, nn.ReLU(), second) for first, second in pairs])
        self.is_checkpointed = is_checkpointed

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(input_ids)
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=False) if self.is_checkpointed else layer(hidden)
        loss: torch.Tensor = hidden.square().mean()
        return loss


class SlowAdam(torch.optim.AdamW):
    """An optimizer that does its work three times and throws two of the results away."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        kept = [parameter.clone() for parameter in parameters]
        for _ in range(2):
            super().step()
            for parameter, before in zip(parameters, kept, strict=True):
                parameter.copy_(before)
        return super().step()


def batch_of(case: str) -> dict[str, torch.Tensor]:
    mask = torch.ones(SEQUENCES, LENGTH, dtype=torch.long)
    if case == "padding":
        mask[:, LENGTH // 2 :] = 0
    return {"input_ids": torch.randint(0, 100, (SEQUENCES, LENGTH)), "attention_mask": mask}


def calibrated_peak() -> float:
    """About twice the rate at which this machine trains the model now, so that points are large."""
    model = Layers(is_checkpointed=False)
    batch = batch_of("plain")
    for _ in range(3):
        model(**batch).backward()
    began = time.perf_counter()
    for _ in range(5):
        model(**batch).backward()
    return 2 * 5 * 3 * LAYERS * LAYER_FLOPS / (time.perf_counter() - began)


def process_start_unix_time() -> float:
    """When the kernel started this process."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    boot = next(
        int(line.split()[1]) for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime")
    )
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    boot_exact = time.time() - uptime
    return ticks / os.sysconf("SC_CLK_TCK") + (boot_exact if abs(boot_exact - boot) < 2 else boot)


def train(folder: Path, case: str, first: int, last: int, peak: float) -> dict[str, Any]:
    timeline = Timeline()
    torch.manual_seed(0)
    model: nn.Module = Layers(is_checkpointed=case == "recompute")
    optimizer = (SlowAdam if case == "optimizer" else torch.optim.AdamW)(model.parameters(), foreach=False)
    monitor = flopwatch.TrainingMonitor(folder, model=model, log_every=10, peak_flops_per_s=peak, sinks=[])
    if first:
        monitor.load_state_dict(torch.load(folder / "state.pt"))
    first_step_unix_time = 0.0
    step_times: dict[int, float] = {}
    optimizer_times: dict[int, float] = {}
    kept: dict[str, float] = {}
    for number in range(first, last):
        with timeline.time("input"), monitor.input_wait():
            if case == "input":
                time.sleep(SLEEP_SECONDS)
            batch = batch_of(case)
        first_step_unix_time = first_step_unix_time or time.time()
        began = time.perf_counter()
        with timeline.time("forward_backward"):
            loss = model(**batch)
            loss.backward()
        optimizer_began = time.perf_counter()
        optimizer.step()
        optimizer_times[number] = time.perf_counter() - optimizer_began
        optimizer.zero_grad()
        monitor.log_step(number, loss=loss, batch=batch)
        step_times[number] = time.perf_counter() - began
        if case == "eval" and number % 25 == 24:
            with timeline.time("eval"), monitor.phase("eval"), torch.no_grad():
                for _ in range(40):
                    model(**batch)
        if case == "checkpoint" and number % 25 == 24:
            with timeline.time("checkpoint"), monitor.phase("checkpoint"):
                time.sleep(10 * SLEEP_SECONDS)
        if case == "restart" and number == CHECKPOINT_AFTER:
            torch.save(monitor.state_dict(), folder / "state.pt")
            kept = dict(timeline.seconds)
    end_unix_time = time.time()
    if case == "restart" and not first:
        monitor.log_now(wait=True)
    else:
        monitor.close()
    log = folder / "training_log.jsonl"
    until_checkpoint = {step: seconds for step, seconds in optimizer_times.items() if step <= CHECKPOINT_AFTER}
    return {
        "seconds": timeline.seconds | {"optimizer": without_counting(optimizer_times, log)},
        "kept": kept | {"optimizer": without_counting(until_checkpoint or optimizer_times, log)},
        "wall": time.time() - process_start_unix_time(),
        "process_start": process_start_unix_time(),
        "start_up": first_step_unix_time - process_start_unix_time(),
        "end": end_unix_time,
        "again": sum(seconds for number, seconds in step_times.items() if number > CHECKPOINT_AFTER),
    }


def main(folder: str, case: str, part: str = "") -> None:
    torch.set_num_threads(1)
    peak_file = Path(folder) / "peak.json"
    Path(folder).mkdir(parents=True, exist_ok=True)
    if not peak_file.exists():
        peak_file.write_text(json.dumps(calibrated_peak()))
    peak = json.loads(peak_file.read_text())
    first, last = (0, LAST_BEFORE_RESTART) if part == "first" else (CHECKPOINT_AFTER + 1 if part else 0, STEPS)
    result = train(Path(folder) / "run", case, first, last, peak)
    sys.stdout.write("RESULT " + json.dumps({"peak": peak, **result}) + "\n")
    sys.stdout.flush()
    os._exit(0)  # as a killed training


if __name__ == "__main__":
    main(*sys.argv[1:])
