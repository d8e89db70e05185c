"""Short trainings without a line of flopwatch, each of which shows rows of the table in `automatic/watcher.py`.

python testbeds/unchanged/short.py NAME
"""

import sys

import torch
from torch import nn

TOO_MANY = 1002


def _model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def _pass(model: nn.Module, calls: int = 1) -> None:
    for _ in range(calls):
        model(torch.randn(4, 8)).square().mean().backward()


def _evaluate(model: nn.Module, batches: int, criterion: nn.Module | None = None) -> None:
    model.eval()
    with torch.no_grad():
        for _ in range(batches):
            output = model(torch.randn(4, 8))
            if criterion is not None:
                criterion(output, torch.zeros(4, 8))
    model.train()


def _step_in_backward(optimizer: torch.optim.Optimizer) -> None:
    """When the gradient of its first weight has arrived, which is the last one of the pass."""

    def step(_: torch.Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad()

    optimizer.param_groups[0]["params"][0].register_post_accumulate_grad_hook(step)


def calls_before_an_optimizer() -> None:
    model = _model()
    model(torch.randn(4, 8))
    optimizer = _sgd(model)
    for _ in range(5):
        _pass(model)
        optimizer.step()


def one_evaluation() -> None:
    """Of one batch, after which the first step begins."""
    model = _model()
    optimizer = _sgd(model)
    _evaluate(model, 1)
    for _ in range(5):
        _pass(model)
        optimizer.step()


def several_evaluations() -> None:
    model = _model()
    optimizer = _sgd(model)
    _evaluate(model, 3)
    for _ in range(5):
        _pass(model)
        optimizer.step()


def frozen_teacher() -> None:
    model, teacher = _model(), _model().requires_grad_(False)
    optimizer = _sgd(model)
    for _ in range(5):
        batch = torch.randn(4, 8)
        with torch.no_grad():
            aim = teacher(batch)
        (model(batch) - aim).square().mean().backward()
        optimizer.step()


def evaluation_then_teacher() -> None:
    model, teacher, criterion = _model(), _model().eval().requires_grad_(False), nn.MSELoss()
    optimizer = _sgd(model)
    _evaluate(model, 3, criterion)
    for _ in range(5):
        batch = torch.randn(4, 8)
        with torch.no_grad():
            aim = teacher(batch)
            criterion(aim, batch)  # a number for the log
        criterion(model(batch), aim).backward()
        optimizer.step()
        with torch.no_grad():
            model(batch)


def more_calls_than_a_step_has() -> None:
    model = _model()
    optimizer = _sgd(model)
    _pass(model, calls=TOO_MANY)
    for _ in range(4):
        optimizer.step()
        _pass(model)


def many_calls_and_in_backward() -> None:
    model = _model()
    optimizer = _sgd(model)
    for _ in range(TOO_MANY):
        model(torch.randn(4, 8))
    _step_in_backward(optimizer)
    _pass(model, calls=4)


def one_in_backward() -> None:
    """An optimizer that steps when the last gradient has arrived."""
    model = _model()
    _step_in_backward(_sgd(model))
    _pass(model, calls=5)


def one_for_each_weight() -> None:
    """Optimizers that step inside of the backward pass, one for each weight."""
    model = _model()
    optimizers = [torch.optim.SGD([weight], lr=0.01) for weight in model.parameters()]
    for optimizer in optimizers:
        _step_in_backward(optimizer)
    _pass(model, calls=5)


def two_backward_passes() -> None:
    """As before, with two backward passes for each call of the model."""
    model = _model()
    optimizers = [torch.optim.SGD([weight], lr=0.01) for weight in model.parameters()]
    for optimizer in optimizers:
        _step_in_backward(optimizer)
    for _ in range(5):
        _pass(model)
        torch.cat([weight.flatten() for weight in model.parameters()]).square().sum().backward()


def in_backward_without_a_call() -> None:
    weight = nn.Parameter(torch.randn(8, 8))
    _step_in_backward(torch.optim.SGD([weight], lr=0.01))
    for _ in range(5):
        (torch.randn(4, 8) @ weight).square().mean().backward()


class _NotSearchable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return batch @ self.weight

    def children(self):  # type: ignore[no-untyped-def]
        raise RuntimeError("this module does not tell what is in it")


def model_that_cannot_be_searched() -> None:
    model = _NotSearchable()
    optimizer = _sgd(model)
    for _ in range(3):
        _pass(model)
        optimizer.step()


SHORT = {
    function.__name__: function
    for function in (
        calls_before_an_optimizer,
        one_evaluation,
        several_evaluations,
        frozen_teacher,
        evaluation_then_teacher,
        more_calls_than_a_step_has,
        many_calls_and_in_backward,
        one_in_backward,
        one_for_each_weight,
        two_backward_passes,
        in_backward_without_a_call,
        model_that_cannot_be_searched,
    )
}

if __name__ == "__main__":
    SHORT[sys.argv[1]]()
