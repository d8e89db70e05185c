"""Loops whose own course is the state: accumulation, schedules, closures, several models, stateful losses."""

import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional

from testbeds.stateful.doors import STEPS
from testbeds.stateful.loops import rows, sgd, stateful, train
from testbeds.stateful.observed import Kept, called


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 12), nn.Linear(12, 3)

    def forward(self, x):
        called(self)
        return self.second(self.first(x).relu())


def squares(model, batch):
    return model(batch).pow(2).mean()


@stateful
def accumulated_gradients(run):
    """Gradients of a growing number of micro-batches are accumulated."""
    model = Net()
    optimizer = sgd(model)
    run.watch(model)
    for number in range(STEPS):
        with run.step() as step:
            for _ in range(1 + number // 6):
                batch = rows(number)
                step.micro_batch(batch)
                loss = squares(model, batch)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step.log(loss=loss)
    return Kept([model], [optimizer])


class Accuracy:
    def __init__(self):
        self.right = self.seen = 0

    def __call__(self, logits, labels):
        self.right += int((logits.argmax(1) == labels).sum())
        self.seen += len(labels)


@stateful
def metric_that_counts(run):
    """A metric object is updated in the step; an evaluation every fifth step uses the same model."""
    model, metric, evaluated = Net(), Accuracy(), []

    def loss_of(model, batch):
        x, y = batch
        logits = model(x)
        metric(logits, y)
        return functional.cross_entropy(logits, y)

    def batch_of(number):
        if number % 5 == 4:
            model.eval()
            with torch.no_grad():
                evaluated.append(squares(model, torch.randn(6, 8)).item())
            model.train()
        return torch.randn(4, 8), torch.randint(3, (4,))

    optimizer = train(run, model, loss_of, batch_of)
    return Kept([model], [optimizer], {"right": metric.right, "seen": metric.seen, "evaluated": evaluated})


@stateful
def schedule_by_the_loss(run):
    """The learning rate follows a plateau of the loss, and a bad step is skipped."""
    model = Net()
    optimizer = sgd(model, 0.5)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    rates, skipped = [], 0
    run.watch(model)
    for number in range(STEPS):
        batch = rows(number)
        with run.step(batch) as step:
            loss = squares(model, batch)
            optimizer.zero_grad()
            loss.backward()
            if loss.item() < 0.4:
                optimizer.step()
            else:
                skipped += 1
                sgd(model, 0.01).step()
            step.log(loss=loss.item())
        schedule.step(loss.item())
        rates.append(optimizer.param_groups[0]["lr"])
    return Kept([model], [optimizer], {"rates": rates, "skipped": skipped})


@stateful
def closures_of_lbfgs(run):
    """L-BFGS calls a closure as often as it likes, which is counted."""
    model, calls = Net(), []
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    run.watch(model)
    for number in range(STEPS):
        batch = rows(number)

        def closure(batch=batch):
            optimizer.zero_grad()
            loss = squares(model, batch)
            calls.append(loss.item())
            loss.backward()
            return loss

        with run.step(batch) as step:
            step.log(loss=optimizer.step(closure).item())
    return Kept([model], [optimizer], {"calls": calls})


@stateful
def gradients_by_vmap(run):
    """Gradients of single samples by `vmap(grad)`, clipped, with noise."""
    model = Net()
    optimizer = sgd(model)

    def loss_of_one(weights, x):
        return functional_call(model, weights, (x[None],)).pow(2).mean()

    run.watch(model)
    for number in range(STEPS):
        batch = rows(number)
        with run.step(batch):
            weights = {name: value.detach() for name, value in model.named_parameters()}
            gradients = vmap(grad(loss_of_one), (None, 0))(weights, batch)
            for name, parameter in model.named_parameters():
                parameter.grad = gradients[name].clamp(-1, 1).mean(0) + 0.01 * torch.randn_like(parameter)
            optimizer.step()
    return Kept([model], [optimizer])


@stateful
def meta_learning(run):
    """MAML: the inner step is part of the graph, and inner weights are kept."""
    model, kept = Net(), []

    def loss_of(model, batch):
        weights = dict(model.named_parameters())
        inner = functional_call(model, weights, (batch,)).pow(2).mean()
        gradients = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        moved = {name: one - 0.1 * move for (name, one), move in zip(weights.items(), gradients, strict=True)}
        kept[:] = [moved["second.bias"].detach()]
        return functional_call(model, moved, (batch + 0.1,)).pow(2).mean()

    return Kept([model], [train(run, model, loss_of)], {"kept": kept})


@stateful
def steps_that_raise(run):
    """Some steps raise and are caught, as with a batch that does not fit."""
    model, failed = Net(), []
    optimizer = sgd(model)
    run.watch(model)
    for number in range(STEPS):
        batch = torch.randn(4, 9) if number in (3, 8) else rows(number)
        try:
            with run.step(batch) as step:
                optimizer.zero_grad()
                loss = squares(model, batch)
                loss.backward()
                optimizer.step()
                step.log(loss=loss)
        except RuntimeError as error:
            failed.append((number, str(error)[:40]))
    return Kept([model], [optimizer], {"failed": failed})


@stateful
def mixed_precision(run):
    """Autocast to bfloat16 and a loss scale that grows by the loop's own rule."""
    model, scales = Net(), [8.0]
    optimizer = sgd(model, 0.01)
    run.watch(model)
    for number in range(STEPS):
        batch = rows(number)
        with run.step(batch) as step:
            with torch.autocast("cpu", torch.bfloat16):
                loss = squares(model, batch)
            (loss * scales[-1]).backward()
            for parameter in model.parameters():
                parameter.grad.div_(scales[-1])
            scales.append(scales[-1] * (2 if loss.item() < 0.2 else 0.5))
            optimizer.step()
            optimizer.zero_grad()
            step.log(loss=loss.item())
    return Kept([model], [optimizer], {"scales": scales})
