"""300 steps of DDP on gloo, with or without the monitor; rank 0 prints a hash of all parameters and buffers.

Run by tests/monitor/test_harmless.py under torchrun.
"""

import os
import sys

import torch
import torch.distributed as dist

sys.path.insert(0, os.path.join(os.path.dirname(__file__), ".."))
from test_harmless import hash_of, hooks_of, train


def main(mode: str, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model, graphs = train("ddp", None if mode == "bare" else mode, folder, seed=dist.get_rank())
    if dist.get_rank() == 0:
        sys.stdout.write(f"RESULT {hash_of(model)} {graphs} {hooks_of(model)}\n")
        sys.stdout.flush()
    dist.barrier()
    # Tearing a gloo group down after a backward pass can deadlock in torch 2.13 (docs/design.md).
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
