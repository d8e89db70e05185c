"""Train in one or several layouts, with or without a monitor; run under torchrun.

    train.py <folder, or "bare"> <steps> <layout> [<layout> ...]

Each rank prints one line of JSON for each layout: a checksum of its parameters, and on rank 0 the rows of its log.
"""

import json
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import flopwatch
from testbeds.sharded import model as whole_model
from testbeds.sharded.model import LAYERS, ROWS, VOCABULARY, WIDTH, Part, batch_of, loss_of


@dataclass(frozen=True, slots=True)
class Layout:
    """How one rank takes part: its modules, its share of a batch, and its forward and backward pass."""

    model: nn.Module
    own: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor], Any]
    data_parallel_size: int | None = None
    is_told_all: bool = False
    """Whether the monitor is given the whole sequences, before they are cut."""


def by_rows(model: nn.Module, mesh: DeviceMesh | None = None) -> Layout:
    """Ranks have different rows; those of one place in `mesh` have the same."""
    place, places = (dist.get_rank(), dist.get_world_size()) if mesh is None else (mesh.get_local_rank(), mesh.size())
    return Layout(model, lambda batch: batch.chunk(places)[place], lambda own: loss_of(model(own), own).backward())


def ddp(blocks: str | None = None) -> Layout:
    return by_rows(DistributedDataParallel(compiled(Part(), blocks)))


def fsdp1() -> Layout:
    return by_rows(FullyShardedDataParallel(Part(), device_id=torch.device("cpu")))


def fsdp2(blocks: str | None = None) -> Layout:
    return by_rows(sharded(compiled(Part(), blocks), init_device_mesh("cpu", (dist.get_world_size(),))))


def hsdp() -> Layout:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicas", "shards"))
    return by_rows(sharded(Part(), mesh))


def tp() -> Layout:
    return by_rows(tensor_parallel(init_device_mesh("cpu", (dist.get_world_size(),))), NO_MESH)


def tp_fsdp2() -> Layout:
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("data", "tensor"))
    return by_rows(sharded(tensor_parallel(mesh["tensor"]), mesh["data"]), mesh["data"])


def cp() -> Layout:
    """By hand, because torch's own context parallelism has no attention for the CPU."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = DistributedDataParallel(Part())
    whole_model.gathered = lambda tensor: all_gather_tensor_autograd(tensor.contiguous(), 2, mesh)
    place, places = mesh.get_local_rank(), mesh.size()
    return Layout(
        model,
        lambda batch: batch.chunk(places, 1)[place],
        lambda own: loss_of(model(own), own).backward(),
        data_parallel_size=1,
        is_told_all=True,
    )


def pipeline(schedule: Any, stages_per_rank: int = 1) -> Layout:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    count = ranks * stages_per_rank
    parts = {stage: Part(stage * LAYERS // count, (stage + 1) * LAYERS // count) for stage in range(rank, count, ranks)}
    schedules: dict[int, Any] = {}

    def of_length(length: int) -> Any:  # buffers between stages have fixed sizes
        if length not in schedules:
            stages = [running(part, stage, count, length) for stage, part in parts.items()]
            schedules[length] = schedule(
                stages if stages_per_rank > 1 else stages[0], n_microbatches=2 * ranks, loss_fn=loss_of
            )
        return schedules[length]

    def backward(batch: Tensor) -> None:
        inputs = (batch,) if 0 in parts else ()
        of_length(batch.shape[1]).step(*inputs, **({"target": batch} if count - 1 in parts else {}))

    return Layout(nn.ModuleList(parts.values()), lambda batch: batch, backward, 1)


def running(part: Part, stage: int, count: int, length: int) -> PipelineStage:
    """A stage that knows its sizes, so that torch need not run it to find them."""
    rows = ROWS // (2 * dist.get_world_size())
    hidden = torch.empty(rows, length, WIDTH, device="meta", requires_grad=True)
    first = torch.empty(rows, length, dtype=torch.long, device="meta")
    last = torch.empty(rows, length, VOCABULARY, device="meta", requires_grad=True)
    return PipelineStage(
        part,
        stage,
        count,
        torch.device("cpu"),
        input_args=first if stage == 0 else hidden,
        output_args=last if stage == count - 1 else hidden,
    )


NO_MESH: Any = type("OnePlace", (), {"get_local_rank": lambda self: 0, "size": lambda self: 1})()
LAYOUTS: dict[str, Callable[[], Layout]] = {
    "ddp": ddp,
    "fsdp1": fsdp1,
    "fsdp2": fsdp2,
    "hsdp": hsdp,
    "tp": tp,
    "tp_fsdp2": tp_fsdp2,
    "cp": cp,
    "pp_gpipe": lambda: pipeline(ScheduleGPipe),
    "pp_1f1b": lambda: pipeline(Schedule1F1B),
    "pp_interleaved": lambda: pipeline(ScheduleInterleaved1F1B, 4 // dist.get_world_size()),
    "ddp_compiled": lambda: ddp("aot_eager"),
    "fsdp2_compiled": lambda: fsdp2("aot_eager"),
}


def compiled(model: Part, backend: str | None) -> Part:
    for block in model.blocks.values() if backend else ():
        block.compile(backend=backend)
    return model


def sharded(model: Any, mesh: DeviceMesh) -> nn.Module:
    for block in model.blocks.values():
        fully_shard(block, mesh=mesh)
    whole: nn.Module = fully_shard(model, mesh=mesh)
    return whole


def tensor_parallel(mesh: DeviceMesh) -> nn.Module:
    model = Part()
    plan: dict[str, Any] = {name: ColwiseParallel() for name in ("query", "key", "value", "up")}
    plan |= {name: RowwiseParallel() for name in ("output", "down")}
    for block in model.blocks.values():
        parallelize_module(block, mesh, plan)
    ends = {
        "tokens": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallel: nn.Module = parallelize_module(model, mesh, ends)
    return parallel


def train(layout: Layout, steps: int, monitor: Any) -> None:
    optimizer = torch.optim.SGD(layout.model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    for step in range(steps):
        own = layout.own(batch_of(step))
        with monitor.step(batch_of(step) if layout.is_told_all else own) if monitor is not None else nullcontext():
            layout.backward(own)
            optimizer.step()
            optimizer.zero_grad()


def checksum(model: nn.Module) -> str:
    local = (p.to_local() if isinstance(p, DTensor) else p for p in model.parameters())
    return sha256(b"".join(p.detach().contiguous().numpy().tobytes() for p in local)).hexdigest()


def run(folder: str, name: str, steps: int) -> dict[str, Any]:
    torch.manual_seed(0)
    whole_model.gathered = lambda tensor: tensor
    torch._dynamo.reset()
    layout = LAYOUTS[name]()
    monitor = None
    if folder != "bare":
        monitor = flopwatch.TrainingMonitor(
            Path(folder) / name,
            model=layout.model,
            data_parallel_size=layout.data_parallel_size,
            log_every=4,
            peak_flops_per_s=1e12,
            strict=True,
        )
    train(layout, steps, monitor)
    if monitor is not None:
        monitor.close()
    rows = []
    if monitor is not None and dist.get_rank() == 0:
        records = [json.loads(line) for line in (Path(folder) / name / "training_log.jsonl").read_text().splitlines()]
        rows = [
            {"steps": r["steps"]["step"], "exact": r["exact"], "notes": r.get("notes"), **r["all_ranks"]}
            for r in records
            if r["type"] == "row"
        ]
    dist.barrier()
    return {"rank": dist.get_rank(), "layout": name, "checksum": checksum(layout.model), "rows": rows}


def main(folder: str, steps: str, *names: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name in names:
        sys.stdout.write("RESULT " + json.dumps(run(folder, name, int(steps))) + "\n")
        sys.stdout.flush()
    dist.barrier()
    os._exit(0)  # torch 2.13 can hang in the teardown of gloo


if __name__ == "__main__":
    main(*sys.argv[1:])
