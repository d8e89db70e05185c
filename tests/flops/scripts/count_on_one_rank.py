"""Run by test_sharded.py under torchrun with two or four ranks: rank 0 alone counts each model, then all train a step.

The others go straight to the step, so a collective in the count would hang, or take the place of one of the step's.
"""

import json
import os
import sys
import tempfile
from datetime import timedelta
from typing import Any

import torch
import transformers
from torch import distributed, nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import flopwatch
from testbeds.architectures import BY_NAME, Batch

LAYER_PLAN = {
    **{f"self_attn.{name}": ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")},
    "self_attn.o_proj": RowwiseParallel(),
    "mlp.gate_proj": ColwiseParallel(),
    "mlp.up_proj": ColwiseParallel(),
    "mlp.down_proj": RowwiseParallel(),
}


class ReducesByHand(nn.Module):
    """Two halves of a layer as Megatron splits them, and nothing that shows it but the collective."""

    def __init__(self, of_values: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 4, bias=False), nn.Linear(4, 8, bias=False)
        self.of_values = of_values

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.of_values:
            rows = torch.tensor([x.shape[0]])
            distributed.all_reduce(rows)
            x = x / rows
        return all_reduce(self.down(self.up(x)), "sum", distributed.group.WORLD).sum()


class NeedsValues(nn.Module):
    """No fake tensor can follow it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.layer(x)
        return hidden.sum() if float(hidden.mean()) > -1e9 else hidden.mean()


def sharded(model: Any, mesh: DeviceMesh | None) -> nn.Module:
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)  # type: ignore[no-any-return]


def tensor_parallel(mesh: DeviceMesh) -> Any:
    model: Any = BY_NAME["llama"].build()
    for layer in model.model.layers:
        parallelize_module(layer, mesh, LAYER_PLAN)
    ends = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    return parallelize_module(model, mesh, ends)


def of_transformers(name: str) -> nn.Module:
    folder = [tempfile.mkdtemp()] if distributed.get_rank() == 0 else [""]
    distributed.broadcast_object_list(folder)
    if distributed.get_rank() == 0:
        BY_NAME[name].build().save_pretrained(folder[0])  # type: ignore[operator]
    distributed.barrier()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder[0], tp_plan="auto")
    return model.train()  # type: ignore[no-any-return]


def build(kind: str, mesh: DeviceMesh) -> nn.Module:
    torch.manual_seed(0)
    if kind == "ddp":
        return DistributedDataParallel(BY_NAME["llama"].build())
    if kind == "fsdp2":
        return sharded(BY_NAME["llama"].build(), None)
    if kind == "tensor parallel":
        return tensor_parallel(mesh["tensor"])  # type: ignore[no-any-return]
    if kind == "tensor parallel and fsdp2":
        return sharded(tensor_parallel(mesh["tensor"]), mesh["data"])
    if kind.startswith("transformers "):
        return of_transformers(kind.removeprefix("transformers "))
    if kind == "needs values, tensor parallel":
        return parallelize_module(NeedsValues(), mesh["tensor"], {"layer": ColwiseParallel(output_layouts=Replicate())})
    return ReducesByHand(of_values=kind == "collective of values")


def counted(model: nn.Module, batch: Any) -> dict[str, Any]:
    count, law = flopwatch.count_flops(model, batch), flopwatch.fit_flops_law(model, batch)
    result = {"flops": count.model_flops, "method": count.method, "notes": count.notes}
    result |= {"law is exact": law.exact, "law": law.model_flops(batch_size=5, seq_len=law.seq_lens and 24)}
    try:
        flopwatch.count_flops(model, batch, method="step")
    except flopwatch.FlopwatchError as error:
        result["step"] = f"{type(error).__name__}: {error}"
    return result


def loss_of_step(model: nn.Module, batch: Batch | torch.Tensor) -> float:
    loss = model(**batch).loss if isinstance(batch, dict) else model(batch)
    loss.backward()
    return float(loss.detach())


def main(*kinds: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
    mesh = init_device_mesh("cpu", (distributed.get_world_size() // 2, 2), mesh_dim_names=("data", "tensor"))
    for kind in kinds:
        model = build(kind, mesh)
        has_text = "values" not in kind and "by hand" not in kind
        batch: Any = BY_NAME["llama"].batch(3, 16) if has_text else torch.ones(3, 8)
        if has_text:
            batch["attention_mask"][0, 9:] = 0
        result = counted(model, batch) if distributed.get_rank() == 0 else {}
        result |= {"kind": kind, "loss": loss_of_step(model, batch)}
        if distributed.get_rank() == 0:
            sys.stdout.write(f"RESULT {json.dumps(result)}\n")
            sys.stdout.flush()
    distributed.barrier()
    # Tearing a gloo group down after a backward pass can deadlock in torch 2.13 (docs/ranks.md).
    os._exit(0)


main(*sys.argv[1:])
