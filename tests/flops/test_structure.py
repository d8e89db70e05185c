"""A batch is everything in it: what belongs to one kind, and which sizes a law may vary."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from flopwatch.flops.batch_contents import describe, map_tensors, tensors_of
from flopwatch.flops.batch_layout import resized, suggest_layouts

IDS = torch.zeros(2, 8, dtype=torch.long)


@dataclass
class Sample:
    ids: torch.Tensor
    depth: int = 1


class Holder:
    def __init__(self, k: int) -> None:
        self.x = torch.zeros(2, 3)
        self.k = k


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"x": IDS, "task": "a"}, {"x": IDS, "task": "b"}),
        ({"x": IDS, "n": 1}, {"x": IDS, "n": True}),
        ({"x": IDS}, {"x": IDS.float()}),
        ({"x": IDS.float()}, {"x": IDS.float().requires_grad_()}),
        (Sample(IDS, 1), Sample(IDS, 2)),
        ({"o": Holder(1)}, {"o": Holder(2)}),
        ({"x": IDS, "a": np.zeros(3)}, {"x": IDS, "a": np.ones(3)}),
        ({"x": IDS, "s": {"a"}}, {"x": IDS, "s": {"b"}}),
        ([IDS, {"y": [IDS]}], [IDS, {"y": [IDS[:, :4]]}]),
    ],
)
def test_batches_that_differ_in_anything_are_of_different_kinds(one: object, other: object) -> None:
    assert describe(one) == describe(one)
    assert describe(one) != describe(other)


def test_tensors_are_found_wherever_they_lie() -> None:
    batch = {"images": [IDS, IDS], "sample": Sample(IDS)}
    assert list(tensors_of(batch)) == ["images.0", "images.1", "sample.ids"]
    assert map_tensors(batch, lambda path, tensor: tensor + 1)["sample"].ids.sum() == 16


def test_a_law_may_vary_samples_and_lengths_and_nothing_else() -> None:
    layout = suggest_layouts({"input_ids": IDS, "pixel_values": torch.zeros(2, 3, 8, 8)})[0]

    assert layout.match(describe({"input_ids": IDS[:1, :4], "pixel_values": torch.zeros(1, 3, 8, 8)})) == {
        "n": 1,
        "s": 4,
    }
    assert layout.match(describe({"input_ids": IDS, "pixel_values": torch.zeros(2, 3, 16, 16)})) is None
    assert layout.match(describe({"input_ids": IDS, "pixel_values": torch.zeros(1, 3, 8, 8)})) is None


def test_a_batch_is_resized_along_its_variables() -> None:
    batch = {"input_ids": IDS[:1], "labels": IDS[:1], "scale": 2.0}
    layout = suggest_layouts({"input_ids": IDS, "labels": IDS, "scale": 2.0})[0]

    made = resized(batch, layout, {"n": 5, "s": 3})

    assert made["input_ids"].shape == made["labels"].shape == (5, 3)
    assert made["scale"] == 2.0
