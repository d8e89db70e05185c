"""Loops whose backward pass, or whose arguments, differ from step to step in ways that autograd's operations hide."""

import torch
from torch import nn
from torch.nn import functional

from testbeds.loops.audit import Audit
from testbeds.loops.models import WIDTH, mlp, sgd

RARE = (9, 14, 19, 22)
"""None of them is counted as it runs because of its number."""


def skipped_after_freezing(audit: Audit) -> list[nn.Module]:
    """The first layer is frozen after the monitor has seen it trained; some steps skip their backward pass."""
    model = mlp(WIDTH, 12, 4)
    optimizer = sgd(model)
    audit.watch(model)
    next(model.parameters()).requires_grad_(False)
    for number in range(28):
        x = torch.randn(6, WIDTH)
        with audit.step(x):
            loss = model(x).square().mean()
            if number not in RARE:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return [model]


class WithUnusedToken(nn.Module):
    """Its first parameter is for another kind of training, and never gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.mask_token = nn.Parameter(torch.zeros(WIDTH))
        self.body = mlp(WIDTH, 12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.body(x)
        return found


def skipped_with_an_unused_parameter(audit: Audit) -> list[nn.Module]:
    """Some steps skip their backward pass, which the model's first parameter does not show."""
    model = WithUnusedToken()
    optimizer = sgd(model)
    audit.watch(model)
    for number in range(28):
        x = torch.randn(6, WIDTH)
        with audit.step(x):
            loss = model(x).square().mean()
            if number not in RARE:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return [model]


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.actor, self.critic = nn.Linear(WIDTH, 12), nn.Linear(12, 16), nn.Linear(12, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.body(x).relu()
        return self.actor(hidden), self.critic(hidden)


def heads_in_turns(audit: Audit) -> list[nn.Module]:
    """Both losses are computed on every step; one is trained at first, the other one later."""
    model = TwoHeads()
    optimizer = sgd(model)
    audit.watch(model)
    for number in range(28):
        x = torch.randn(6, WIDTH)
        with audit.step(x) as step:
            actor, critic = model(x)
            losses = actor.square().mean(), critic.square().mean()
            losses[number >= 13].backward()
            optimizer.step()
            optimizer.zero_grad()
            step.log(loss=losses[0].item())
    return [model]


def crops_in_a_list(audit: Audit) -> list[nn.Module]:
    """A teacher is given more and more crops in one list, without gradients."""

    class Teacher(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, WIDTH))

        def forward(self, crops: list[torch.Tensor]) -> torch.Tensor:
            return torch.stack([functional.linear(crop, self.weight) for crop in crops]).mean(0)

    model, teacher = mlp(WIDTH, 12, 4), Teacher()
    optimizer = sgd(model)
    audit.watch(model)
    for number in range(28):
        x = torch.randn(6, WIDTH)
        with audit.step(x):
            with torch.no_grad():
                wanted = teacher([x] * (2 if number < 13 else 3))
            functional.mse_loss(model(x), wanted).backward()
            optimizer.step()
            optimizer.zero_grad()
    return [model]


def function_with_another_closure(audit: Audit) -> list[nn.Module]:
    """The model gets a function as an argument; its code does not show which function it is."""

    class Given(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(WIDTH, 12), nn.Linear(12, 4)

        def forward(self, x: torch.Tensor, act: object) -> torch.Tensor:
            found: torch.Tensor = self.last(act(self.first(x)))  # type: ignore[operator]
            return found

    def activation(mix: torch.Tensor | None) -> object:
        return lambda x: x.relu() if mix is None else (x @ mix).relu()

    model, mix = Given(), torch.randn(12, 12)
    optimizer = sgd(model)
    audit.watch(model)
    for number in range(28):
        x = torch.randn(6, WIDTH)
        with audit.step(x):
            model(x, activation(mix if number >= 13 else None)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [model]
