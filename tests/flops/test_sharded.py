"""A model that is spread over ranks is counted whole, by one rank alone, which must never wait for the others."""

import json
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_module, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.flop_counter import FlopCounterMode

import flopwatch
from support.torchrun import outputs_of_ranks
from support.warm_python import TRANSFORMERS
from testbeds.architectures import BY_NAME

SCRIPT = Path(__file__).parent / "scripts" / "count_on_one_rank.py"
IS_LONG = "FLOPWATCH_LONG" in os.environ
IN_CAMPAIGN = ("tensor parallel and fsdp2", "transformers mixtral")
ON_FOUR_RANKS = ("ddp", "fsdp2", "tensor parallel", *IN_CAMPAIGN[: int(IS_LONG)])
OF_TRANSFORMERS = ("transformers llama", *IN_CAMPAIGN[1 : 1 + int(IS_LONG)])
WITH_OBSTACLES = ("needs values, tensor parallel", "by hand", "collective of values")
X = torch.ones(3, 8)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Two ranks of which one is here, and whose collectives do nothing."""
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    distributed.destroy_process_group()


class Reduces(nn.Module):
    """Half of a layer on each rank, and nothing that shows it but the collective."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 4, bias=False), nn.Linear(4, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return all_reduce(self.down(self.up(x)), "sum", distributed.group.WORLD)


class ReducesValues(Reduces):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = torch.tensor([x.shape[0]])
        distributed.all_reduce(rows)
        return super().forward(x) / rows


class NeedsValuesAndReduces(Reduces):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        return x if self.down(self.up(x)).norm() > 0 else 2 * x


def eager_flops(model: nn.Module) -> int:
    """What a real step runs: up to torch 2.10 no backward pass, because functional collectives pass no gradient on."""
    with FlopCounterMode(display=False) as counter:
        model(X).sum().backward()
    return int(counter.get_total_flops())


def test_a_layer_that_is_split_by_hand_counts_as_one_ranks_share_and_says_so(mesh: DeviceMesh) -> None:
    count, law = flopwatch.count_flops(Reduces(), X), flopwatch.fit_flops_law(Reduces(), X)

    assert (count.method, count.model_flops) == ("trace", eager_flops(Reduces()))
    assert count.notes == ("the model's own code calls collectives, so only the share of this rank is counted",)
    assert not law.exact
    assert law.notes[0] == count.notes[0]


@pytest.mark.parametrize("model", [ReducesValues, NeedsValuesAndReduces])
def test_a_collective_on_real_values_is_not_run_but_estimated(model: type[Reduces], mesh: DeviceMesh) -> None:
    count = flopwatch.count_flops(model(), X)

    assert count.method == "estimate"
    assert "calls the collective" in count.notes[0]


@pytest.mark.parametrize("model", [Reduces, ReducesValues])
def test_a_real_step_stops_before_the_first_collective(model: type[Reduces], mesh: DeviceMesh) -> None:
    with pytest.raises(flopwatch.MeasurementError, match=r"the collective .*all_?reduce.*cannot run alone"):
        flopwatch.count_flops(model(), X, method="step")


def test_alone_in_its_group_a_model_may_reduce(tmp_path: Path) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        count, truth = flopwatch.count_flops(Reduces(), X, method="step"), eager_flops(Reduces())
    finally:
        distributed.destroy_process_group()

    assert (count.model_flops, count.notes) == (truth, ())


def test_a_step_of_a_sharded_model_is_refused(mesh: DeviceMesh) -> None:
    model = distribute_module(nn.Linear(8, 8), mesh)

    with pytest.raises(flopwatch.InputError, match=r"spread over ranks \(DTensor\).*use method='trace'"):
        flopwatch.count_flops(model, X, method="step")


class WithTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8, bias=False)
        self.register_buffer("table", torch.tensor([1, 0, 1]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x[self.table.bool()])


def test_a_replicated_table_is_read(mesh: DeviceMesh) -> None:
    count = flopwatch.count_flops(distribute_module(WithTable(), mesh), X)

    assert (count.method, count.model_flops) == ("trace", 2 * 2 * 2 * 8 * 8)


def test_a_sharded_table_is_not_gathered(mesh: DeviceMesh) -> None:
    model = WithTable()
    model.table = distribute_tensor(torch.tensor([1, 0]), mesh, [Shard(0)])

    with pytest.raises(flopwatch.UntraceableError, match=r"shape \(2,\) are spread over ranks"):
        flopwatch.count_flops(model, X, method="trace")
    assert flopwatch.count_flops(model, X).method == "estimate"


@pytest.mark.parametrize("method", ["trace", "step"])
def test_synchronised_batch_norm_asks_nobody(method: Any, mesh: DeviceMesh) -> None:
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 3))
    synchronised = nn.SyncBatchNorm.convert_sync_batchnorm(plain)
    images = torch.ones(2, 3, 8, 8)

    count = flopwatch.count_flops(synchronised, images, method=method)

    assert count.method == method
    assert count.model_flops == flopwatch.count_flops(plain, images).model_flops
    assert isinstance(synchronised[1], nn.SyncBatchNorm)


@cache
def results(ranks: int, *kinds: str) -> dict[str, dict[str, Any]]:
    outputs = outputs_of_ranks(SCRIPT, *kinds, ranks=ranks, modules=TRANSFORMERS)
    lines = [line for output in outputs for line in output.splitlines() if line.startswith("RESULT ")]
    found = (json.loads(line.removeprefix("RESULT ")) for line in lines)
    return {result["kind"]: result for result in found}


def plain_llama_or(name: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    batch = BY_NAME["llama"].batch(3, 16)
    batch["attention_mask"][0, 9:] = 0
    return BY_NAME[name].build(), batch


@cache
def count_and_law(name: str) -> tuple[Any, Any]:
    model, batch = plain_llama_or(name)
    return flopwatch.count_flops(model, batch), flopwatch.fit_flops_law(model, batch)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        *(kind for kind in (*ON_FOUR_RANKS, *OF_TRANSFORMERS) if kind not in IN_CAMPAIGN),
        *(pytest.param(kind, marks=pytest.mark.campaign) for kind in IN_CAMPAIGN),
    ],
)
def test_one_rank_alone_counts_the_whole_model(kind: str) -> None:
    name = kind.removeprefix("transformers ") if kind in OF_TRANSFORMERS else "llama"
    model, batch = plain_llama_or(name)
    expected, law = count_and_law(name)

    result = results(4, *ON_FOUR_RANKS)[kind] if kind in ON_FOUR_RANKS else results(2, *OF_TRANSFORMERS)[kind]

    assert (result["method"], result["flops"], result["notes"]) == ("trace", expected.model_flops, [])
    assert (result["law is exact"], result["law"]) == (True, law.model_flops(batch_size=5, seq_len=24))
    assert result["loss"] == pytest.approx(float(model(**batch).loss.detach()), rel=1e-5), (
        "the step after it is its own"
    )
    if kind != "ddp":
        assert result["step"].startswith("InputError: the model's parameters are spread over ranks")


@pytest.mark.slow
@pytest.mark.parametrize("kind", WITH_OBSTACLES)
def test_one_rank_alone_never_waits_for_the_others(kind: str) -> None:
    result = results(2, *WITH_OBSTACLES)[kind]

    assert result["method"] == ("trace" if kind == "by hand" else "estimate")
    assert not result["law is exact"]
    assert result["step"].startswith(
        ("InputError: the model's parameters", "NeedsOtherRanksError: the model itself calls")
    )
