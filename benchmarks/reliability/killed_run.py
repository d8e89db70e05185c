"""A small monitored training that continues from its own checkpoint; killed by `benchmarks/reliability/kills.py`."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from flopwatch import TrainingMonitor

TOKENS_PER_STEP = 4 * 32
CHECKPOINT_EVERY = 20


def main(folder: Path, last_step: int) -> None:
    """Train up to `last_step`; a checkpoint is a file that is renamed into place."""
    torch.set_num_threads(1)
    checkpoint = folder / "checkpoint.json"
    saved: dict[str, Any] = {"next_step": 0, "monitor": None}
    if checkpoint.exists():
        saved = json.loads(checkpoint.read_text())
    layer = torch.nn.Linear(64, 64)
    batch = {"input_ids": torch.zeros(4, 32, dtype=torch.long), "attention_mask": torch.ones(4, 32, dtype=torch.long)}
    config = {"local_log_seconds": 0.05}
    monitor = TrainingMonitor(folder, config=config, log_every=5, flops_fn=lambda batch: 1000, total_steps=last_step)
    if saved["monitor"] is not None and saved["next_step"] % 40 == 0:  # else from the log: both ways are tried
        monitor.load_state_dict(saved["monitor"])
    for step in range(saved["next_step"], last_step):
        with monitor.step(batch, step=step) as current:
            layer(torch.randn(64, 64)).sum().backward()
            current.log(loss=float(step))
        if (step + 1) % CHECKPOINT_EVERY == 0:
            state = {"next_step": step + 1, "monitor": monitor.state_dict()}
            (folder / "checkpoint.tmp").write_text(json.dumps(state))
            os.replace(folder / "checkpoint.tmp", checkpoint)
    monitor.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
