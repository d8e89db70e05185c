"""A small training on several ranks. The monitor on every rank reports one MFU and one total for the whole job.

torchrun --nproc-per-node=2 examples/train_ranks.py

With `--slow-rank 1` that rank waits longest for its input, and each row of the log names it; look at it from a second
terminal with: flopwatch watch runs/ranks
"""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import flopwatch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--folder", type=Path, default=Path("runs/ranks"))
    parser.add_argument("--slow-rank", type=int, help="This rank waits longer for its batches than the others.")
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = DistributedDataParallel(flopwatch.load_model("tiny", device="cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with flopwatch.TrainingMonitor(arguments.folder, model=model, log_every=20, total_steps=arguments.steps) as monitor:
        for _ in range(arguments.steps):
            ids = torch.randint(0, 1000, (4 + rank, 64))
            if rank == arguments.slow_rank:
                time.sleep(0.03)  # a slow disk
            with monitor.step({"input_ids": ids, "labels": ids}) as step:
                loss = model(input_ids=ids, labels=ids)["loss"]
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                step.log(loss=loss, lr=3e-3)
    if monitor.summary is not None:  # on the logging rank
        values = monitor.summary.values
        print(f"All ranks together: {values['total/tokens']:,} tokens and {values['total/model_flops']:,} FLOPs.")
        rank, share = values["ranks/longest_input_wait_rank"], values["ranks/longest_input_wait_percent"]
        print(f"Rank {rank} waits longest for its input: {share:.1f} % of a step.", flush=True)
    dist.barrier()
    os._exit(0)  # torch 2.13 can hang in the teardown of gloo after a backward pass


if __name__ == "__main__":
    main()
