"""What the loops of this folder share: how they are listed, and the plainest of them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from testbeds.stateful.doors import STEPS, Monitored, Plain
from testbeds.stateful.observed import Kept

RunLoop = Callable[[Plain | Monitored], Kept]

LOOPS: dict[str, RunLoop] = {}
"""By name. A loop is given a door, trains, and returns what it leaves."""


def stateful(loop: RunLoop) -> RunLoop:
    """Add it to the list."""
    assert loop.__name__ not in LOOPS
    LOOPS[loop.__name__] = loop
    return loop


def rows(number: int) -> torch.Tensor:
    """The batch of most loops."""
    return torch.randn(4, 8)


def output(model: nn.Module, batch: Any) -> torch.Tensor:
    """The loss of models that compute it themselves."""
    return model(batch)


def sgd(model: nn.Module, rate: float = 0.05) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=rate)


def train(
    run: Plain | Monitored,
    model: nn.Module,
    loss_of: Callable[[nn.Module, Any], torch.Tensor] = output,
    batch_of: Callable[[int], Any] = rows,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    steps: int = STEPS,
) -> torch.optim.Optimizer:
    """The ordinary loop. It prints the loss of every fourth step."""
    optimizer = optimizer if optimizer is not None else sgd(model)
    run.watch(model)
    for number in range(steps):
        batch = batch_of(number)
        with run.step(batch) as step:
            loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step.log(loss=loss)
        if number % 4 == 3:
            print(number, loss.item())
    return optimizer
