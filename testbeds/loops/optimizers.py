"""Loops in which the optimizer does more than a step: closures, second passes, products of its own."""

import threading

import torch
from torch import nn
from torch.nn import functional

from testbeds.loops.audit import STEPS, Audit
from testbeds.loops.models import WIDTH, mlp, sgd


def alternating_optimizers(audit: Audit) -> list[nn.Module]:
    """Body and head are trained in turns, each with an optimizer of its own."""
    model = nn.Sequential(mlp(WIDTH, 12, 6), nn.Linear(6, 3))
    optimizers = sgd(model[0]), sgd(model[1])
    audit.watch(model)
    for number in range(STEPS):
        x = torch.randn(5, WIDTH)
        with audit.step(x):
            model(x).square().mean().backward()
            optimizers[number % 2].step()
            model.zero_grad()
    return [model]


def lbfgs(audit: Audit) -> list[nn.Module]:
    """L-BFGS calls its closure as often as it wants."""
    model = mlp(WIDTH, 6, 2)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    audit.watch(model)
    for _ in range(8):
        x, y = torch.randn(5, WIDTH), torch.randn(5, 2)

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            optimizer.zero_grad()
            loss = functional.mse_loss(model(x), y)
            loss.backward()
            return loss

        with audit.step((x, y)) as step:
            step.log(loss=optimizer.step(closure))
    return [model]


def sam(audit: Audit) -> list[nn.Module]:
    """SAM: the gradient is taken where the loss is worst nearby, so each step has two passes."""
    model = mlp(WIDTH, 12, 4)
    optimizer = sgd(model)
    audit.watch(model)
    for _ in range(STEPS):
        x, y = torch.randn(5, WIDTH), torch.randint(0, 4, (5,))
        with audit.step((x, y)) as step:
            loss = functional.cross_entropy(model(x), y)
            loss.backward()
            moves = [0.05 * weight.grad for weight in model.parameters()]
            with torch.no_grad():
                torch._foreach_add_(list(model.parameters()), moves)
            optimizer.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            with torch.no_grad():
                torch._foreach_sub_(list(model.parameters()), moves)
            optimizer.step()
            optimizer.zero_grad()
            step.log(loss=loss)
    return [model]


class Muon(torch.optim.Optimizer):
    """Gradients are made orthogonal by Newton-Schulz, which is products of matrices."""

    def __init__(self, weights: list[nn.Parameter]) -> None:
        super().__init__(weights, {"lr": 0.01})

    @torch.no_grad()
    def step(self) -> None:
        for weight in self.param_groups[0]["params"]:
            moved = weight.grad / (weight.grad.norm() + 1e-7)
            for _ in range(5):
                square = moved @ moved.T
                moved = 3.4445 * moved + (-4.775 * square + 2.0315 * square @ square) @ moved
            weight.sub_(moved, alpha=0.01)


def muon(audit: Audit) -> list[nn.Module]:
    """Muon for the matrices, SGD for the rest."""
    model = mlp(WIDTH, 12, 4)
    matrices = Muon([weight for weight in model.parameters() if weight.dim() == 2])
    rest = torch.optim.SGD([weight for weight in model.parameters() if weight.dim() == 1], lr=0.01)
    audit.watch(model)
    for _ in range(STEPS):
        x = torch.randn(6, WIDTH)
        with audit.step(x):
            model(x).square().mean().backward()
            matrices.step()
            rest.step()
            model.zero_grad()
    return [model]


def torch_muon(audit: Audit) -> list[nn.Module]:
    """`torch.optim.Muon`, whose Newton-Schulz runs in bf16."""
    model = nn.Sequential(nn.Linear(WIDTH, 12, bias=False), nn.Tanh(), nn.Linear(12, 4, bias=False))
    optimizer = torch.optim.Muon(model.parameters(), lr=0.01)
    audit.watch(model)
    for _ in range(STEPS):
        x = torch.randn(6, WIDTH)
        with audit.step(x):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [model]


def in_another_thread(audit: Audit) -> list[nn.Module]:
    """Forward and backward pass run in a thread of their own."""
    model = mlp(WIDTH, 12, 4)
    optimizer = sgd(model)
    audit.watch(model)
    for number in range(STEPS):
        x = torch.randn(6, WIDTH)

        def work(x: torch.Tensor = x, number: int = number) -> None:
            with audit.counted(number):  # a mode is seen by its own thread only
                model(x).square().mean().backward()

        with audit.step(x):
            worker = threading.Thread(target=work)
            worker.start()
            worker.join()
            optimizer.step()
            optimizer.zero_grad()
    return [model]


def skipped_steps(audit: Audit) -> list[nn.Module]:
    """A step whose loss is not finite is thrown away before its backward pass."""
    model = mlp(WIDTH, 12, 4)
    optimizer = sgd(model)
    audit.watch(model)
    for number in range(STEPS):
        x = torch.randn(6, WIDTH)
        with audit.step(x):
            loss = model(x).square().mean()
            if number % 5 != 3:
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    return [model]


def raising_steps(audit: Audit) -> list[nn.Module]:
    """Now and then the body of a step raises, as when memory runs out; the loop goes on."""
    model = mlp(WIDTH, 12, 4)
    optimizer = sgd(model)
    audit.watch(model)
    for number in range(STEPS):
        x = torch.randn(6, WIDTH)
        try:
            with audit.step(x):
                loss = model(x).square().mean()
                if number % 4 == 2:
                    raise MemoryError
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        except MemoryError:
            optimizer.zero_grad()
    return [model]


def mixed_precision(audit: Audit) -> list[nn.Module]:
    """bf16 autocast around the forward pass."""
    model = mlp(WIDTH, 16, 4)
    optimizer = sgd(model)
    audit.watch(model)
    for _ in range(STEPS):
        x, y = torch.randn(6, WIDTH), torch.randint(0, 4, (6,))
        with audit.step((x, y)) as step:
            with torch.autocast("cpu", torch.bfloat16):
                loss = functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step.log(loss=loss.item())
    return [model]


def per_sample_gradients(audit: Audit) -> list[nn.Module]:
    """Gradients of every sample by `vmap(grad(...))`, clipped one by one, as private training does it."""
    model = mlp(WIDTH, 6, 2)
    optimizer = sgd(model)
    audit.watch(model)

    def loss_of(weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, weights, (x[None],)).square().mean()

    for _ in range(STEPS):
        x = torch.randn(5, WIDTH)
        with audit.step(x):
            weights = {name: weight.detach() for name, weight in model.named_parameters()}
            grads = torch.func.vmap(torch.func.grad(loss_of), in_dims=(None, 0))(weights, x)
            for name, weight in model.named_parameters():
                weight.grad = grads[name].clamp(-1, 1).mean(0)
            optimizer.step()
            optimizer.zero_grad()
    return [model]
