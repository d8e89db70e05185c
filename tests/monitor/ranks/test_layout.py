"""How many ranks have different data, as the model shows it when training begins. One real process of four."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Shard, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

import flopwatch
from flopwatch.monitor.ranks.layout import data_parallel_size


@pytest.fixture
def mesh():
    torch.distributed.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.distributed.destroy_process_group()


def test_plain_models_have_different_data_on_every_rank(mesh):
    assert data_parallel_size(nn.Linear(8, 8), 4) == 4


def test_fsdp_beside_tensor_parallelism_says_it_itself(mesh):
    model = nn.Sequential(parallelize_module(nn.Linear(8, 8), mesh["tp"], ColwiseParallel()), nn.Linear(8, 8))
    assert data_parallel_size(fully_shard(model, mesh=mesh["dp"]), 4) == 2


@pytest.mark.parametrize("kind", ["fsdp", "replicated", "with tensor parallelism"])
def test_without_torchs_private_function_the_parameters_say_it(mesh, kind, monkeypatch):
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    if kind == "with tensor parallelism":
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    whole = init_device_mesh("cpu", (4,))
    meshes = {"fsdp": whole, "replicated": init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))}
    fully_shard(model, mesh=meshes.get(kind, mesh["dp"]))
    with_it = data_parallel_size(model, 4)
    monkeypatch.delattr(FSDPModule, "_get_fsdp_state")

    assert data_parallel_size(model, 4) == with_it == (2 if kind == "with tensor parallelism" else 4)


def test_parameters_sharded_over_different_meshes_count_by_the_largest(mesh):
    common = pytest.importorskip("torch.distributed.fsdp._fully_shard._fsdp_common")
    if not hasattr(common, "ShardPlacementResult"):
        pytest.skip(f"torch {torch.__version__} shards all parameters of a module over one mesh")

    whole = init_device_mesh("cpu", (4,))
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    experts = set(model[1].parameters())
    of_experts, of_others = common.FSDPMeshInfo(mesh["dp"], 0), common.FSDPMeshInfo(whole, 0)

    def placement(parameter):
        return common.ShardPlacementResult(Shard(0), of_experts if parameter in experts else of_others)

    assert data_parallel_size(fully_shard(model, mesh=whole, shard_placement_fn=placement), 4) == 4


def test_a_model_parallelised_after_the_monitor_was_made_is_seen(mesh, tmp_path):
    model = nn.Sequential(nn.Linear(8, 8))
    monitor = flopwatch.TrainingMonitor(tmp_path, model=model, flops_fn=lambda batch: 1)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    monitor.log_step(0, batch=torch.zeros(4, 8))
    run = monitor._run
    monitor._run.ranks.leave()  # of four ranks, three never come
    monitor.close()
    assert run.rows.layout.data_parallel_size == 2
