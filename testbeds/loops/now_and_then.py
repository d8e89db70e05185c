"""Loops that do something besides on some steps only: what one step ran says nothing about the next."""

import torch
from torch import nn
from torch.nn import functional

from testbeds.loops.audit import STEPS, Audit
from testbeds.loops.models import WIDTH, mlp, sgd


def lazy_regulariser(audit: Audit) -> list[nn.Module]:
    """StyleGAN2's lazy regularisation: the gradient penalty is computed on every third step only."""
    critic = mlp(WIDTH, 12, 1)
    optimizer = sgd(critic)
    audit.watch(critic)
    for number in range(STEPS):
        x = torch.randn(6, WIDTH).requires_grad_()
        with audit.step(x) as step:
            scores = critic(x)
            loss = scores.square().mean()
            if number % 3 == 0:
                (slope,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
                loss = loss + slope.square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step.log(loss=loss)
    return [critic]


def critic_trained_more_often(audit: Audit) -> list[nn.Module]:
    """WGAN: the critic is monitored and trained on every step, the generator on every third."""
    generator, critic = mlp(4, 12, WIDTH), mlp(WIDTH, 12, 1)
    of_generator, of_critic = sgd(generator), sgd(critic)
    audit.watch(critic)
    for number in range(STEPS):
        real = torch.randn(6, WIDTH)
        with audit.step(real):
            of_critic.zero_grad()
            (critic(generator(torch.randn(6, 4)).detach()).mean() - critic(real).mean()).backward()
            of_critic.step()
            if number % 3 == 0:
                of_generator.zero_grad()
                (-critic(generator(torch.randn(6, 4))).mean()).backward()
                of_generator.step()
    return [generator, critic]


class Preconditioned(torch.optim.SGD):
    """As Shampoo and SOAP: gradients go through matrices that are made anew only now and then."""

    def __init__(self, weights: list[nn.Parameter], every: int) -> None:
        super().__init__(weights, lr=0.01)
        self.every, self.steps, self.left = every, 0, {}

    @torch.no_grad()
    def step(self) -> None:
        for weight in (weight for group in self.param_groups for weight in group["params"] if weight.dim() == 2):
            if self.steps % self.every == 0:
                product = weight.grad @ weight.grad.T
                self.left[weight] = torch.eye(len(weight)) - 0.1 * product / (1 + product.norm())
            weight.grad = self.left[weight] @ weight.grad
        self.steps += 1
        super().step()


def preconditioner_now_and_then(audit: Audit) -> list[nn.Module]:
    """A second-order optimizer that makes its matrices on every third step."""
    model = mlp(WIDTH, 12, 4)
    optimizer = Preconditioned(list(model.parameters()), every=3)
    audit.watch(model)
    for _ in range(STEPS):
        x = torch.randn(6, WIDTH)
        with audit.step(x):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [model]


def teacher_now_and_then(audit: Audit) -> list[nn.Module]:
    """A teacher is called on every third step only; otherwise its last output is used."""
    student, teacher = mlp(WIDTH, 8, 4), mlp(WIDTH, 32, 4)
    optimizer = sgd(student)
    audit.watch(student)
    x = torch.randn(6, WIDTH)
    for number in range(STEPS):
        with audit.step(x):
            if number % 3 == 0:
                with torch.no_grad():
                    wanted = teacher(x)
            functional.mse_loss(student(x), wanted).backward()
            optimizer.step()
            optimizer.zero_grad()
    return [student]


def late_second_loss(audit: Audit) -> list[nn.Module]:
    """A second loss on the same outputs joins after ten steps, outside the model."""
    model = mlp(WIDTH, 12, 6)
    optimizer = sgd(model)
    audit.watch(model)
    for number in range(2 * STEPS):
        x = torch.randn(5, WIDTH)
        with audit.step(x):
            found = model(x)
            loss = found.square().mean()
            if number >= 11:
                loss = loss + (found @ found.T).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return [model]


def teacher_after_warm_up(audit: Audit) -> list[nn.Module]:
    """A teacher joins after nine steps, without gradients and outside the watched student."""
    student, teacher = mlp(WIDTH, 8, 4), mlp(WIDTH, 32, 4)
    optimizer = sgd(student)
    audit.watch(student)
    for number in range(STEPS + 4):
        x = torch.randn(6, WIDTH)
        with audit.step(x):
            wanted = torch.zeros(6, 4)
            if number >= 9:
                with torch.no_grad():
                    wanted = teacher(x)
            functional.mse_loss(student(x), wanted).backward()
            optimizer.step()
            optimizer.zero_grad()
    return [student]


def masked_positions_outside(audit: Audit) -> list[nn.Module]:
    """A head outside the watched body reads the masked positions only, of which there are more or fewer."""
    body, head = nn.Sequential(nn.Embedding(20, WIDTH), nn.Linear(WIDTH, WIDTH)), nn.Linear(WIDTH, 20)
    optimizer = sgd(body, head)
    audit.watch(body)
    for number in range(STEPS + 4):
        x, mask = torch.randint(0, 20, (2, 8)), torch.zeros(2, 8, dtype=torch.bool)
        mask[:, : (3 if number < 6 else 1 + number % 5)] = True
        with audit.step(x) as step:
            loss = functional.cross_entropy(head(body(x)[mask]), x[mask])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step.log(loss=loss)
    return [body, head]


def growing_head_outside(audit: Audit) -> list[nn.Module]:
    """Class-incremental learning: a head outside the watched body is replaced by a wider one on the way."""
    body, head = mlp(WIDTH, 12, 6), nn.Linear(6, 3)
    optimizer = sgd(body, head)
    audit.watch(body)
    for number in range(STEPS + 4):
        if number == 9:
            head = nn.Linear(6, 9)
            optimizer = sgd(body, head)
        x = torch.randn(5, WIDTH)
        with audit.step(x) as step:
            loss = head(body(x)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step.log(loss=loss.item())
    return [body, head]


def evaluation_inside_a_step(audit: Audit) -> list[nn.Module]:
    """Now and then the model is evaluated inside of a step."""
    model = mlp(WIDTH, 12, 4)
    optimizer = sgd(model)
    audit.watch(model)
    for number in range(STEPS + 4):
        x = torch.randn(6, WIDTH)
        with audit.step(x):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if number % 5 == 3:
                model.eval()
                with torch.no_grad():
                    model(torch.randn(30, WIDTH))
                model.train()
    return [model]


def second_backward_now_and_then(audit: Audit) -> list[nn.Module]:
    """`backward(retain_graph=True)` first, on some steps."""
    model = mlp(WIDTH, 12, 4)
    optimizer = sgd(model)
    audit.watch(model)
    for number in range(STEPS + 4):
        x = torch.randn(6, WIDTH)
        with audit.step(x):
            loss = model(x).square().mean()
            if number in (5, 6, 7, 9):
                loss.backward(retain_graph=True)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return [model]


def trained_prompt(audit: Audit) -> list[nn.Module]:
    """From the sixth step on the model's input needs a gradient: a prompt before it is trained too."""
    model, prompt = mlp(WIDTH, 12, 4), nn.Parameter(torch.zeros(WIDTH))
    optimizer = sgd(model)
    audit.watch(model)
    for number in range(STEPS + 4):
        x = torch.randn(6, WIDTH) + (prompt if number >= 6 else 0)
        with audit.step(x):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [model]


class Switched:
    """Settings that are not the model's own."""

    cuts = False


class Cut(nn.Module):
    def __init__(self, settings: Switched) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 12), nn.Linear(12, 4)
        self.ask = lambda: settings.cuts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        return self.second(hidden.detach() if self.ask() else hidden)


def detached_now_and_then(audit: Audit) -> list[nn.Module]:
    """An object outside the model decides whether the gradient reaches the first layer."""
    settings = Switched()
    model = Cut(settings)
    optimizer = sgd(model)
    audit.watch(model)
    for number in range(STEPS + 4):
        settings.cuts = number in (5, 6, 7, 9, 11, 13)
        x = torch.randn(6, WIDTH)
        with audit.step(x):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [model]
