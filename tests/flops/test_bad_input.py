"""Wrong input gets an error that says what to do, never a wrong number, never a changed model."""

from typing import Any

import pytest
import torch
from torch import nn

import flopwatch
from architectures import BY_NAME

X = torch.randn(4, 8)


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("the weather is bad")


@pytest.mark.parametrize(
    ("model", "batch", "options", "says"),
    [
        ("llama", X, {}, "model must be a torch.nn.Module, got str"),
        (nn.Linear(8, 8), {}, {}, "holds no tensor"),
        (nn.Linear(8, 8), None, {}, "holds no tensor"),
        (nn.Linear(8, 8), "text", {}, "holds no tensor"),
        (nn.Linear(8, 8), torch.empty(0, 8), {}, r"the batch is empty: '0' has the shape \(0, 8\)"),
        (nn.Linear(8, 8), {0: X}, {}, "argument names as keys"),
        (nn.Linear(8, 8), X, {"attention": "half"}, "'full' or 'causal', got 'half'"),
        (nn.Linear(8, 8), X, {"method": "guess"}, "method is one of .* got 'guess'"),
        (nn.Linear(8, 8), X, {"loss_fn": lambda output: 3.0}, "must be a tensor, got float"),
        (nn.Linear(8, 8), X, {"loss_fn": lambda output: output.detach().sum()}, "does not depend on any parameter"),
        (nn.LazyLinear(8), X, {}, "lazy parameters"),
        (nn.Identity(), X, {}, "does not depend on any parameter"),
        (nn.Identity(), X, {"method": "estimate"}, "no weight matrix"),
    ],
)
def test_what_cannot_be_used_is_refused_with_advice(model: Any, batch: Any, options: Any, says: str) -> None:
    with pytest.raises(flopwatch.InputError, match=says):
        flopwatch.count_flops(model, batch, **options)


@pytest.mark.requirement("R20")
def test_missing_labels_are_asked_for() -> None:
    architecture = BY_NAME["llama"]
    batch = architecture.batch(2, 8)
    del batch["labels"]

    with pytest.raises(flopwatch.InputError, match="put labels into the batch, or pass loss_fn"):
        flopwatch.count_flops(architecture.build(), batch)


def test_a_loss_function_stands_in_for_labels() -> None:
    architecture = BY_NAME["llama"]
    batch = architecture.batch(2, 8)
    with_labels = flopwatch.count_flops(architecture.build(), batch).model_flops
    del batch["labels"]

    count = flopwatch.count_flops(architecture.build(), batch, loss_fn=lambda output: output.logits.mean())

    assert count.model_flops == with_labels


@pytest.mark.parametrize("method", ["auto", "trace", "step"])
def test_a_model_that_raises_is_reported_with_its_own_words(method: Any) -> None:
    model = Broken()

    with pytest.raises(flopwatch.MeasurementError, match=r"RuntimeError.*the weather is bad"):
        flopwatch.count_flops(model, X, method=method)

    assert model.training
    assert model.layer.weight.grad is None
    assert torch.compiler.is_compiling() is False


def test_a_row_of_padding_alone_is_refused() -> None:
    architecture = BY_NAME["llama"]
    batch = architecture.batch(2, 8)
    batch["attention_mask"][1] = 0

    with pytest.raises(flopwatch.InputError, match="row 1 padding"):
        flopwatch.count_flops(architecture.build(), batch)


@pytest.mark.parametrize(
    ("flops", "seconds", "peak"),
    [
        (0, 1, 1),
        (-1, 1, 1),
        (1, 0, 1),
        (1, float("nan"), 1),
        (1, 1, float("inf")),
        ("1", 1, 1),
        (1, 1, None),
        (1, True, 1),
    ],
)
def test_mfu_of_nonsense_is_refused(flops: Any, seconds: Any, peak: Any) -> None:
    with pytest.raises(flopwatch.InputError, match="must be a positive finite number"):
        flopwatch.calculate_mfu(flops, seconds, peak)
