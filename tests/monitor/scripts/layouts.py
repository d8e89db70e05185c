"""Train the same transformer on the same global batches in one parallel layout, watched by the monitor on every rank.

Run by tests/monitor/test_layouts.py, as one process or under torchrun with four:

    layouts.py <folder, or "bare" for no monitor> <layout> <steps> <accumulation> [<accumulation> ...]

Rank 0 prints one line of JSON for each accumulation: what the monitor has added up, and how far losses and parameters
are from a plain training of the whole batches in one process.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage as RunningStage
from torch.distributed.pipelining import ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F  # noqa: N812
from torch.nn.parallel import DistributedDataParallel

import flopwatch
from flopwatch.monitor import run as monitor_run
from support.parallel_transformer import (
    VOCABULARY,
    WIDTH,
    PipelineStage,
    Transformer,
    allowed_pairs,
    build,
    global_batch,
    micro_batches,
    summed_loss,
)

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Layout:
    """How one rank takes part in the training."""

    trained: nn.Module
    backward: Callable[[Batch, float, bool], float]
    """Forward and backward of one micro batch with its weight, whether it is the step's last; gives the loss."""
    monitored: nn.Module
    data_parallel_size: int = 1
    group: int = 0
    """Which part of the global batch this rank works on."""
    averaged_over: int = 1
    """Ranks whose gradients are averaged, where their sum is wanted."""
    losses_repeat: int = 1
    """Ranks that report the same loss."""
    synchronise: Callable[[], None] = lambda: None


def single() -> Layout:
    model = build()
    return Layout(model, lambda batch, weight, _: _backward(model, batch, weight), model)


def ddp() -> Layout:
    model = DistributedDataParallel(build())

    def backward(batch: Batch, weight: float, is_last: bool) -> float:
        with nullcontext() if is_last else model.no_sync():
            return _backward(model, batch, weight)

    ranks = dist.get_world_size()
    return Layout(model, backward, model, ranks, dist.get_rank(), averaged_over=ranks)


def fsdp2() -> Layout:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = _sharded(build(), mesh)
    ranks = mesh.size()
    return Layout(model, _backward_of_sharded(model), model, ranks, mesh.get_local_rank(), averaged_over=ranks)


def tp_dp() -> Layout:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    layer = {name: ColwiseParallel() for name in ("attention.query", "attention.key", "attention.value", "up")}
    layer |= {name: RowwiseParallel() for name in ("attention.output", "down")}
    model = build()
    for one in model.layers.values():
        parallelize_module(one, mesh["tensor"], layer)
    ends = {
        "tokens": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    model = _sharded(parallelize_module(model, mesh["tensor"], ends), mesh["data"])
    group = mesh["data"].get_local_rank()
    return Layout(model, _backward_of_sharded(model), model, 2, group, averaged_over=2, losses_repeat=2)


def pp_dp() -> Layout:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipeline"))
    index, pipeline = mesh["pipeline"].get_local_rank(), mesh["pipeline"].get_group()
    stage = PipelineStage(build(), is_first=index == 0)

    def backward(batch: Batch, weight: float, _: bool) -> float:
        # torch fixes the buffers between stages at the first batch's shapes, and ours change: so a schedule for each,
        # of one sample after the other, because its chunks must be of one size.
        length = batch["input_ids"].shape[1]
        sizes = [torch.empty(1, length, width, device="meta", requires_grad=True) for width in (WIDTH, VOCABULARY)]
        takes = torch.empty(1, length, dtype=torch.long, device="meta") if index == 0 else sizes[0]
        # With the sizes, torch does not run the stage once more to find them.
        running = RunningStage(
            stage, index, 2, torch.device("cpu"), input_args=takes, output_args=sizes[index], group=pipeline
        )
        schedule = ScheduleGPipe(
            running,
            n_microbatches=len(batch["input_ids"]),
            loss_fn=lambda logits, labels: weight * summed_loss(logits, labels),
            scale_grads=False,
        )
        losses: list[torch.Tensor] = []
        if index == 0:
            schedule.step(batch["input_ids"], attention_mask=batch["attention_mask"])
        else:
            schedule.step(target=batch["labels"], losses=losses, attention_mask=batch["attention_mask"])
        return sum(loss.item() for loss in losses) / weight

    def synchronise() -> None:
        for parameter in stage.parameters():
            dist.all_reduce(parameter.grad, group=mesh["data"].get_group())

    with torch.device("meta"):
        whole = Transformer()
    return Layout(stage, backward, whole, 2, mesh["data"].get_local_rank(), synchronise=synchronise)


def cp_dp() -> Layout:
    """By hand: torch's `context_parallel` has ring attention for CUDA's kernels only.

    In torch 2.13 `aten._scaled_dot_product_flash_attention_for_cpu` has no sharding strategy, and the ring's own table
    (`_sdpa_handler` in torch/distributed/tensor/experimental/_context_parallel/_attention.py) has no entry for it.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context"))
    model = DistributedDataParallel(build())  # data and context ranks alike hold a part of each gradient

    def backward(batch: Batch, weight: float, is_last: bool) -> float:
        whole = _of_even_length(batch)
        half = whole["input_ids"].shape[1] // 2
        first = mesh["context"].get_local_rank() * half
        own = {name: tensor[:, first : first + half] for name, tensor in whole.items()}
        own["position_ids"] = torch.arange(first, first + half)
        with (
            nullcontext() if is_last else model.no_sync(),
            _gathered_attention(mesh["context"], whole["attention_mask"], first),
        ):
            return _backward(model, own, weight)

    return Layout(model, backward, model, 2, mesh["data"].get_local_rank(), averaged_over=dist.get_world_size())


LAYOUTS = {layout.__name__: layout for layout in (single, ddp, fsdp2, tp_dp, pp_dp, cp_dp)}


def _sharded(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for layer in model.layers.values():  # type: ignore[union-attr, operator]
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _backward_of_sharded(model: Any) -> Callable[[Batch, float, bool], float]:
    def backward(batch: Batch, weight: float, is_last: bool) -> float:
        model.set_requires_gradient_sync(is_last)
        return _backward(model, batch, weight)

    return backward


def _backward(model: nn.Module, batch: Batch, weight: float) -> float:
    loss = model(**batch)["loss"]
    (weight * loss).backward()
    return float(loss.item())


def _of_even_length(batch: Batch) -> Batch:
    """One position of padding more where the sequence could not be halved."""
    if batch["input_ids"].shape[1] % 2 == 0:
        return batch
    fills = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    return {name: F.pad(tensor, (0, 1), value=fills[name]) for name, tensor in batch.items()}


@contextmanager
def _gathered_attention(mesh: DeviceMesh, whole_mask: torch.Tensor, first: int) -> Iterator[None]:
    """Attention of a rank's queries over the keys and values of all; put in its place as torch's own does."""
    plain = F.scaled_dot_product_attention

    def attention(query: Any, key: Any, value: Any, attn_mask: Any) -> torch.Tensor:
        key, value = (all_gather_tensor_autograd(tensor.contiguous(), 2, mesh) for tensor in (key, value))
        return plain(query, key, value, attn_mask=allowed_pairs(whole_mask, first, query.shape[2]))

    F.scaled_dot_product_attention = attention  # type: ignore[assignment]
    try:
        yield
    finally:
        F.scaled_dot_product_attention = plain


def train(
    layout: Layout, steps: int, accumulation: int, total: Callable[[float], float], monitor: Any = None
) -> list[float]:
    """The loss per token of each step; `total` adds up what the ranks have of it."""
    # foreach would mix parameters that are sharded in different ways.
    optimizer = torch.optim.SGD(layout.trained.parameters(), lr=0.3, momentum=0.9, foreach=False)
    losses = []
    for step in range(steps):
        batch = global_batch(step)
        tokens = int(batch["attention_mask"].sum())
        micros = micro_batches(batch, step, layout.group, layout.data_parallel_size, accumulation)
        with monitor.step() if monitor is not None else nullcontext() as watched:
            loss = 0.0
            for number, micro in enumerate(micros, 1):
                if watched is not None:
                    watched.micro_batch(micro)
                loss += layout.backward(micro, layout.averaged_over / tokens, number == accumulation)
            layout.synchronise()
            optimizer.step()
            optimizer.zero_grad()
            if watched is not None:
                watched.log(loss=loss)
        losses.append(total(loss) / layout.losses_repeat / tokens)
    return losses


def _summed_over_ranks(value: float) -> float:
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total)


def whole_parameters(layout: Layout) -> list[dict[str, torch.Tensor]]:
    """What each rank believes the parameters to be, shards put together."""
    own = {
        name.removeprefix("module."): (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in layout.trained.named_parameters()
    }
    if not dist.is_initialized():
        return [own]
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, own)
    return everyones


def held_parameters(model: nn.Module) -> int:
    local = (value.to_local() if isinstance(value, DTensor) else value for value in model.parameters())
    return sum(value.numel() for value in local)


def compared(layout: Layout, losses: list[float]) -> dict[str, Any]:
    """How far this training is from the whole batches in one process."""
    everyones = whole_parameters(layout)
    if dist.is_initialized() and dist.get_rank() != 0:
        return {}
    plain = single()
    start = {name: value.detach().clone() for name, value in plain.trained.named_parameters()}
    plain_losses = train(plain, len(losses), accumulation=1, total=float)
    end = dict(plain.trained.named_parameters())
    return {
        "losses": losses,
        "loss_error": max(abs(one - other) for one, other in zip(losses, plain_losses, strict=True)),
        "parameter_error": max(_distance(end[name], value) for each in everyones for name, value in each.items()),
        "parameter_change": min(_distance(end[name], start[name]) for name in start),
        "parameters_seen": sorted({name for each in everyones for name in each}) == sorted(end),
        "held_parameters": held_parameters(layout.trained),
        "whole_parameters": held_parameters(plain.trained),
    }


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).detach().abs().max())


def watched_training(folder: str, name: str, steps: int, accumulation: int) -> dict[str, Any]:
    layout = LAYOUTS[name]()
    monitor = None
    if folder != "bare":
        monitor = flopwatch.TrainingMonitor(
            Path(folder) / f"{name}_{accumulation}",
            model=layout.monitored,
            data_parallel_size=layout.data_parallel_size,
            log_every=2,
            config={"count": "every"},
            peak_flops_per_s=1e12,
            strict=True,
        )
    losses = train(layout, steps, accumulation, float if name == "single" else _summed_over_ranks, monitor)
    if monitor is not None:
        monitor.close()
    summary = monitor.summary if monitor is not None else None
    result = {"layout": name, "accumulation": accumulation, **compared(layout, losses)}
    return {**result, "monitor": summary.values if summary is not None else None}


def main(folder: str, names: str, steps: str, *accumulations: str) -> None:
    torch.set_num_threads(1)
    monitor_run.CLOSE_RANKS_SECONDS = 60.0  # on a busy machine the ranks of so short a run may meet late
    if names != "single":
        dist.init_process_group("gloo")
    for name, accumulation in product(names.split(","), accumulations):
        result = watched_training(folder, name, int(steps), int(accumulation))
        if name == "single" or dist.get_rank() == 0:
            sys.stdout.write(f"RESULT {json.dumps({'layout': name, **result})}\n")
            sys.stdout.flush()
    if names != "single":
        dist.barrier()
        # Tearing a gloo group down after a backward pass can deadlock in torch 2.13 (docs/ranks.md).
        os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
