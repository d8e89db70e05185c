"""The FLOP law against the truth at shapes it has never seen."""

import functools
import gc
import os
import random
from importlib.metadata import version
from typing import Any

import pytest
import torch
from torch import nn

import flopwatch
from testbeds.architectures import ARCHITECTURES, BY_NAME, qwen_vl_batch, true_flops

POLYNOMIAL = [
    "gpt2", "gpt_neox", "llama", "mistral", "phi3", "olmo2", "qwen3", "gemma3", "mixtral", "qwen3_moe", "deepseek_v3",
    "gpt_oss", "bert", "clip", "llava", "whisper",
]  # fmt: skip
NOT_POLYNOMIAL = ["mamba2", "qwen3_next", "qwen2_5_vl"]
IMAGES_ONLY = ["vit", "convnext", "resnet", "segformer"]


UP_TO_5_0 = tuple(int(part) for part in version("transformers").split(".")[:2]) <= (5, 0)
WITHOUT_LAW = {"gemma3", "mixtral"} if UP_TO_5_0 else set()
"""transformers 4 and 5.0 call another attention kernel for batches that fit into a sliding window, and run only the
experts that a batch chooses."""
WITH_LAW = {"mamba2"} if UP_TO_5_0 else set()
"""Its chunks take no products there."""

PORTABLE = {"llama", "gemma3", "mixtral", "resnet", "mamba2"}
"""Full and sliding attention, experts, convolutions, and one that has no polynomial."""


CAMPAIGN = {
    *("gpt_neox", "mistral", "phi3", "olmo2", "qwen3", "qwen3_moe", "llava"),
    *("qwen3_next", "segformer", "gpt_oss", "clip", "whisper"),
}
"""More of the same kinds."""


def _named(names: list[str]) -> list[Any]:
    kinds = ((pytest.mark.portable, PORTABLE), (pytest.mark.campaign, CAMPAIGN))
    return [
        pytest.param(name, marks=[pytest.mark.slow, *(mark for mark, of_kind in kinds if name in of_kind)])
        for name in names
    ]


SHAPES = int(os.environ.get("FLOPWATCH_TEST_SHAPES", "4"))
"""`make campaign` draws 50."""


@functools.cache
def model_of(name: str) -> nn.Module:
    return BY_NAME[name].build()


@functools.cache
def law_of(name: str) -> flopwatch.FlopLaw:
    return flopwatch.fit_flops_law(model_of(name), BY_NAME[name].batch(2, 64))


@pytest.mark.requirement("R5")
@pytest.mark.parametrize("name", _named(POLYNOMIAL))
def test_it_predicts_random_shapes_to_the_flop(name: str) -> None:
    architecture, draw = BY_NAME[name], random.Random(name)
    law, eager = law_of(name), architecture.build(eager=True)
    shapes = [(draw.randint(1, 6), draw.randint(18, 64)) for _ in range(SHAPES)]

    predicted = [law.model_flops(batch_size, seq_len) for batch_size, seq_len in shapes]

    assert law.exact == (name not in WITHOUT_LAW)
    assert predicted == [true_flops(eager, architecture.batch(*shape)) for shape in shapes]


@pytest.mark.parametrize("name", _named(POLYNOMIAL))
def test_it_predicts_ragged_batches_sample_by_sample(name: str) -> None:
    if name == "clip":
        pytest.skip("compares samples with each other")
    if name in WITHOUT_LAW:
        pytest.skip("no law for gemma3 and mixtral, so each shape is counted")
    architecture, draw = BY_NAME[name], random.Random(name)
    law, eager = law_of(name), architecture.build(eager=True)
    lengths = [draw.randint(18, 64) for _ in range(12)]

    alone = {length: true_flops(eager, architecture.batch(1, length)) for length in lengths}
    of_two = {length: true_flops(eager, architecture.batch(2, length)) for length in lengths}
    # A batch computes once what its samples share, at the longest length; in transformers 4 the rotary embeddings.
    shared = 2 * alone[max(lengths)] - of_two[max(lengths)]
    truth = shared + sum(of_two[length] - alone[length] for length in lengths)

    assert law.model_flops(lengths=lengths) == truth


@pytest.mark.parametrize("name", _named(IMAGES_ONLY))
def test_a_model_without_a_sequence_has_a_law_of_its_batch_size(name: str) -> None:
    architecture = BY_NAME[name]
    law = flopwatch.fit_flops_law(architecture.build(), architecture.batch(2, 0))
    eager = architecture.build(eager=True)

    assert law.exact
    assert law.seq_lens is None
    for batch_size in (2, 3, 6, 9):
        assert law.model_flops(batch_size) == true_flops(eager, architecture.batch(batch_size, 0))


@pytest.mark.slow
def test_images_of_other_sizes_follow_the_law() -> None:
    architecture, draw = BY_NAME["qwen2_vl"], random.Random(1)
    model = architecture.build()  # kept: a length outside of the law's range is counted
    law = flopwatch.fit_flops_law(model, architecture.batch(2, 32))
    eager = architecture.build(eager=True)

    assert law.exact
    for _ in range(SHAPES):
        batch_size, grid = draw.randint(1, 3), (1, 2 * draw.randint(1, 5), 2 * draw.randint(1, 5))
        seq_len = draw.randint(30, 80)
        truth = true_flops(eager, qwen_vl_batch(batch_size, seq_len, grid))
        assert law.model_flops(batch_size, seq_len, image_grids=[grid] * batch_size) == truth


@pytest.mark.parametrize("name", _named(NOT_POLYNOMIAL))
def test_it_never_calls_itself_exact_where_it_is_not(name: str) -> None:
    architecture = BY_NAME[name]
    model = architecture.build()
    law = flopwatch.fit_flops_law(model, architecture.batch(2, 64))
    eager = architecture.build(eager=True)

    assert law.exact == (name in WITH_LAW)
    if not law.exact:
        assert "each shape is counted when needed" in law.notes[0] or "right for one batch only" in law.notes[0]
    for batch_size, seq_len in ((3, 41), (1, 64), (2, 50)):
        assert law.model_flops(batch_size, seq_len) == true_flops(eager, architecture.batch(batch_size, seq_len))


class Chunked(nn.Module):
    """Pads its sequence to a multiple of 7 before a product over pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 8)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = nn.functional.pad(self.embedding(input_ids), (0, 0, 0, -input_ids.shape[1] % 7))
        return x @ x.transpose(-1, -2)


@pytest.mark.slow
@pytest.mark.parametrize("seq_len", [14, 28, 29, 35, 49, 63, 70, 128])
def test_chunks_are_found_out_whatever_the_example(seq_len: int) -> None:
    ids = torch.ones(2, seq_len, dtype=torch.long)

    assert not flopwatch.fit_flops_law(Chunked(), {"input_ids": ids}).exact


@pytest.mark.slow
def test_a_law_counts_new_shapes_only_while_its_model_lives() -> None:
    model = Chunked()
    law = flopwatch.fit_flops_law(model, {"input_ids": torch.ones(2, 30, dtype=torch.long)})
    assert law.model_flops(1, 8) == 2 * 14 * 14 * 8 * 3
    del model
    gc.collect()

    assert law.model_flops(1, 8) == 2 * 14 * 14 * 8 * 3
    with pytest.raises(flopwatch.InputError, match="no longer exists"):
        law.model_flops(1, 9)


@pytest.mark.slow
def test_hardware_flops_follow_the_law_too() -> None:
    architecture = BY_NAME["llama"]
    model = architecture.build()
    model.gradient_checkpointing_enable()  # type: ignore[operator]
    law = flopwatch.fit_flops_law(model, architecture.batch(2, 40))

    count = flopwatch.count_flops(model, architecture.batch(3, 23))

    assert law.exact
    assert law.model_flops(3, 23) == count.model_flops
    assert law.hardware_flops(3, 23) == count.hardware_flops > count.model_flops


@pytest.mark.slow
def test_it_knows_the_range_it_was_verified_on() -> None:
    law = flopwatch.fit_flops_law(BY_NAME["llama"].build(), BY_NAME["llama"].batch(2, 40))

    assert law.covers(40)
    assert law.covers(3)
    assert not law.covers(41)
    assert not law.covers(None)


@pytest.mark.parametrize(
    ("arguments", "options", "says"),
    [
        ((), {}, "pass `batch_size`"),
        ((2,), {}, "pass `seq_len`"),
        ((2, 8), {"lengths": [3]}, "not both"),
        ((), {"lengths": []}, "`lengths` is empty"),
        ((0, 8), {}, "batch_size must be a positive whole number, got 0"),
        ((2, 8.5), {}, "a length must be a positive whole number, got 8.5"),
        ((2, float("nan")), {}, "positive whole number, got nan"),
        ((2, 8), {"image_grids": [(1, 2, 2)]}, "leave `image_grids` out"),
    ],
)
def test_shapes_that_are_none_are_refused(arguments: Any, options: Any, says: str) -> None:
    law = flopwatch.FlopLaw(True, (1, 64), "full", {})

    with pytest.raises(flopwatch.InputError, match=says):
        law.model_flops(*arguments, **options)


def test_classes_of_an_image_are_no_sequence() -> None:
    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution = nn.Conv2d(3, 5, 3)

        def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return nn.functional.mse_loss(self.convolution(pixel_values).mean(dim=(2, 3)), labels)

    batch = {"pixel_values": torch.randn(4, 3, 8, 8), "labels": torch.rand(4, 5)}
    law = flopwatch.fit_flops_law(Classifier(), batch)

    assert law.exact
    assert law.seq_lens is None
    assert law.model_flops(7) == 2 * 7 * 6 * 6 * 5 * 3 * 3 * 3 * 2


def test_every_architecture_is_in_one_of_the_groups() -> None:
    known = {*POLYNOMIAL, *NOT_POLYNOMIAL, *IMAGES_ONLY, "qwen2_vl", "t5", "wav2vec2"}
    assert {architecture.name for architecture in ARCHITECTURES} == known


@pytest.mark.slow
def test_a_law_of_counts_with_holes_is_not_exact() -> None:
    class SingularValues(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(9, 8)
            self.layer = nn.Linear(8, 8)

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            x = self.layer(self.embedding(input_ids))
            return torch.linalg.svdvals(x.mT @ x).sum() + x.sum()

    law = flopwatch.fit_flops_law(SingularValues(), {"input_ids": torch.ones(2, 30, dtype=torch.long)})

    assert not law.exact
    assert "have no formula" in law.notes[0]


class Detector(nn.Module):
    """Takes lists of images and of dicts, as torchvision's detectors do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 4, 3)

    def forward(self, images: list[torch.Tensor], targets: list[dict[str, torch.Tensor]]) -> torch.Tensor:
        pairs = zip(images, targets, strict=True)
        return torch.stack([self.layer(image[None]).sum() + target["boxes"].sum() for image, target in pairs]).sum()


@pytest.mark.parametrize("seq_len", [33, 34])
def test_a_model_that_halves_its_sequence_is_right_at_lengths_of_the_other_parity(seq_len: int) -> None:
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.layer = nn.Embedding(9, 8), nn.Conv1d(8, 8, 2, stride=2)

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            x = self.embedding(input_ids).mT
            return self.layer(nn.functional.pad(x, (0, x.shape[-1] % 2)))

    model = Halves()
    law = flopwatch.fit_flops_law(model, {"input_ids": torch.ones(2, seq_len, dtype=torch.long)})

    for length in (seq_len - 1, seq_len):
        assert law.model_flops(2, length) == 3 * 2 * 2 * ((length + 1) // 2) * 8 * 8 * 2
