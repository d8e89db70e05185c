"""`flex_attention`: its mask is a function, and it has no backward pass on the CPU, where stand-ins are."""

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import flopwatch
from flopwatch.records.flops import AttentionConvention

BATCH, HEADS, LENGTH, WIDTH = 2, 2, 64, 16
X = torch.randn(BATCH, HEADS, LENGTH, WIDTH)
PROJECTION = 2 * BATCH * HEADS * LENGTH * WIDTH * 3 * WIDTH

pytestmark = [
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
    # Torch 2.12 shows this warning once, because a trace runs compiled functions, such as this one of torch, eagerly.
    pytest.mark.filterwarnings("ignore:torch.compile with fullgraph=True found no compiled frames"),
]


class Flex(nn.Module):
    def __init__(self, window: int, documents: torch.Tensor | None = None) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, 3 * WIDTH, bias=False)

        def allowed(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            near = (q >= k) & (q - k < window)
            return near if documents is None else near & (documents[b, q] == documents[b, k])

        batch = None if documents is None else BATCH
        self.mask = create_block_mask(allowed, batch, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = flex_attention(*self.project(x).chunk(3, -1), block_mask=self.mask)
        assert isinstance(out, torch.Tensor)
        return out


def window_pairs(length: int, window: int) -> int:
    return sum(min(position + 1, window) for position in range(length))


@pytest.mark.parametrize("window", [LENGTH, 5])
def test_the_causal_convention_counts_what_the_mask_lets_through(window: int) -> None:
    count = flopwatch.count_flops(Flex(window), X, training=False, attention="causal")

    assert count.model_flops == PROJECTION + 4 * BATCH * HEADS * window_pairs(LENGTH, window) * WIDTH
    assert (count.attention, count.notes) == ("causal", ())


def test_a_mask_of_its_own_for_each_sample_is_counted_for_each() -> None:
    documents = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    documents[1, 24:] = 1  # the second sample is two documents of 24 and 40 tokens

    count = flopwatch.count_flops(Flex(LENGTH, documents), X, training=False, attention="causal")

    pairs = window_pairs(LENGTH, LENGTH) + window_pairs(24, 24) + window_pairs(40, 40)
    assert count.model_flops == PROJECTION + 4 * HEADS * pairs * WIDTH


@pytest.mark.parametrize(("attention", "pairs"), [("full", LENGTH**2), ("causal", window_pairs(LENGTH, LENGTH))])
def test_a_training_step_has_a_number(attention: AttentionConvention, pairs: int) -> None:
    count = flopwatch.count_flops(Flex(LENGTH), X, attention=attention)

    product = 2 * BATCH * HEADS * pairs * WIDTH
    assert count.method == "trace"
    assert count.forward_flops == PROJECTION + 2 * product
    assert count.backward_flops == PROJECTION + 4 * product  # the projection's input needs no gradient
    assert count.recompute_flops == product


def test_attention_written_out_is_not_called_causal() -> None:
    class Products(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(WIDTH, 3 * WIDTH, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            query, key, value = self.project(x).chunk(3, -1)
            return (query @ key.T).tril().softmax(-1) @ value

    count = flopwatch.count_flops(Products(), torch.randn(LENGTH, WIDTH), attention="causal")

    assert count.attention == "full"
    assert any("plain matrix products" in note for note in count.notes)
