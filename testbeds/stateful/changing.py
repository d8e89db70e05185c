"""Models that change as they run: buffers, lazy modules, modules that are swapped, averages of weights."""

import io
import pickle

import torch
from torch import nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from testbeds.stateful.doors import STEPS
from testbeds.stateful.loops import rows, sgd, stateful, train
from testbeds.stateful.observed import Kept, called


def squares(model, batch):
    return model(batch).pow(2).mean()


def small():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))


class Buffers(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("hidden", torch.zeros(3), persistent=False)

    def forward(self, x):
        called(self)
        self.calls += 1
        y = self.layer(self.norm(x))
        self.hidden = 0.9 * self.hidden + y.detach().mean(0)
        return (y - self.hidden).pow(2).mean() / self.calls


def one_step(run, model, optimizer, batch):
    with run.step(batch) as step:
        loss = squares(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step.log(loss=loss)


@stateful
def buffers_that_count(run):
    """Batch norm, a counter in a buffer, and a buffer that is replaced."""
    model = Buffers()
    return Kept([model], [train(run, model)])


@stateful
def lazy_modules(run):
    """`nn.LazyLinear` gets its weights at the first call; the optimizer is made before."""
    model = nn.Sequential(nn.LazyLinear(16), nn.ReLU(), nn.LazyBatchNorm1d(), nn.LazyLinear(3))
    run.watch(model)
    optimizer = sgd(model)
    for number in range(STEPS):
        batch = rows(number)
        one_step(run, model, optimizer, batch)
    return Kept([model], [optimizer])


class MakesLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.inputs = nn.Linear(8, 8)
        self.by_size = nn.ModuleDict()

    def forward(self, x):
        called(self)
        name = str(len(x))
        if name not in self.by_size:
            self.by_size[name] = nn.Linear(8, 3)
        return self.by_size[name](self.inputs(x).relu()).pow(2).mean()


@stateful
def layers_made_in_forward(run):
    """`forward` makes a new layer, with random weights, for each new size of a batch."""
    model = MakesLayers()
    optimizer = train(run, model, batch_of=lambda number: torch.randn(2 + number // 4, 8))
    return Kept([model], [optimizer], {"names": list(model.by_size)})


class Deeper(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.calls = 0

    def forward(self, x):
        called(self)
        self.calls += 1
        for layer in self.layers[: 1 + self.calls // 5]:
            x = layer(x).tanh()
        return x.pow(2).mean()


@stateful
def depth_by_the_number_of_calls(run):
    """A counter in `forward` decides how many layers run."""
    model = Deeper()
    return Kept([model], [train(run, model)], {"calls": model.calls})


@stateful
def layer_added_on_the_way(run):
    """The loop adds a layer and its parameters to the optimizer at step 7."""
    model = small()
    optimizer = sgd(model)
    run.watch(model)
    for number in range(STEPS):
        batch = rows(number)
        if number == 7:
            model.append(nn.Linear(3, 3))
            optimizer.add_param_group({"params": model[-1].parameters()})
        one_step(run, model, optimizer, batch)
    return Kept([model], [optimizer])


@stateful
def average_of_weights(run):
    """An exponential average of the weights by `AveragedModel`, evaluated every fourth step."""
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 3))
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    optimizer, seen = sgd(model), []
    run.watch(model)
    for number in range(STEPS):
        batch = rows(number)
        with run.step(batch) as step:
            loss = squares(model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            average.update_parameters(model)
            step.log(loss=loss)
        if number % 4 == 3:
            average.eval()
            with torch.no_grad():
                seen.append(squares(average, batch).item())
            average.train()
    return Kept([model, average], [optimizer], {"seen": seen})


@stateful
def pickled_on_the_way(run):
    """The loop pickles the whole model, loads it again and compares; the copy must be as bare as the model."""
    model, seen = small(), []
    optimizer = sgd(model)
    run.watch(model)
    for number in range(STEPS):
        batch = rows(number)
        one_step(run, model, optimizer, batch)
        if number % 5 == 4:
            loaded = pickle.loads(pickle.dumps(model))
            seen.append([type(loaded).__name__, *(one.sum().item() for one in loaded.parameters())])
            seen.append(sum(len(hooks) for name, hooks in vars(loaded).items() if name.endswith("_hooks")))
    return Kept([model], [optimizer], {"seen": seen})


@stateful
def saved_and_loaded(run):
    """Checkpoints of model, optimizer and generators in memory; the loop goes back to one."""
    model, saved = small(), {}
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    run.watch(model)
    for number in range(STEPS):
        batch = rows(number)
        one_step(run, model, optimizer, batch)
        if number == 4:
            buffer = io.BytesIO()
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
            saved["size"] = len(buffer.getvalue())
        if number == 10:
            buffer.seek(0)
            state = torch.load(buffer)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
    return Kept([model], [optimizer], saved)


class Carries(nn.Module):
    """An LSTM that carries its own state from call to call."""

    def __init__(self):
        super().__init__()
        self.lstm, self.out = nn.LSTM(4, 6, batch_first=True), nn.Linear(6, 4)
        self.state = None

    def forward(self, x):
        called(self)
        y, state = self.lstm(x, self.state)
        self.state = tuple(one.detach() for one in state)
        return functional.mse_loss(self.out(y), x)


@stateful
def state_of_a_network_in_the_model(run):
    """A recurrent network keeps its state itself."""
    model = Carries()
    optimizer = train(run, model, batch_of=lambda number: torch.randn(2, 5, 4))
    return Kept([model], [optimizer], {"state": model.state})


@stateful
def frozen_and_unfrozen(run):
    """Layers are frozen and unfrozen in turns."""
    model = small()

    def batch_of(number):
        model[0].requires_grad_(number % 4 < 2)
        return rows(number)

    return Kept([model], [train(run, model, squares, batch_of)])


@stateful
def modes_in_turns(run):
    """`model.eval()` before every third step, with dropout and batch norm."""
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.4), nn.Linear(16, 3))

    def batch_of(number):
        model.train(number % 3 != 0)
        return rows(number)

    return Kept([model], [train(run, model, squares, batch_of)], {"training": model.training})


@stateful
def weights_replaced_in_place(run):
    """The loop replaces `.data`, prunes by a mask and draws dead units again."""
    model = small()

    def batch_of(number):
        if number % 5 == 4:
            weight = model[0].weight
            weight.data = weight.data * (weight.data.abs() > weight.data.abs().median())
            model[2].weight.data[0] = torch.randn(16)
        return rows(number)

    return Kept([model], [train(run, model, squares, batch_of)])
