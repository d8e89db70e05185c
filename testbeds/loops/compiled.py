"""Loops with `torch.compile`."""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from testbeds.loops.audit import STEPS, Audit
from testbeds.loops.models import WIDTH, TinyGPT, ids, mlp, sgd


def compiled_model(audit: Audit) -> list[nn.Module]:
    """`model = torch.compile(model)`; the compiled model is monitored."""
    model = TinyGPT()
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = sgd(model)
    audit.watch(compiled)
    for _ in range(STEPS):
        x, y = ids(2, 6), ids(2, 6)
        with audit.step((x, y)) as step:
            _, loss = compiled(x, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step.log(loss=loss)
    return [model]


def compiled_in_place(audit: Audit) -> list[nn.Module]:
    """`model.compile()`."""
    model = TinyGPT()
    model.compile(backend="eager")
    optimizer = sgd(model)
    audit.watch(model)
    for number in range(STEPS):
        x, y = ids(2, 6 + number % 2), ids(2, 6 + number % 2)
        with audit.step((x, y)) as step:
            _, loss = model(x, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step.log(loss=loss)
    return [model]


def _compiled_step(
    audit: Audit, work: Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]
) -> list[nn.Module]:
    model = mlp(WIDTH, 12, 4)
    optimizer = sgd(model)
    audit.watch(model)
    compiled = torch.compile(lambda x, y: work(model, x, y), backend="aot_eager")
    for _ in range(STEPS):
        x, y = torch.randn(6, WIDTH), torch.randint(0, 4, (6,))
        with audit.step((x, y)) as step:
            loss = compiled(x, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step.log(loss=loss)
    return [model]


def compiled_step(audit: Audit) -> list[nn.Module]:
    """The step function is compiled, the model is called inside."""
    return _compiled_step(audit, lambda model, x, y: functional.cross_entropy(model(x), y))


def compiled_step_with_two_passes(audit: Audit) -> list[nn.Module]:
    """The compiled function calls the model twice, and compares all pairs."""

    def work(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (model(x) @ model(x + 1).T).square().mean()

    return _compiled_step(audit, work)


def compiled_part(audit: Audit) -> list[nn.Module]:
    """Only the blocks of the model are compiled, as torchtitan does it."""
    model = TinyGPT()
    for block in model.blocks:
        block.compile(backend="aot_eager")
    optimizer = sgd(model)
    audit.watch(model)
    for _ in range(STEPS):
        x, y = ids(2, 6), ids(2, 6)
        with audit.step((x, y)) as step:
            _, loss = model(x, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step.log(loss=loss)
    return [model]


def compiled_beside_a_teacher(audit: Audit) -> list[nn.Module]:
    """A compiled student, an eager teacher."""
    student, teacher = mlp(WIDTH, 8, 4), mlp(WIDTH, 32, 4)
    compiled = torch.compile(student, backend="eager")
    optimizer = sgd(student)
    audit.watch(compiled)
    for _ in range(STEPS):
        x = torch.randn(6, WIDTH)
        with audit.step(x) as step:
            with torch.no_grad():
                wanted = teacher(x)
            loss = functional.mse_loss(compiled(x), wanted)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step.log(loss=loss)
    return [student]
