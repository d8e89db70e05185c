"""Wrapped models count the same, and stay what they were."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile

import flopwatch
from support.torchrun import outputs_of_ranks
from support.warm_python import TRANSFORMERS
from testbeds.architectures import BY_NAME, Batch

# dynamo reads .grad of tensors that have none, and warns of itself.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")

ARCHITECTURE = BY_NAME["llama"]
SCRIPTS = Path(__file__).parent / "scripts"


@pytest.fixture
def batch() -> Batch:
    return ARCHITECTURE.batch(2, 16)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()
    counters.clear()


@pytest.fixture
def plain_flops(batch: Batch) -> int:
    return flopwatch.count_flops(ARCHITECTURE.build(), batch).model_flops


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "warm"),
    [
        pytest.param("trace", False, id="trace-cold"),
        pytest.param("trace", True, id="trace-warm", marks=pytest.mark.campaign),
        pytest.param("step", False, id="step-cold", marks=pytest.mark.campaign),
        pytest.param("step", True, id="step-warm"),
    ],
)
def test_a_compiled_model_stays_compiled(warm: bool, method: str, batch: Batch, plain_flops: int) -> None:
    model = torch.compile(ARCHITECTURE.build(), backend="aot_eager")
    if warm:
        model(**batch).loss.backward()

    count = flopwatch.count_flops(model, batch, method=method)  # type: ignore[arg-type]
    model(**batch).loss.backward()

    assert count.model_flops == plain_flops
    assert _compiled_regions(model, batch) == {"Torch-Compiled Region: 0/0"}
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow
def test_compiled_parts_of_a_model_stay_compiled(batch: Batch, plain_flops: int) -> None:
    model = ARCHITECTURE.build()
    layers = model.model.layers  # type: ignore[union-attr]
    layers[0] = torch.compile(layers[0], backend="aot_eager")  # type: ignore[index, operator]
    layers[1].compile(backend="aot_eager")  # type: ignore[index, operator]

    count = flopwatch.count_flops(model, batch)
    model(**batch).loss.backward()

    assert count.model_flops == plain_flops
    assert len(_compiled_regions(model, batch)) >= 1
    assert counters["stats"]["unique_graphs"] >= 1


def _compiled_regions(model: nn.Module, batch: Batch) -> set[str]:
    with profile(activities=[ProfilerActivity.CPU]) as events:
        model(**batch).loss.backward()
    return {event.name for event in events.events() or [] if event.name.startswith("Torch-Compiled Region")}


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_two_ranks_count_the_same_as_one(wrapper: str, plain_flops: int) -> None:
    output = _run(2, wrapper)

    assert sorted(output) == [f"rank 0: {plain_flops} trained", f"rank 1: {plain_flops} trained"]


@pytest.mark.slow
def test_fsdp2_over_64_fake_ranks_counts_the_same(plain_flops: int) -> None:
    assert _run(1, "fsdp2-fake-64") == [f"rank 0: {plain_flops} not trained"]


def _run(ranks: int, wrapper: str) -> list[str]:
    outputs = outputs_of_ranks(SCRIPTS / "count_wrapped.py", wrapper, ranks=ranks, modules=TRANSFORMERS)
    return [line for output in outputs for line in output.splitlines() if line.startswith("rank")]
