"""Loops that run more outside the watched model on some steps than on others, which autograd does not count."""

import copy
from collections.abc import Container

import torch
from torch import nn
from torch.nn import functional

from testbeds.loops.audit import STEPS, Audit
from testbeds.loops.models import WIDTH, TinyGPT, ids, mlp, sgd


def teacher_every_tenth_step(audit: Audit) -> list[nn.Module]:
    """A teacher is asked on the first step and then every tenth, otherwise its last answer is used."""
    return _teacher(audit, [number for number in range(80) if number % 10 == 0], 80)


def teacher_every_fiftieth_step(audit: Audit) -> list[nn.Module]:
    """A teacher is asked every fiftieth step only: the last of a window, never a step that is always counted."""
    return _teacher(audit, [49, 99, 149, 199, 249], 256)


def teacher_in_the_second_half(audit: Audit) -> list[nn.Module]:
    """A teacher joins between two steps that are always counted, and stays."""
    return _teacher(audit, range(13, 28), 28)


def teacher_once(audit: Audit) -> list[nn.Module]:
    """A teacher is asked a single time, late."""
    return _teacher(audit, [23], 28)


def _teacher(audit: Audit, asked: Container[int], steps: int) -> list[nn.Module]:
    student, teacher = mlp(WIDTH, 8, 4), mlp(WIDTH, 32, 4)
    optimizer = sgd(student)
    audit.watch(student)
    x, wanted = torch.randn(6, WIDTH), torch.zeros(6, 4)
    for number in range(steps):
        with audit.step(x):
            if number in asked:
                with torch.no_grad():
                    wanted = teacher(x)
            functional.mse_loss(student(x), wanted).backward()
            optimizer.step()
            optimizer.zero_grad()
    return [student]


def average_by_functional_call(audit: Audit) -> list[nn.Module]:
    """From the tenth step on the average of the weights is asked through `functional_call` on a module outside."""
    model = mlp(WIDTH, 12, 4)
    shell = copy.deepcopy(model)
    average = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    optimizer = sgd(model)
    audit.watch(model)
    for number in range(STEPS + 4):
        x = torch.randn(6, WIDTH)
        with audit.step(x) as step:
            wanted = torch.zeros(6, 4)
            if number >= 9:
                with torch.no_grad():
                    wanted = torch.func.functional_call(shell, average, (x,))
            loss = functional.mse_loss(model(x), wanted)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for name, weight in model.named_parameters():
                    average[name].lerp_(weight, 0.1)
            step.log(loss=loss)
    return [model]


class Reward(nn.Module):
    """A reward model that is asked through a method of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = TinyGPT(blocks=1)
        self.requires_grad_(False)

    def score(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.body.head(self.body.embedding(tokens)).mean((1, 2))


def reward_by_a_method(audit: Audit) -> list[nn.Module]:
    """A frozen reward model under `inference_mode` joins late, and is not called but asked through a method."""
    policy, reward = TinyGPT(blocks=1), Reward()
    optimizer = sgd(policy)
    audit.watch(policy)
    for number in range(STEPS + 4):
        tokens = ids(3, 6)
        with audit.step(tokens) as step:
            factor = torch.ones(3)
            if number >= 9:
                with torch.inference_mode():
                    factor = reward.score(tokens)
                factor = factor.clone()
            likelihood = policy(tokens)[0].log_softmax(-1).mean((1, 2))
            loss = -(factor * likelihood).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step.log(loss=loss)
    return [policy]


def frozen_teacher_with_gradients_on(audit: Audit) -> list[nn.Module]:
    """A teacher whose weights are frozen joins late, outside of `no_grad`: autograd records nothing of it."""
    student, teacher = mlp(WIDTH, 8, 4), mlp(WIDTH, 32, 4).requires_grad_(False)
    optimizer = sgd(student)
    audit.watch(student)
    for number in range(STEPS + 4):
        x = torch.randn(6, WIDTH)
        with audit.step(x):
            wanted = teacher(x) if number >= 9 else torch.zeros(6, 4)
            functional.mse_loss(student(x), wanted).backward()
            optimizer.step()
            optimizer.zero_grad()
    return [student]


def teacher_that_widens_inside(audit: Audit) -> list[nn.Module]:
    """A layer deep inside a teacher is replaced by a wider one: the teacher is called as before."""
    student, teacher = mlp(WIDTH, 8, 4), nn.Sequential(mlp(WIDTH, 8, WIDTH), nn.Linear(WIDTH, 4))
    optimizer = sgd(student)
    audit.watch(student)
    for number in range(STEPS + 4):
        if number == 9:
            teacher[0] = mlp(WIDTH, 24, WIDTH)
        x = torch.randn(6, WIDTH)
        with audit.step(x):
            with torch.no_grad():
                wanted = teacher(x)
            functional.mse_loss(student(x), wanted).backward()
            optimizer.step()
            optimizer.zero_grad()
    return [student]


def growing_queue(audit: Audit) -> list[nn.Module]:
    """Queries against a queue of keys outside of any module; the queue grows between steps that are always counted."""
    model = mlp(WIDTH, 12, 6)
    optimizer = sgd(model)
    audit.watch(model)
    for number in range(STEPS + 12):
        x, queue = torch.randn(4, WIDTH), torch.randn(8 if number < 13 else 8 + number % 4, 6)
        with audit.step(x) as step:
            loss = functional.cross_entropy(model(x) @ queue.T, torch.arange(4))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step.log(loss=loss)
    return [model]


def products_of_hand_over_masked_positions(audit: Audit) -> list[nn.Module]:
    """A head without a module, tied to the embedding, reads the masked positions, of which data decide the number."""
    body = nn.Sequential(nn.Embedding(20, WIDTH), nn.Linear(WIDTH, WIDTH))
    optimizer = sgd(body)
    audit.watch(body)
    for number in range(STEPS + 12):
        x, mask = torch.randint(0, 20, (2, 8)), torch.zeros(2, 8, dtype=torch.bool)
        mask[:, : (3 if number < 13 else 1 + number % 5)] = True
        with audit.step(x) as step:
            loss = functional.cross_entropy(body(x)[mask] @ body[0].weight.T, x[mask])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step.log(loss=loss)
    return [body]


def divergence_on_generated_text(audit: Audit) -> list[nn.Module]:
    """The policy writes, in lengths that differ from the tenth step on; a reference judges what it wrote."""
    policy = TinyGPT(blocks=1)
    reference = copy.deepcopy(policy).requires_grad_(False)
    optimizer = sgd(policy)
    audit.watch(policy)
    for number in range(STEPS + 4):
        tokens = ids(2, 3)
        with audit.step(tokens) as step:
            with torch.no_grad():
                for _ in range(2 if number < 9 else 1 + number % 3):
                    tokens = torch.cat([tokens, policy(tokens)[0][:, -1:].argmax(-1)], 1)
                expected = reference(tokens)[0].log_softmax(-1)
            found = policy(tokens)[0].log_softmax(-1)
            loss = functional.kl_div(found, expected, log_target=True)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step.log(loss=loss)
    return [policy]


class Picky(nn.Module):
    """Raises when an object outside says so."""

    def __init__(self, refused: list[bool]) -> None:
        super().__init__()
        self.body = mlp(WIDTH, 8, 4)
        self.ask = lambda: refused.pop() if refused else False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.ask():
            raise ValueError("refused")
        return self.body(x)


def teacher_after_a_failed_call(audit: Audit) -> list[nn.Module]:
    """The model raises inside a step; the loop catches the error, calls a teacher, and calls the model again."""
    refused: list[bool] = []
    model, teacher = Picky(refused), mlp(WIDTH, 32, 4)
    optimizer = sgd(model)
    audit.watch(model)
    for number in range(STEPS + 4):
        x = torch.randn(6, WIDTH)
        refused[:] = [True] if number in (6, 9, 11) else []
        with audit.step(x):
            try:
                found = model(x)
            except ValueError:
                with torch.no_grad():
                    wanted = teacher(x)
                found = model(x) - wanted
            found.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [model]


def products_of_hand_without_gradients(audit: Audit) -> list[nn.Module]:
    """A product outside of any module and without gradients joins between two steps that are counted."""
    model, bank = mlp(WIDTH, 12, 6), torch.randn(6, 30)
    optimizer = sgd(model)
    audit.watch(model)
    for number in range(STEPS + 12):
        x = torch.randn(4, WIDTH)
        with audit.step(x) as step:
            found = model(x)
            weights = torch.ones(4, 1)
            if number >= 13:
                weights = (found.detach() @ bank).softmax(-1).amax(-1, keepdim=True)
            loss = (weights * found.square()).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step.log(loss=loss)
    return [model]


def growing_queue_without_a_loss(audit: Audit) -> list[nn.Module]:
    """The product with a queue outside of any module grows between steps that are counted; no loss is logged."""
    model = mlp(WIDTH, 12, 6)
    optimizer = sgd(model)
    audit.watch(model)
    for number in range(STEPS + 12):
        x, queue = torch.randn(4, WIDTH), torch.randn(8 if number < 13 else 12, 6)
        with audit.step(x):
            functional.cross_entropy(model(x) @ queue.T, torch.arange(4)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return [model]
