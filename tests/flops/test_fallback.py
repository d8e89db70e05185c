"""What happens when fake tensors cannot follow a model: another way, and a note that says so."""

from typing import Literal

import pytest
import torch
from torch import nn

import flopwatch

BATCH = torch.randn(4, 8)


class NeedsValues(nn.Module):
    """Branches on an activation, so its control flow needs real numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.other = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.layer(x)
        return self.other(hidden) if hidden.norm() > 0 else hidden


@pytest.mark.requirement("R20")
def test_a_model_that_needs_values_is_counted_on_a_real_step() -> None:
    count = flopwatch.count_flops(NeedsValues(), BATCH)

    assert count.method == "step"
    assert count.model_flops == 2 * 4 * 8 * 8 * (2 + 1 + 2)  # forward twice, dX once, dW twice
    assert "one real step" in count.notes[0]
    assert "needs the value of an activation" in count.notes[0]


def test_without_weights_it_is_estimated() -> None:
    count = flopwatch.count_flops(NeedsValues().to("meta"), BATCH)

    assert count.method == "estimate"
    assert "meta device" in count.notes[0]
    assert count.coverage is None


def test_asking_for_a_trace_gets_a_trace_or_an_error() -> None:
    with pytest.raises(flopwatch.UntraceableError, match="needs the value of an activation"):
        flopwatch.count_flops(NeedsValues(), BATCH, method="trace")
    with pytest.raises(flopwatch.InputError, match="meta device"):
        flopwatch.count_flops(NeedsValues().to("meta"), BATCH, method="step")


HIDDEN: dict[str, nn.Linear] = {}


def test_a_module_in_a_closure_is_followed() -> None:
    """As TRL's fused head does: a function on the instance that holds the live model's own forward."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    own_forward = model.forward
    model.forward = lambda x: 2 * own_forward(x)

    count = flopwatch.count_flops(model, BATCH)

    assert count.method == "trace"
    assert count.model_flops == 2 * 4 * 8 * 8 * 5
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("method", ["trace", "step"])
def test_hidden_gradients_are_left_alone(method: Literal["trace", "step"]) -> None:
    """A parameter the model does not list, reached through a global, keeps its gradient."""
    hidden = HIDDEN["layer"] = nn.Linear(8, 8)
    hidden.weight.grad = torch.full_like(hidden.weight, 0.25)

    class Sneaky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return HIDDEN["layer"](self.layer(x))

    count = flopwatch.count_flops(Sneaky(), BATCH, method=method)

    assert count.model_flops == 2 * 4 * 8 * 8 * 5
    assert torch.equal(hidden.weight.grad, torch.full_like(hidden.weight, 0.25))
    assert hidden.bias.grad is None


def test_a_function_of_the_users_is_taken_at_its_word() -> None:
    count = flopwatch.count_flops(nn.Linear(8, 8), BATCH, method=lambda batch: 1000 * batch.shape[0])

    assert (count.model_flops, count.method) == (4000, "flops_fn")
    with pytest.raises(flopwatch.InputError, match="positive finite number"):
        flopwatch.count_flops(nn.Linear(8, 8), BATCH, method=lambda batch: 0)


def test_a_model_that_names_its_device_is_kept_off_it() -> None:
    class Pinned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8, device="meta")
            self.table = torch.ones(8, device="meta")  # a plain attribute, neither parameter nor buffer

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) + torch.arange(8, device="meta") + self.table

    count = flopwatch.count_flops(Pinned(), BATCH)

    assert (count.method, count.model_flops) == ("trace", 2 * 2 * 4 * 8 * 8)
