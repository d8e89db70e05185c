"""Checks of `flopwatch doctor --gpu` that train: FLOPs against closed formulas, recomputation, cost, two ranks.

Not yet run on an accelerator; the tests drive them with a fake one.
"""

import json
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.multiprocessing.spawn import spawn
from torch.utils.checkpoint import checkpoint

from flopwatch.cli.doctor import checks
from flopwatch.cli.doctor.accelerator import Accelerator
from flopwatch.cli.doctor.findings import Checked, NotPossibleError, passed_if
from flopwatch.cli.doctor.gpu_times import matrix_type
from flopwatch.clock import monotonic_seconds
from flopwatch.models.load import load_model
from flopwatch.models.presets import PRESETS
from flopwatch.monitor.training_monitor import TrainingMonitor
from flopwatch.numbers import percent, step_time
from flopwatch.runs.reading import read_log

_ROWS, _SIDE = 256, 1024
_NEAR = 0.1
_TWO_RANKS_SECONDS = 120.0
_RANK_STEPS, _REDUCED_BYTES = 20, 64 << 20
Step = Callable[[], tuple[torch.Tensor, Any]]
"""Runs forward and backward pass of a step, and returns its loss and batch."""


def flops_of_a_layer(accelerator: Accelerator) -> Checked:
    """A monitored training of one linear layer: 2 x rows x inputs x outputs forward, as many for the weights."""
    model, steps = torch.nn.Linear(_SIDE, _SIDE, device=accelerator.device), 40
    values = _monitored(model, partial(_layer_step, model, accelerator.device), steps)
    return _compared(values.get("total/model_flops"), steps * 2 * 2 * _ROWS * _SIDE * _SIDE)


def _layer_step(model: torch.nn.Module, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    batch = torch.randn(_ROWS, _SIDE, device=device)
    loss = model(batch).sum()
    loss.backward()
    return loss, batch


def flops_of_a_transformer(accelerator: Accelerator) -> Checked:
    """A decoder under autocast: 12 x width² weights per layer, a head, and two products of all pairs in attention."""
    load, steps = accelerator.load, 12
    step, model = _transformer_step(accelerator)
    values = _monitored(model, step, steps)
    sizes, tokens, length = PRESETS[load.preset], load.batch_size * load.seq_len, load.seq_len
    weights = 12 * sizes.width**2 * sizes.layers + sizes.width * sizes.vocab_size
    forward = 2 * tokens * weights + 4 * tokens * length * sizes.width * sizes.layers
    return _compared(values.get("total/model_flops"), steps * 3 * forward)


def _transformer_step(accelerator: Accelerator) -> tuple[Step, torch.nn.Module]:
    device, load, dtype = accelerator.device, accelerator.load, matrix_type(accelerator)
    model = load_model(load.preset, device="cpu").to(device)

    def step() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        ids = torch.randint(PRESETS[load.preset].vocab_size, (load.batch_size, load.seq_len), device=device)
        with torch.autocast(device.type, dtype=dtype):
            loss = model(input_ids=ids, labels=ids)["loss"]
        loss.backward()
        return loss, {"input_ids": ids, "labels": ids}

    return step, model


class _Checkpointed(torch.nn.Module):
    """Blocks of two layers that run a second time in the backward pass. The last op of a block needs its result."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        layers = [
            torch.nn.Linear(width, 4 * width),
            torch.nn.ReLU(),
            torch.nn.Linear(4 * width, width),
            torch.nn.ReLU(),
        ]
        self.blocks = torch.nn.ModuleList(torch.nn.Sequential(*layers) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def recomputation(accelerator: Accelerator) -> Checked:
    """Activation checkpointing: the executed FLOPs are the model's and one more forward pass of every block."""
    width, blocks, steps = 256, 4, 12
    model = _Checkpointed(width, blocks).to(accelerator.device)

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        batch = torch.randn(_ROWS, width, device=accelerator.device, requires_grad=True)
        loss = model(batch).sum()
        loss.backward()
        return loss, batch

    values = _monitored(model, step, steps)
    recomputed = values["total/hardware_flops"] - values["total/model_flops"]
    return _compared(recomputed, steps * blocks * 2 * 2 * _ROWS * 4 * width * width)


def monitored_training(accelerator: Accelerator) -> Checked:
    return checks.monitored_training(str(accelerator.device))


def time_of_a_step(accelerator: Accelerator) -> Checked:
    """The monitor's step time, by events, against the host's clock until the same steps have ended on the device."""
    steps, per_row = 60, 20
    step, model = _transformer_step(accelerator)
    began, seconds = 0.0, 0.0
    with tempfile.TemporaryDirectory() as folder:
        # No step is counted, because the time of counting is not part of the step time.
        monitor = TrainingMonitor(folder, model=model, mode="estimate", strict=True, log_every=per_row, quiet=True)
        with monitor:
            for number in range(steps):
                if number == steps - per_row:
                    accelerator.synchronize()
                    began = monotonic_seconds()
                loss, batch = step()
                monitor.log_step(number, loss=loss, batch=batch)
            accelerator.synchronize()
            seconds = (monotonic_seconds() - began) / per_row
        by_events = read_log(monitor.log_path).rows[-1].values["perf/step_time"]
    said = f"{step_time(by_events)} by the monitor, {step_time(seconds)} by the host"
    is_near = abs(by_events / seconds - 1) <= _NEAR
    return passed_if(is_near, said, monitor_step_seconds=by_events, host_step_seconds=seconds)


def cost_of_monitoring(accelerator: Accelerator) -> Checked:
    """The monitor's own time in a step of a tiny model, and the step time with it against without, by turns."""
    own = checks.cost_of_monitoring(str(accelerator.device))
    bare, watched = _paired_step_seconds(accelerator)
    ratio = watched / bare
    figures = {**own.figures, "bare_step_seconds": bare, "monitored_step_seconds": watched, "ratio": ratio}
    said = f"{own.said}; a step of a larger model takes {step_time(watched)} with, {step_time(bare)} without"
    return passed_if(own.outcome == "passed", said, **figures)  # the ratio is a figure: it varies by some percent


def _paired_step_seconds(accelerator: Accelerator, steps: int = 80) -> tuple[float, float]:
    """Median step times without and with the monitor, which take turns. A median leaves out the steps it counts."""
    bare_step, _ = _transformer_step(accelerator)
    watched_step, model = _transformer_step(accelerator)
    bare, watched = list[float](), list[float]()
    with tempfile.TemporaryDirectory() as folder, TrainingMonitor(folder, model=model, quiet=True) as monitor:
        for number in range(steps):
            accelerator.synchronize()
            began = monotonic_seconds()
            bare_step()
            accelerator.synchronize()
            between = monotonic_seconds()
            loss, batch = watched_step()
            monitor.log_step(number, loss=loss, batch=batch)
            accelerator.synchronize()
            bare.append(between - began)
            watched.append(monotonic_seconds() - between)
    half = steps // 2  # the first steps are slow, and the monitor counts more of them
    return median(bare[half:]), median(watched[half:])


def two_ranks(accelerator: Accelerator) -> Checked:
    """Two ranks train on two devices: their sum is right, and the monitor adds up the FLOPs of both."""
    if accelerator.count < 2:
        raise NotPossibleError(f"it needs two devices, and this machine has {accelerator.count}")
    with tempfile.TemporaryDirectory() as folder:
        arguments = (accelerator.device.type, accelerator.backend, folder)
        started = spawn(_train_as_rank, arguments, nprocs=2, join=False)
        _wait_for(started)
        found: dict[str, Any] = json.loads(Path(folder, "found.json").read_text())
    checked = _compared(found.get("total/model_flops"), 2 * _RANK_STEPS * 2 * 2 * _ROWS * _SIDE * _SIDE)
    rate = found["reduced_bytes_per_s"] / 1e9
    said = f"{checked.said}; {accelerator.backend} reduces {rate:.1f} GB/s"
    is_right = checked.outcome == "passed" and found["sum"] == 3
    return passed_if(is_right, said, **checked.figures, sum_of_ranks=found["sum"], reduced_bytes_per_s=rate * 1e9)


def _wait_for(started: Any) -> None:
    deadline = monotonic_seconds() + _TWO_RANKS_SECONDS
    while not started.join(timeout=1.0):
        if monotonic_seconds() > deadline:
            for process in started.processes:
                process.kill()
            raise TimeoutError(f"two ranks did not end within {_TWO_RANKS_SECONDS:.0f} s, so a collective may hang")


def _train_as_rank(rank: int, kind: str, backend: str, folder: str) -> None:
    device = torch.device("cpu") if kind == "cpu" else torch.device(kind, rank)
    if kind != "cpu":
        torch.accelerator.set_device_index(rank)
    torch.distributed.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=2)
    try:
        wrapped = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(_SIDE, _SIDE, device=device))
        values = _monitored(wrapped, partial(_layer_step, wrapped, device), _RANK_STEPS, str(Path(folder, "run")))
        total = torch.full((1,), rank + 1.0, device=device)
        torch.distributed.all_reduce(total)
        rate = _reduced_bytes_per_s(device)
        if rank == 0:
            found = {**values, "sum": total.item(), "reduced_bytes_per_s": rate}
            Path(folder, "found.json").write_text(json.dumps(found), "utf-8")
        torch.distributed.barrier()
    finally:
        torch.distributed.destroy_process_group()


def _reduced_bytes_per_s(device: torch.device, times: int = 5) -> float:
    content = torch.ones(_REDUCED_BYTES, dtype=torch.uint8, device=device)
    torch.distributed.all_reduce(content)
    began = monotonic_seconds()
    for _ in range(times):
        torch.distributed.all_reduce(content)
    float(content[0])  # waits for the device
    return times * _REDUCED_BYTES / (monotonic_seconds() - began)


def _monitored(model: torch.nn.Module, step: Step, steps: int, folder: str | None = None) -> dict[str, Any]:
    """Train so many steps with the monitor, and return the values of its summary."""
    with tempfile.TemporaryDirectory() as own:
        monitor = TrainingMonitor(folder or own, model=model, strict=True, quiet=True)
        with monitor:
            for number in range(steps):
                loss, batch = step()
                monitor.log_step(number, loss=loss, batch=batch)
    return dict(monitor.summary.values) if monitor.summary else {}


def _compared(counted: float | None, expected: int) -> Checked:
    if counted is None:
        return Checked("failed", "the monitor knows no FLOPs of this training", {"expected_flops": expected})
    figures = {"counted_flops": counted, "expected_flops": expected}
    if counted == expected:
        return Checked("passed", f"{counted:,.0f} FLOPs, as by hand", figures)
    off = percent(counted / expected - 1)
    return Checked("failed", f"{counted:,.0f} FLOPs counted, {expected:,} by hand: {off} off", figures)
