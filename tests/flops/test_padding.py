"""Padding is executed and is not model FLOPs: each sample counts alone, at its own length."""

from typing import Any

import pytest
import torch

import flopwatch
from testbeds.architectures import BY_NAME, Batch, true_flops

SLOW = ["mixtral", "bert", "mamba2", "qwen2_vl"]
FEW = [32, 20, 20]
MANY = [32, 31, 29, 28, 26, 23, 22, 19, 18]


CAMPAIGN = [
    *((name, FEW, True) for name in ("bert", "mamba2", "mixtral")),
    *((name, MANY, left) for name in ("bert", "mamba2", "mixtral") for left in (False, True)),
    ("llama", MANY, True),
    ("qwen2_vl", MANY, False),  # not left: placeholders of images stand at the start
]
"""The cases of the same kind that only `make campaign` runs."""


@pytest.mark.slow
@pytest.mark.requirement("R19")
@pytest.mark.parametrize(
    ("name", "lengths", "left"),
    [
        pytest.param("llama", FEW, False, id="llama-few-right"),
        pytest.param("llama", FEW, True, id="llama-few-left", marks=pytest.mark.slow),
        *(pytest.param(name, FEW, False, id=f"{name}-few-right", marks=pytest.mark.slow) for name in SLOW),
        # More rows than are counted one by one: the rest comes from a law.
        pytest.param("llama", MANY, False, id="llama-many-right", marks=pytest.mark.slow),
        *(pytest.param(*case, marks=[pytest.mark.slow, pytest.mark.campaign]) for case in CAMPAIGN),
    ],
)
def test_model_flops_are_those_of_each_sample_alone(name: str, lengths: list[int], left: bool) -> None:
    architecture = BY_NAME[name]
    batch = _padded(architecture.batch(len(lengths), 32), lengths, left=left)
    eager = architecture.build(eager=True)

    def shared(length: int) -> int:
        """What all rows have in common, such as the table of rotary embeddings in transformers 4."""
        return 2 * true_flops(eager, architecture.batch(1, length)) - true_flops(eager, architecture.batch(2, length))

    alone = sum(true_flops(eager, architecture.batch(1, length)) - shared(length) for length in lengths)
    truth = alone + shared(max(lengths))

    count = flopwatch.count_flops(architecture.build(), batch)

    assert count.model_flops == truth
    assert count.forward_flops + count.backward_flops == true_flops(eager, architecture.batch(len(lengths), 32))
    assert count.padding_flops == count.forward_flops + count.backward_flops - truth
    assert count.notes == ()


def test_a_row_that_cannot_stand_alone_is_said_to_be_padded() -> None:
    class PairsOnly(torch.nn.Module):
        """Refuses a single sample, as a contrastive loss does."""

        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(9, 4)
            self.layer = torch.nn.Linear(4, 4)

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            if len(input_ids) < 2:
                raise ValueError("needs a pair")
            return self.layer(self.embedding(input_ids))

    ids = torch.ones(2, 6, dtype=torch.long)
    mask = torch.tensor([[1] * 6, [1] * 4 + [0] * 2])

    count = flopwatch.count_flops(PairsOnly(), {"input_ids": ids, "attention_mask": mask})

    assert count.padding_flops == 0
    assert count.model_flops == count.forward_flops + count.backward_flops
    assert "model_flops includes padding" in count.notes[0]
    assert "needs a pair" in count.notes[0]


def _padded(batch: Batch, lengths: list[int], *, left: bool) -> dict[str, Any]:
    mask = batch["attention_mask"]
    for row, length in enumerate(lengths):
        padding = slice(0, mask.shape[1] - length) if left else slice(length, None)
        mask[row, padding] = 0
    return batch


@pytest.mark.slow
def test_what_a_step_pays_once_is_paid_once() -> None:
    class RelativePositions(torch.nn.Module):
        """Projects a table of positions once per step, as DeBERTa does, and compares all samples, as CLIP does."""

        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.layer = torch.nn.Embedding(9, 8), torch.nn.Linear(8, 8, bias=False)
            self.table, self.project = torch.nn.Parameter(torch.randn(40, 8)), torch.nn.Linear(8, 8, bias=False)

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            x = self.layer(self.embedding(input_ids)) * attention_mask[..., None]
            pooled = x.sum(1)
            return (pooled @ pooled.T).sum() + self.project(self.table).sum()

    ids = torch.ones(3, 6, dtype=torch.long)
    mask = torch.tensor([[1] * 6, [1] * 4 + [0] * 2, [1] * 6])

    count = flopwatch.count_flops(RelativePositions(), {"input_ids": ids, "attention_mask": mask})

    positions, table, pairs = 3 * 2 * 8 * 8, 40 * 3 * 2 * 8 * 8, 3 * 3 * 3 * 2 * 8
    assert count.forward_flops + count.backward_flops == 18 * positions + table + pairs
    assert count.model_flops == 16 * positions + table + pairs
