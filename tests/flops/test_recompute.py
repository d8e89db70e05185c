"""Recomputation in the places where grad mode alone does not give it away."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import flopwatch

PRODUCT = 2 * 4 * 8 * 8
"""One 8 x 8 matrix on a batch of 4."""


class Multiply(torch.autograd.Function):
    """A custom function: its forward runs with grad mode off, also when it is run again."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return grads[0] @ weight.T, x.T @ grads[0]


class CustomLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(Multiply.apply(x, self.weight))


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module, *, reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8, bias=False)  # so that the checkpoint's input needs a gradient
        self.inner = inner
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, self.first(x), use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("method", ["trace", "step"])
def test_a_custom_function_inside_a_checkpoint_runs_again(reentrant: bool, method: Any) -> None:
    count = flopwatch.count_flops(Checkpointed(CustomLayer(), reentrant=reentrant), torch.randn(4, 8), method=method)

    assert count.forward_flops == 2 * PRODUCT
    assert count.backward_flops == 3 * PRODUCT  # the first layer's input needs none
    assert count.recompute_flops == PRODUCT


def test_a_checkpoint_inside_a_checkpoint_runs_three_times() -> None:
    inner = Checkpointed(CustomLayer(), reentrant=False)
    count = flopwatch.count_flops(Checkpointed(inner, reentrant=True), torch.randn(4, 8))

    # forward: 3 layers; again: the two layers of the inner checkpoint, then its custom layer once more
    assert (count.forward_flops, count.backward_flops) == (3 * PRODUCT, 5 * PRODUCT)
    assert count.recompute_flops == 3 * PRODUCT


def test_a_gradient_taken_in_the_forward_pass_is_no_recomputation() -> None:
    class Penalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.layer(x).square().sum(), x, create_graph=True)
            return slope.square().sum()

    count = flopwatch.count_flops(Penalised(), torch.randn(4, 8))

    assert count.recompute_flops == 0
    assert count.model_flops > 3 * PRODUCT


class NeedsValues(nn.Module):
    """A checkpoint whose region needs values, so that it cannot be traced."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.layer, self.options = nn.Linear(8, 8), options

    def region(self, x: torch.Tensor) -> torch.Tensor:
        out = self.layer(x)
        return out if float(out.detach().sum()) > 0 else -out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.region, x, use_reentrant=False, **self.options).sum()  # type: ignore[no-any-return]
