"""torch's encoder drops padding by itself: with a padding mask it runs on nested tensors in eval mode."""

import pytest
import torch
from torch import nn

import flopwatch

WIDTH, HIDDEN = 32, 64

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 4, HIDDEN, batch_first=True)
    return nn.TransformerEncoder(layer, num_layers=2)


def layer_flops(lengths: list[int]) -> int:
    projections = 2 * sum(lengths) * (4 * WIDTH * WIDTH + 2 * WIDTH * HIDDEN)
    return projections + sum(4 * length**2 * WIDTH for length in lengths)


def test_each_sample_counts_at_its_own_length() -> None:
    padding = torch.zeros(2, 6, dtype=torch.bool)
    padding[0, 4:] = True

    count = flopwatch.count_flops(encoder(), (torch.randn(2, 6, WIDTH), None, padding), training=False)

    assert count.model_flops == 2 * layer_flops([4, 6])
    assert count.coverage == 1.0


def test_a_nested_product_without_a_formula_is_named() -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows = torch.nested.nested_tensor([x[:2], x[:3]])
            return torch.nested.to_padded_tensor(self.layer(rows), 0.0)

    count = flopwatch.count_flops(Nested(), torch.randn(3, 4), training=False)

    assert count.is_lower_bound
