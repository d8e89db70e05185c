"""Instructions of one `log_step` call, counted by valgrind: the one figure that a busy machine cannot disturb.

    python benchmarks/overhead/instructions.py

prints a JSON object. `with_optimizer` contains an optimizer's step without gradients, which takes nearly no time
itself, but calls the monitor's hooks. With another checkout's `src` in PYTHONPATH, its instructions are counted.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

from torch.utils.benchmark import Timer

CALLS = 900
"""Nine of ten calls of a window are ordinary; the tenth is left out by a window that never ends."""
STATEMENTS = {
    "attention_mask": "monitor.log_step(1, 0, loss, grad_norm, 1e-4, mask)",
    "batch": "monitor.log_step(1, 0, loss, grad_norm, 1e-4, batch=batch)",
    "with_optimizer": "optimizer.step(); monitor.log_step(1, 0, loss, grad_norm, 1e-4, batch=batch)",
}
SETUP = """
from overhead.instructions import ready
monitor, loss, grad_norm, mask, batch, optimizer = ready()
"""


def instructions_per_call() -> dict[str, float]:
    """Of an ordinary step; the loop around the call adds some tens."""
    # torch starts whatever `python` comes first.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    counts = {}
    for name, statement in STATEMENTS.items():
        timer = Timer(statement, setup=SETUP)
        stats = timer.collect_callgrind(CALLS, repeats=None, collect_baseline=False, retain_out_file=False)
        counts[name] = stats.counts() / CALLS
    return counts


def ready() -> tuple[object, ...]:
    """A monitor in mid-run. It estimates, because counting takes minutes under valgrind and is over by then anyway."""
    import torch

    from flopwatch import TrainingMonitor
    from overhead.training_loop import SMALL, Training

    torch.set_num_threads(1)
    training = Training(SMALL)
    monitor = TrainingMonitor(tempfile.mkdtemp(), model=training.model, mode="estimate", log_every=10**9)
    loss, grad_norm = training.step()
    batch = {**training.batch, "attention_mask": training.attention_mask}
    for _ in range(3):
        monitor.log_step(0, 0, loss, grad_norm, 1e-4, training.attention_mask)
        monitor.log_step(0, 0, loss, grad_norm, 1e-4, batch=batch)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    return monitor, loss, grad_norm, training.attention_mask, batch, optimizer


if __name__ == "__main__":
    print(json.dumps(instructions_per_call()))
