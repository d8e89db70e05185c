"""Kernels that torch's dispatcher does not see betray themselves by tensors that nobody wrote."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import flopwatch

X = torch.randn(8, 16)


def unseen_product(x: torch.Tensor, out: torch.Tensor) -> None:
    """Stands for a Triton kernel: numpy writes into the memory, and torch is not asked."""
    if type(x) is torch.Tensor:
        np.copyto(out.detach().numpy(), x.detach().numpy() @ np.ones((16, 16), np.float32))


class Kernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        unseen_product(x, out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


class UsesKernel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = Kernel.apply(self.layer(x))  # type: ignore[no-untyped-call]
        return out * 2


@pytest.mark.parametrize("method", ["trace", "step"])
def test_a_tensor_that_nobody_wrote_and_somebody_reads_is_told(method: Any) -> None:
    count = flopwatch.count_flops(UsesKernel(), X, method=method)

    assert [op.op for op in count.uncounted] == ["kernel past the dispatcher"]
    assert count.coverage is not None
    assert count.coverage < 1.0
    assert any("no op of torch has filled" in note for note in count.notes)


WRITES = {
    "fill": lambda out, x: out.fill_(1.0),
    "copy": lambda out, x: out.copy_(x),
    "a row at a time": lambda out, x: [out[index].copy_(row) for index, row in enumerate(x)],
    "index put": lambda out, x: out.__setitem__(torch.arange(8), x),
    "out=": lambda out, x: torch.add(x, x, out=out),
    "random": lambda out, x: out.bernoulli_(0.5),
    "a copy elsewhere first": lambda out, x: None,
}


@pytest.mark.parametrize("method", ["trace", "step"])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_tensor_that_an_op_wrote_is_not(write: Any, method: Any) -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = torch.empty_like(x)
            if write is WRITES["a copy elsewhere first"]:
                out = out.double().to(x.dtype).zero_()
            write(out, x.detach())
            torch.empty(4).new_zeros(2)  # looks at the type only
            return self.layer(x) + out

    count = flopwatch.count_flops(Writes(), X, method=method)

    assert (count.uncounted, count.notes) == ((), ())


class Threads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # One thread: two at once sometimes break torch's own fake mode.
        with ThreadPoolExecutor(1) as pool:
            out: torch.Tensor = torch.stack(list(pool.map(lambda layer: layer(x), self.layers)))
        return out


@pytest.mark.parametrize("method", ["auto", "trace", "step"])
def test_what_runs_in_threads_that_a_model_starts_is_told(method: Any) -> None:
    before = threading.getprofile()

    count = flopwatch.count_flops(Threads(), X, method=method)

    assert "threads" in {op.op for op in count.uncounted}
    assert any("threads" in note for note in count.notes)
    assert count.is_lower_bound
    assert threading.getprofile() is before
