"""Trainers that fail in what flopwatch does after the steps: `late_failures:Late`, told by an environment variable."""

import json
import os
import signal
import time
from pathlib import Path

import torch

from flopwatch.sweep.trainers.builtin import StandardTrainer

TRIAL_DIR = Path(os.environ.get("FLOPWATCH_TRIAL_DIR", "."))


def raise_out_of_memory():
    raise MemoryError("in a phase of flopwatch's own")


def raise_an_error():
    raise ValueError("in a phase of flopwatch's own")


def eat():
    held = []
    while True:
        held.append(torch.ones(64 << 20, dtype=torch.uint8))


WAYS = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "raise": raise_an_error,
    "memory": raise_out_of_memory,
    "eat": eat,
    "exit": lambda: os._exit(3),
    "hang": lambda: time.sleep(1000),
}


class Late(StandardTrainer):
    """Fails in forward once the phase in `LATE_FAILURE` is reached, in the way named there."""

    def forward(self, batch):
        where, way = os.environ["LATE_FAILURE"].split()
        phase = json.loads((TRIAL_DIR / "heartbeat.json").read_text())["phase"]
        if phase == where or (where == "all" and phase in ("memory", "flops", "trace")):
            WAYS[way]()
        return super().forward(batch)
