"""Wrong input gets an error that says what to do, never a wrong number, never a changed model."""

from typing import Any

import pytest
import torch
from torch import nn

import flopwatch
from testbeds.architectures import BY_NAME

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
        (nn.Linear(8, 8), torch.empty(0, 8), {}, r"the batch is empty: its tensor '0' has the shape \(0, 8\)"),
        (nn.Linear(8, 8), {0: X}, {}, "keys of a batch must be names"),
        (nn.Linear(8, 8), X, {"attention": "half"}, "'full' or 'causal', got 'half'"),
        (nn.Linear(8, 8), X, {"method": "guess"}, "method must be one of .* got 'guess'"),
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


@pytest.mark.slow
@pytest.mark.requirement("R20")
def test_without_labels_the_loss_is_made_of_what_the_model_returns() -> None:
    architecture = BY_NAME["llama"]
    batch = architecture.batch(2, 8)
    expected = flopwatch.count_flops(architecture.build(), batch).model_flops
    del batch["labels"]

    assert flopwatch.count_flops(architecture.build(), batch).model_flops == expected


def test_a_model_that_returns_nothing_to_train_on_is_asked_for_a_loss() -> None:
    class Numbers(nn.Linear):
        def forward(self, x: torch.Tensor) -> dict[str, float]:  # type: ignore[override]
            super().forward(x)
            return {"accuracy": 0.5}

    with pytest.raises(flopwatch.InputError, match="put labels into the batch, or pass loss_fn"):
        flopwatch.count_flops(Numbers(8, 8), X)


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

    with pytest.raises(flopwatch.InputError, match="row 1 as padding"):
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


@pytest.mark.slow
def test_a_tokenizers_batch_is_a_batch() -> None:
    from transformers import BatchEncoding

    architecture = BY_NAME["llama"]
    batch = architecture.batch(2, 8)

    count = flopwatch.count_flops(architecture.build(), BatchEncoding(batch))

    assert count == flopwatch.count_flops(architecture.build(), batch)


def test_a_loader_is_not_a_batch() -> None:
    loader = torch.utils.data.DataLoader([X, X])

    with pytest.raises(flopwatch.InputError, match=r"next\(iter\(loader\)\)"):
        flopwatch.count_flops(nn.Linear(8, 8), loader)


def test_the_first_of_a_tuple_is_the_loss() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8, bias=False)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            out = self.layer(x)
            return out.mean(), out

    assert flopwatch.count_flops(Pair(), X).model_flops == 2 * 2 * 4 * 8 * 8


@pytest.mark.parametrize("method", ["trace", "step"])
def test_an_input_that_asks_for_a_gradient_gets_one(method: Any) -> None:
    count = flopwatch.count_flops(nn.Linear(8, 8), X.clone().requires_grad_(), method=method)

    assert count.backward_flops == 2 * count.forward_flops


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("method", ["trace", "step"])
def test_a_count_without_grad_mode_is_the_same(mode: Any, method: Any) -> None:
    layer = nn.Linear(8, 8)
    with mode():
        count = flopwatch.count_flops(layer, X, method=method)

    assert count.model_flops == 2 * 2 * 4 * 8 * 8


def _states(model: Any) -> list[str]:
    return [
        str(model.torch_generator.get_state().tolist()),
        str(model.numpy_generator.bit_generator.state),
        str(model.python_generator.getstate()),
    ]
