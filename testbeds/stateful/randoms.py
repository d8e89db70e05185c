"""State in random generators: those of Python, numpy and torch, the process's and the model's own."""

import random

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from testbeds.stateful.doors import STEPS
from testbeds.stateful.loops import sgd, stateful, train
from testbeds.stateful.observed import Kept, called


def squares(model, batch):
    return model(batch).pow(2).mean()


@stateful
def random_flips_in_the_loop(run):
    """Python's `random` decides about an augmentation."""
    model = nn.Linear(8, 3)

    def batch_of(number):
        x = torch.randn(4, 8)
        return x.flip(-1) if random.random() < 0.5 else x

    return Kept([model], [train(run, model, squares, batch_of)], {"next": random.random()})


class LayerDrop(nn.Module):
    """Runs each layer if the given draw is large enough."""

    def __init__(self, draw):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.draw = draw

    def forward(self, x):
        called(self)
        for layer in self.layers:
            if self.draw() > 0.4:
                x = layer(x).tanh()
        return (x + self.layers[0](x)).pow(2).mean()


@stateful
def layer_drop_by_own_random(run):
    """Layers are dropped by a `random.Random` of the model."""
    own = random.Random(3)
    model = LayerDrop(own.random)
    return Kept([model], [train(run, model)], {"next": own.random()})


@stateful
def layer_drop_by_numpy(run):
    """Layers are dropped by `numpy.random.rand()`."""
    model = LayerDrop(np.random.rand)
    return Kept([model], [train(run, model)])


class OwnGenerator(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 3)
        self.generator = torch.Generator().manual_seed(5)

    def forward(self, x):
        called(self)
        return self.layer(x + torch.randn(x.shape, generator=self.generator)).pow(2).mean()


@stateful
def generator_of_torch_in_the_model(run):
    """Noise comes from a `torch.Generator` of the model."""
    model = OwnGenerator()
    optimizer = train(run, model)
    return Kept([model], [optimizer], {"generator": model.generator.get_state()})


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.RReLU(), nn.Linear(16, 3))

    def forward(self, x):
        called(self)
        return self.layers(x + 0.1 * torch.randn_like(x)).pow(2).mean()


@stateful
def dropout_and_noise(run):
    """Dropout, random slopes and noise from torch's own generator."""
    model = Noisy()
    return Kept([model], [train(run, model)])


@stateful
def mixup_by_numpy(run):
    """Mixup: numpy draws the share, torch the permutation, Python whether."""
    model, shares = nn.Linear(8, 3), []

    def loss_of(model, x):
        if random.random() < 0.7:
            shares.append(float(np.random.beta(0.4, 0.4)))
            x = shares[-1] * x + (1 - shares[-1]) * x[torch.randperm(len(x))]
        return squares(model, x)

    return Kept([model], [train(run, model, loss_of)], {"shares": shares})


@stateful
def loader_that_shuffles(run):
    """A `DataLoader` that shuffles with a generator, several epochs."""
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(22, 8), torch.randint(3, (22,)))
    loader = DataLoader(data, batch_size=4, shuffle=True, generator=generator)
    model = nn.Linear(8, 3)
    optimizer = sgd(model)
    run.watch(model)
    for _ in range(3):
        for x, y in loader:
            with run.step((x, y)) as step:
                loss = functional.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step.log(loss=loss)
    return Kept([model], [optimizer], {"generator": generator.get_state()})


@stateful
def forked_generators(run):
    """`forward` draws in `fork_rng`, and the loop saves and restores the states of all generators."""

    class Forks(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 3)

        def forward(self, x):
            called(self)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(len(x))
                noise = torch.randn_like(x)
            return self.layer(x + noise + torch.randn_like(x)).pow(2).mean()

    model, states = Forks(), []

    def batch_of(number):
        if number == 5:
            states.append((random.getstate(), np.random.get_state(), torch.get_rng_state()))
        if number == 10:
            random.setstate(states[0][0])
            np.random.set_state(states[0][1])
            torch.set_rng_state(states[0][2])
        return torch.randn(4, 8) * random.random() * float(np.random.rand())

    return Kept([model], [train(run, model, batch_of=batch_of)])


@stateful
def policy_that_explores(run):
    """Deep Q learning: a replay memory, `random.sample`, and chance decides about each action."""
    model, replay, actions = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2)), [], []
    optimizer, state = sgd(model), torch.zeros(4)
    run.watch(model)
    for number in range(STEPS + 8):
        with torch.no_grad():
            action = random.randrange(2) if random.random() < 0.5 else int(model(state).argmax())
        following = (state + torch.randn(4) * (action + 1)).clamp(-2, 2)
        replay.append((state, action, float(following.sum()), following))
        actions.append(action)
        state = following
        if number < 8:
            continue
        states, chosen, rewards, after = zip(*random.sample(replay, 6), strict=True)
        batch = torch.stack(states)
        with run.step(batch) as step:
            target = torch.tensor(rewards) + 0.9 * model(torch.stack(after)).detach().max(1).values
            loss = functional.mse_loss(model(batch)[range(6), list(chosen)], target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step.log(loss=loss)
    return Kept([model], [optimizer], {"actions": actions, "replay": replay})
