"""State in containers: queues, deques, arrays, caches, closures, globals, class attributes and files."""

import functools
import io
import itertools
import logging
import tempfile
from collections import deque
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from testbeds.stateful.doors import STEPS
from testbeds.stateful.loops import stateful, train
from testbeds.stateful.observed import Kept, called


class Queue:
    """MoCo's queue as a plain object."""

    def __init__(self, size):
        self.size = size
        self.keys = torch.zeros(0, 4)
        self.lengths = []

    def push(self, keys):
        self.keys = torch.cat([keys, self.keys])[: self.size]
        self.lengths.append(len(self.keys))


class Contrast(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(8, 4)
        self.queue = Queue(24)

    def forward(self, x):
        called(self)
        query = functional.normalize(self.encoder(x), dim=1)
        with torch.no_grad():
            key = functional.normalize(self.encoder(x + 0.1), dim=1)
        logits = torch.cat([(query * key).sum(1, keepdim=True), query @ self.queue.keys.t()], 1) / 0.1
        self.queue.push(key)
        return functional.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))


@stateful
def queue_as_a_plain_object(run):
    """MoCo's queue, a plain object of the model."""
    model = Contrast()
    optimizer = train(run, model)
    return Kept([model], [optimizer], vars(model.queue))


class Remembering(nn.Module):
    """Compares its features with those of the last calls, kept in any container with `append`."""

    def __init__(self, memory):
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.memory = memory

    def forward(self, x):
        called(self)
        z = self.layer(x)
        self.memory.append(z.detach().mean(0))
        return (z - torch.stack(list(self.memory)).mean(0)).pow(2).mean() + z.pow(2).mean()


@stateful
def deque_of_features(run):
    """Features of the last four calls in a `collections.deque`."""
    model = Remembering(deque(maxlen=4))
    optimizer = train(run, model)
    return Kept([model], [optimizer], {"memory": model.memory})


class Codebook(nn.Module):
    """Counts in numpy how often each code was used, and draws unused codes again."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(8, 4), nn.Linear(4, 8)
        self.codes = nn.Parameter(torch.randn(16, 4))
        self.usage = np.zeros(16)
        self.calls = np.zeros(1)

    def forward(self, x):
        called(self)
        z = self.encoder(x)
        index = (z[:, None] - self.codes[None]).pow(2).sum(-1).argmin(1)
        np.add.at(self.usage, index.numpy(), 1)
        self.calls += 1
        if self.calls[0] % 5 == 0:
            self.codes.data[self.usage == 0] = torch.randn(int((self.usage == 0).sum()), 4)
        quantized = self.codes[index]
        error = (self.decoder(z + (quantized - z).detach()) - x).pow(2).mean()
        return error + (quantized - z.detach()).pow(2).mean()


@stateful
def numpy_usage_of_codes(run):
    """A codebook whose usage is counted in numpy arrays."""
    model = Codebook()
    optimizer = train(run, model)
    return Kept([model], [optimizer], {"usage": model.usage, "calls": model.calls})


@stateful
def list_outside_the_model(run):
    """`forward` appends activations to a list of the loop, which the loss reads and clears."""
    activations, sizes = [], []

    class Telling(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 3)

        def forward(self, x):
            called(self)
            hidden = self.first(x).relu()
            activations.append(hidden)
            return self.second(hidden)

    def loss_of(model, batch):
        loss = model(batch).pow(2).mean() + 0.1 * torch.stack([one.pow(2).mean() for one in activations]).mean()
        sizes.append(len(activations))
        activations.clear()
        return loss

    model = Telling()
    return Kept([model], [train(run, model, loss_of)], {"sizes": sizes, "left": len(activations)})


AUXILIARY: list[torch.Tensor] = []
STATISTICS = {"tokens": 0, "calls": 0}


class Experts(nn.Module):
    """Megatron keeps the auxiliary losses of experts in a tracker that is a module global."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(8, 4)
        self.experts = nn.Parameter(torch.randn(4, 8, 8) / 4)

    def forward(self, x):
        called(self)
        shares = self.gate(x).softmax(-1)
        AUXILIARY.append(shares.mean(0).pow(2).sum())
        STATISTICS["tokens"] += len(x)
        STATISTICS["calls"] += 1
        return torch.einsum("te,td,edf->tf", shares, x, self.experts)


@stateful
def global_list_of_auxiliary_losses(run):
    """A module global collects losses of the layers."""

    def loss_of(model, batch):
        loss = model(batch).pow(2).mean() + 0.01 * sum(AUXILIARY)
        AUXILIARY.clear()
        return loss

    model = nn.Sequential(Experts(), Experts())
    optimizer = train(run, model, loss_of)
    return Kept([model], [optimizer], {"left": len(AUXILIARY), **STATISTICS})


_calls = 0


class ClassCounter(nn.Module):
    calls = 0
    sizes: list[int] = []  # noqa: RUF012

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, x):
        called(self)
        type(self).calls += 1
        self.sizes.append(len(x))
        return (self.layer(x) / ClassCounter.calls).pow(2).mean()


@stateful
def class_attributes(run):
    """A number and a list that belong to the class."""
    model = ClassCounter()
    return Kept([model], [train(run, model)], {"calls": ClassCounter.calls, "sizes": ClassCounter.sizes})


def scheduled_weight():
    calls = 0

    def weight():
        nonlocal calls
        calls += 1
        return 1 / calls

    return weight, lambda: calls


class Closed(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.layer = nn.Linear(8, 3)
        self.weight = weight

    def forward(self, x):
        called(self)
        return self.weight() * self.layer(x).pow(2).mean()


@stateful
def closure_in_the_model(run):
    """A function with a `nonlocal` counter is an attribute of the model."""
    weight, calls = scheduled_weight()
    model = Closed(weight)
    return Kept([model], [train(run, model)], {"calls": calls()})


def noise_level(x):
    noise_level.calls += 1
    return x + 0.01 * noise_level.calls


noise_level.calls = 0


@functools.lru_cache(maxsize=2)
def positions(length):
    return torch.linspace(0, 1, length)[:, None].expand(length, 8)


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, x):
        called(self)
        return self.layer(x + positions(len(x))).pow(2).mean()


@stateful
def lru_cache_of_tables(run):
    """Tables by length in an `lru_cache` that holds two; its hits and misses are compared."""
    model = Positions()
    optimizer = train(run, model, batch_of=lambda number: torch.randn(3 + number % 3, 8))
    return Kept([model], [optimizer], {"cache": tuple(positions.cache_info())})


class Memory:
    """Transformer-XL's memory: a plain object that the model updates."""

    def __init__(self):
        self.states = []
        self.updates = 0

    def update(self, x):
        self.states = [*self.states[-1:], x.detach()]
        self.updates += 1
        return torch.cat(self.states, 1)


class WithMemory(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.query = nn.Embedding(20, 8), nn.Linear(8, 8)
        self.keys, self.out = nn.Linear(8, 16), nn.Linear(8, 20)

    def forward(self, ids, memory=None):
        called(self)
        x = self.embedding(ids)
        context = memory.update(x) if memory is not None else x
        key, value = self.keys(context).chunk(2, -1)
        return self.out(functional.scaled_dot_product_attention(self.query(x), key, value))


@stateful
def memory_as_an_argument(run):
    """A memory object is passed to each call, and made anew every fifth step."""
    model, memory = WithMemory(), Memory()

    def loss_of(model, ids):
        nonlocal memory
        memory = memory if memory.updates < 5 else Memory()
        logits = model(ids[:, :-1], memory=memory)
        return functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    optimizer = train(run, model, loss_of, lambda number: torch.randint(20, (2, 6)))
    return Kept([model], [optimizer], vars(memory))


class Batch:
    """Counts its own uses, as a graph or a game state does."""

    def __init__(self, x):
        self.x = x
        self.uses = 0

    def augmented(self):
        self.uses += 1
        return self.x * self.uses


class UsesBatch(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, batch):
        called(self)
        return self.layer(batch.augmented()).pow(2).mean()


@stateful
def batch_that_counts_its_uses(run):
    """The batch is an object that changes when it is used; each is used twice in a row."""
    model, kept = UsesBatch(), [Batch(torch.randn(4, 8)) for _ in range(STEPS // 2)]
    optimizer = train(run, model, batch_of=lambda number: kept[number // 2])
    return Kept([model], [optimizer], {"uses": [batch.uses for batch in kept]})


class Pops(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, batch):
        called(self)
        x, y = batch.pop("x"), batch.pop("y")
        batch["seen"] = batch.get("seen", 0) + 1
        return functional.cross_entropy(self.layer(x), y)


@stateful
def batch_that_is_emptied(run):
    """`forward` pops the tensors out of the batch's dict."""
    model, batches = Pops(), []

    def batch_of(number):
        batches.append({"x": torch.randn(4, 8), "y": torch.randint(3, (4,))})
        return batches[-1]

    optimizer = train(run, model, batch_of=batch_of)
    return Kept([model], [optimizer], {"batches": batches})


@stateful
def batch_that_is_a_generator(run):
    """The batch is a generator of micro-batches, which can be read once."""
    model, given = nn.Linear(8, 3), []

    def micro_batches(number):
        for _ in range(2):
            given.append(number)
            yield torch.randn(2, 8)

    def loss_of(model, parts):
        return torch.stack([model(part).pow(2).mean() for part in parts]).sum()

    optimizer = train(run, model, loss_of, micro_batches)
    return Kept([model], [optimizer], {"given": given})


class Counts(nn.Module):
    def __init__(self, numbers):
        super().__init__()
        self.layer = nn.Linear(8, 3)
        self.numbers = numbers

    def forward(self, x):
        called(self)
        return self.layer(x).pow(2).mean() / (1 + next(self.numbers))


@stateful
def iterator_that_counts(run):
    """`itertools.count` in the model."""
    model = Counts(itertools.count())
    optimizer = train(run, model)
    return Kept([model], [optimizer], {"next": next(model.numbers)})


def levels():
    level = 0.0
    while True:
        sent = yield level
        level += 0.5 if sent is None else sent


@stateful
def generator_in_the_model(run):
    """A Python generator in the model."""
    model = Counts(levels())
    optimizer = train(run, model)
    return Kept([model], [optimizer], {"next": next(model.numbers)})


class PlainTensor(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.mean = torch.zeros(8)
        self.__dict__["hidden"] = torch.zeros(2)

    def forward(self, x):
        called(self)
        y = self.layer(x) - self.mean
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        self.hidden[0] += 1
        return y.pow(2).mean()


@stateful
def tensors_that_are_no_buffers(run):
    """A running mean that is a plain tensor attribute, replaced at each call, and one that is written to."""
    model = PlainTensor()
    optimizer = train(run, model)
    return Kept([model], [optimizer], {"mean": model.mean, "hidden": model.hidden})


class WritesFile(nn.Module):
    def __init__(self, folder):
        super().__init__()
        self.layer = nn.Linear(8, 3)
        self.log = (Path(folder) / "log.txt").open("w+")
        self.text = io.StringIO()

    def forward(self, x):
        called(self)
        self.log.write(f"{float(x.sum()):.6f}\n")
        self.log.flush()
        self.text.write(".")
        return self.layer(x).pow(2).mean() / self.log.tell()


@stateful
def file_that_forward_writes(run):
    """`forward` writes to an open file and divides by its length."""
    with tempfile.TemporaryDirectory() as folder:
        model = WritesFile(folder)
        optimizer = train(run, model)
        model.log.close()
        content = (Path(folder) / "log.txt").read_text()
    return Kept([model], [optimizer], {"content": content, "text": model.text.getvalue()})


class Prints(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, x):
        called(self)
        print("forward of", tuple(x.shape), x.flatten()[0].item())
        logging.getLogger("testbeds").warning("a call")
        return self.layer(x).pow(2).mean()


@stateful
def forward_that_prints(run):
    """`forward` prints, and writes to a logger whose handler counts."""
    records = []

    class Handler(logging.Handler):
        def emit(self, record):
            records.append(record.getMessage())

    handler = Handler()
    logging.getLogger("testbeds").addHandler(handler)
    model = Prints()
    optimizer = train(run, model)
    logging.getLogger("testbeds").removeHandler(handler)
    return Kept([model], [optimizer], {"records": len(records)})
