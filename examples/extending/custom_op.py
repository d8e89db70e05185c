"""A formula for a custom op: without it flopwatch names the op and says that the count is a lower bound.

python examples/extending/custom_op.py
"""

import numpy as np
import torch
from torch import nn

import flopwatch

BATCH, WIDTH = 32, 64


@torch.library.custom_op("example::product", mutates_args=())
def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """A matrix product by a kernel that torch cannot look into; here numpy stands for your CUDA kernel."""
    return torch.from_numpy(np.matmul(left.detach().numpy(), right.detach().numpy()))


@product.register_fake
def _(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return left.new_empty(left.shape[0], right.shape[1])


def keep_inputs(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    left, right = ctx.saved_tensors
    return product(gradient, right.T.contiguous()), product(left.T.contiguous(), gradient)


product.register_autograd(backward, setup_context=keep_inputs)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return product(self.first(x), self.weight).square().mean()


batch = torch.randn(BATCH, WIDTH)
before = flopwatch.count_flops(Block(), batch)
missing, calls = before.uncounted[0].op, sum(op.calls for op in before.uncounted)
print(f"Without a formula: {before.model_flops:,} FLOPs, a lower bound: {before.is_lower_bound}.")
print(f"Not counted: {missing}, called {calls} times, coverage {before.coverage:.0%}.")


@flopwatch.register_formula("example::product")
def product_flops(left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor) -> int:
    return 2 * left.shape[0] * left.shape[1] * right.shape[1]


after = flopwatch.count_flops(Block(), batch)
print(f"With the formula: {after.model_flops:,} FLOPs, coverage {after.coverage:.0%}.")
