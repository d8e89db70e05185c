"""One rank of a small DDP training that continues from its own checkpoint; started and killed by `elastic.py`.

Next to the monitor it keeps a diary of its own: the unix time at which every step and every checkpoint began and ended,
written to the operating system at once.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from flopwatch import TrainingMonitor

BATCH, POSITIONS, WORDS = 4, 16, 64
CHECKPOINT_EVERY = 25
_STEP_SECONDS = 0.07


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 32)
        self.scores = nn.Linear(32, WORDS)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.scores(self.words(input_ids)).flatten(0, 1), input_ids.flatten())


class Diary:
    def __init__(self, folder: Path, rank: int) -> None:
        attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
        self._file = (folder / f"diary_{attempt}_{rank}.jsonl").open("ab", buffering=0)
        self.write("process", pid=os.getpid())

    def write(self, kind: str, **facts: Any) -> None:
        self._file.write(json.dumps({"kind": kind, "unix_time": time.time(), **facts}).encode() + b"\n")


def save(path: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    torch.save({"next_step": step + 1, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    path.with_suffix(".json").write_text(json.dumps(state))


def main(folder: Path, last_step: int) -> None:
    rank = int(os.environ["RANK"])
    diary = Diary(folder, rank)
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = TrainingMonitor(folder / "run", model=model, log_every=10, total_steps=last_step, peak_flops_per_s=1e12)
    current = folder / "current"
    first = 0
    if current.exists():
        checkpoint = folder / current.read_text()
        saved = torch.load(checkpoint)
        first = saved["next_step"]
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        monitor.load_state_dict(json.loads(checkpoint.with_suffix(".json").read_text()))
    for step in range(first, last_step):
        batch = {"input_ids": torch.randint(WORDS, (BATCH, POSITIONS))}
        began = time.time()
        with monitor.step(batch, step=step) as current_step:
            time.sleep(_STEP_SECONDS)
            loss = model(**batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            current_step.log(loss=loss)
            diary.write("step", began=began, step=step)
        if (step + 1) % CHECKPOINT_EVERY == 0:
            began = time.time()
            with monitor.phase("checkpoint"):
                state = monitor.state_dict()  # on every rank
                if rank == 0:
                    name = f"step_{step}.pt"
                    save(folder / name, step, model, optimizer, state)
                    (folder / "current.tmp").write_text(name)
                    os.replace(folder / "current.tmp", current)
                dist.barrier()
            diary.write("checkpoint", began=began, step=step)
    diary.write("closing")
    monitor.close()
    dist.barrier()
    # Tearing a gloo group down after a backward pass can deadlock in torch 2.13 (docs/ranks.md).
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
