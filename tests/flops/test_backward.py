"""What runs in a backward pass, and what of it is needed."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry

import flopwatch


class BareCounter(TorchDispatchMode):
    """torch's own formulas without its module tracker, which cannot follow a gradient taken inside a forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func._overloadpacket)
        self.flops += formula(*args, **(kwargs or {}), out_val=out) if formula else 0
        return out


def true_flops(model: nn.Module, x: torch.Tensor) -> int:
    with BareCounter() as counter:
        model(x).sum().backward()
    model.zero_grad()
    return counter.flops


class FrozenLstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.lstm, self.after = nn.Linear(16, 16), nn.LSTM(16, 24), nn.Linear(24, 3)
        self.lstm.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.after(self.lstm(self.before(x))[0])
        return out


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
def test_frozen_recurrent_weights_have_no_gradient_to_pay_for() -> None:
    model, x = FrozenLstm(), torch.randn(5, 3, 16)
    with torch.backends.mkldnn.flags(enabled=False):  # torch then runs the products one by one, and only those needed
        truth = true_flops(model, x)

    count = flopwatch.count_flops(model, x)

    assert count.model_flops == truth


class Forces(nn.Module):
    """An interatomic potential: what is trained is a gradient taken in the forward pass."""

    def __init__(self, checkpointed: bool, as_function: bool = False) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
        self.head, self.checkpointed, self.as_function = nn.Linear(32, 1), checkpointed, as_function

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        first, last = self.body[0], self.body[2]
        return nn.functional.linear(nn.functional.linear(x, first.weight).tanh(), last.weight).tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        run = self.hidden if self.as_function else self.body
        energy = self.head(checkpoint(run, x, use_reentrant=False) if self.checkpointed else run(x))
        (forces,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return forces


def test_a_checkpoint_inside_a_gradient_taken_in_the_forward_pass_is_recomputation() -> None:
    x = torch.randn(16, 8)

    for as_function in (False, True):
        count = flopwatch.count_flops(Forces(True, as_function), x)

        assert count.model_flops == true_flops(Forces(False, as_function), x)
        assert count.hardware_flops == true_flops(Forces(True, as_function), x)
