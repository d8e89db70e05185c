"""Run by test_wrapped.py: count a wrapped model on every rank, then train it one step."""

import os
import sys

import torch
from torch import distributed
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import flopwatch
from testbeds.architectures import BY_NAME


def main(wrapper: str) -> None:
    if wrapper == "fsdp2-fake-64":
        from torch.testing._internal.distributed.fake_pg import FakeStore

        distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=64)
    else:
        distributed.init_process_group("gloo")
    architecture = BY_NAME["llama"]
    model, batch = architecture.build(), architecture.batch(2, 16)
    if wrapper == "ddp":
        wrapped: torch.nn.Module = DistributedDataParallel(model)
    else:
        for layer in model.model.layers:  # type: ignore[union-attr]
            fully_shard(layer)
        wrapped = fully_shard(model)
    classes = [type(module) for module in wrapped.modules()]
    count = flopwatch.count_flops(wrapped, batch)
    assert count.method == "trace", count
    assert classes == [type(module) for module in wrapped.modules()]
    trained = "not trained"
    if wrapper != "fsdp2-fake-64":
        wrapped(**batch).loss.backward()
        assert all(parameter.grad is not None for parameter in wrapped.parameters())
        trained = "trained"
    # One write: two ranks share the pipe.
    sys.stdout.write(f"rank {distributed.get_rank()}: {count.model_flops} {trained}\n")
    sys.stdout.flush()
    if wrapper != "fsdp2-fake-64":
        distributed.barrier()
    # torch 2.13 can hang when a gloo group is torn down: its destructor waits, holding the GIL, for a thread that needs
    # the GIL to drop the context a backward pass has stored.
    os._exit(0)


main(sys.argv[1])
