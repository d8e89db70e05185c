"""300 steps of DDP on gloo for each mode given, `bare` without the monitor; rank 0 prints a hash of all parameters.

Run by tests/monitor/test_harmless.py on two ranks.
"""

import os
import sys

import torch
import torch.distributed as dist

sys.path.insert(0, os.path.join(os.path.dirname(__file__), ".."))
from test_harmless import hash_of, hooks_of, train


def main(folder: str, *modes: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for mode in modes:
        model, graphs = train("ddp", None if mode == "bare" else mode, f"{folder}/{mode}", seed=dist.get_rank())
        if dist.get_rank() == 0:
            sys.stdout.write(f"RESULT {mode} {hash_of(model)} {graphs} {hooks_of(model)}\n")
            sys.stdout.flush()
    dist.barrier()
    # Tearing a gloo group down after a backward pass can deadlock in torch 2.13 (docs/ranks.md).
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
