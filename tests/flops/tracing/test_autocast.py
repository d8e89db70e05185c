"""A count runs under the user's autocast, wherever it was switched on."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import flopwatch
from flopwatch.records.flops import PhaseFlops

X = torch.randn(8, 16)
FLOPS = 2 * 8 * 16 * 16


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 16))


@pytest.mark.parametrize("method", ["trace", "step"])
@pytest.mark.parametrize(("dtype", "name"), [(torch.bfloat16, "bf16"), (torch.float16, "fp16")])
def test_a_count_inside_of_autocast_has_its_type(method: Any, dtype: torch.dtype, name: str) -> None:
    with torch.autocast("cpu", dtype):
        count = flopwatch.count_flops(model(), X, method=method)
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") is dtype

    assert count.by_dtype == {name: PhaseFlops(2 * FLOPS, 3 * FLOPS)}


def test_the_backward_pass_runs_outside_of_autocast() -> None:
    """A part in fp32 keeps its type on the way back, as where `loss.backward()` stands outside of the region."""

    class HeadInFp32(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(16, 16), nn.Linear(16, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.body(x)
            with torch.autocast("cpu", enabled=False):
                out: torch.Tensor = self.head(hidden.float())
            return out

    with torch.autocast("cpu", torch.bfloat16):
        count = flopwatch.count_flops(HeadInFp32(), X)

    assert count.by_dtype["fp32"] == PhaseFlops(2 * 8 * 16 * 4, 2 * 2 * 8 * 16 * 4)
    assert count.by_dtype["bf16"] == PhaseFlops(FLOPS, FLOPS)


@contextmanager
def cuda_autocast(dtype: torch.dtype) -> Iterator[None]:
    """What `torch.autocast("cuda")` sets where there is a GPU."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", dtype)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])


def count_as_on_a_gpu(layers: nn.Module) -> Any:
    """A model on the meta device takes the device that autocast is on for: here there is no GPU to put it on."""
    with cuda_autocast(torch.float16):
        return flopwatch.count_flops(layers.to("meta"), X.to("meta"))


def test_an_accelerators_autocast_acts_on_the_stand_in() -> None:
    assert list(count_as_on_a_gpu(model()).by_dtype) == ["fp16"]
    assert not torch.is_autocast_enabled("cuda")
    assert not torch.is_autocast_enabled("cpu")


def test_autocast_that_the_models_own_code_enters_acts_on_the_stand_in() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.outer, self.inner = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.outer(x)
            with cuda_autocast(torch.bfloat16):
                out: torch.Tensor = self.inner(x)
            return self.outer(out)

    count = count_as_on_a_gpu(Own())

    assert {dtype: flops.forward for dtype, flops in count.by_dtype.items()} == {"fp16": 2 * FLOPS, "bf16": FLOPS}
