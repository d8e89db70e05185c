"""Writes the folders beside this file with flopwatch as it was at commit a71ac01 (0.1.0); see README.md."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import flopwatch
from flopwatch.models.load import load_model  # as documented at that commit

# Each ends for one reason only, on any machine.
OK = """sleep 0.01; echo '{"samples_per_s": {batch_size}}' > "$FLOPWATCH_TRIAL_DIR/metrics.json" """
ERROR = "echo this trial fails >&2; exit 3"
OUT_OF_MEMORY = """python -c "x = bytearray(400 << 20); import time; time.sleep(30)" """
TIMEOUT = "sleep 60"
FIT = """python -c "x = bytearray({batch_size} * (20 << 20)); import time; time.sleep(0.5)" """

MATRIX = {
    "trainers": [
        {"label": "ok", "command": OK},
        {"label": "error", "command": ERROR},
        {"label": "out_of_memory", "command": OUT_OF_MEMORY},
        {"label": "timeout", "command": TIMEOUT},
        "standard",
    ],
    "models": ["tiny"],
    "batch_sizes": [1],
    "seq_lens": [16],
    "steps": 3,
    "warmup_steps": 1,
    "threads": 1,
    "device": "cpu",
    "trace": False,
    "limits": {"wall_seconds": 40, "no_progress_seconds": 40, "memory": "300MiB"},
}


def main() -> None:
    if os.environ.get("RANK") is not None:
        _train_rank()
        return
    for name in ("run", "other_run", "ranks", "sweep", "fit"):
        shutil.rmtree(name, ignore_errors=True)
    _train("run")
    _train("other_run")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=29533", __file__]
    subprocess.run(torchrun, check=True, timeout=200)
    Path("sweep.yaml").write_text(json.dumps(MATRIX, indent=1))
    flopwatch_command = [sys.executable, "-m", "flopwatch"]
    subprocess.run([*flopwatch_command, "sweep", "sweep.yaml", "-o", "sweep"], check=False, timeout=400)
    fit = ["fit", "--command", FIT, "--memory", "130MiB", "--max-batch", "8", "--seq-len", "8", "--no-preflight"]
    subprocess.run([*flopwatch_command, *fit, "-o", "fit"], check=True, timeout=400)
    from flopwatch.sweep.environment import machine

    Path("machine.json").write_text(json.dumps(machine(), indent=1) + "\n")


def _train(folder: str) -> None:
    """Ten steps with phases, a checkpoint after six of them, and a resume from it."""
    torch.manual_seed(0)
    model = load_model("tiny", device="cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    config = {"log_every": 2, "detailed_log_every": 4}
    options = {"sinks": ["tensorboard", "console"], "config": config, "peak_flops_per_s": 320e9, "total_steps": 10}

    def steps(monitor: flopwatch.TrainingMonitor, numbers: range) -> None:
        for number in numbers:
            ids = torch.randint(0, 1000, (2, 16 + number))
            mask = torch.ones_like(ids)
            mask[0, 12:] = 0
            batch = {"input_ids": ids, "attention_mask": mask, "labels": ids}
            with monitor.step(batch, epoch=number / 10) as step:
                loss = model(input_ids=ids, labels=ids)["loss"]
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                step.log(loss=loss, lr=1e-3, grad_norm=0.5, my_metric=number)
            if number % 3 == 2:
                with monitor.phase("eval"), torch.no_grad():
                    model(input_ids=ids)

    with flopwatch.TrainingMonitor(folder, model=model, **options) as monitor:
        steps(monitor, range(6))
        with monitor.phase("checkpoint"):
            state = monitor.state_dict()
    Path(folder, "state.json").write_text(json.dumps(state, indent=1))
    with flopwatch.TrainingMonitor(folder, model=model, **options) as monitor:
        monitor.load_state_dict(state)
        steps(monitor, range(6, 10))


def _train_rank() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
    with flopwatch.TrainingMonitor("ranks", model=model, config={"log_every": 4}, peak_flops_per_s=320e9) as monitor:
        for _ in range(8):
            batch = torch.randn(8 + dist.get_rank(), 64)
            with monitor.step(batch) as step:
                loss = model(batch).square().mean()
                loss.backward()
                step.log(loss=loss)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
