"""State in references: weak ones, finalizers, graphs that are kept, and objects that must not be copied."""

import contextvars
import copy
import gc
import queue
import threading
import weakref

import torch
from torch import nn

from testbeds.stateful.doors import STEPS
from testbeds.stateful.loops import rows, sgd, stateful, train
from testbeds.stateful.observed import Kept, called


@stateful
def weak_references_with_callbacks(run):
    """Callbacks of weak references tell when the outputs of each step are freed."""
    model, freed, kept = nn.Linear(8, 3), [], []

    def loss_of(model, batch):
        number = len(kept)
        hidden = model(batch)
        kept.append(weakref.ref(hidden, lambda _: freed.append((number, len(kept)))))
        return hidden.pow(2).mean()

    return Kept([model], [train(run, model, loss_of)], {"freed": freed})


class Data:
    """A batch that tells when it is freed."""

    def __init__(self, number):
        self.x = torch.randn(4, 8)
        self.number = number


class ReadsData(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, data):
        called(self)
        return self.layer(data.x).pow(2).mean()


@stateful
def finalizers_of_batches(run):
    """Each batch prints when it is freed, which is when the next one has come."""
    model, finalizers = ReadsData(), []

    def batch_of(number):
        data = Data(number)
        finalizers.append(weakref.finalize(data, print, "batch", number, "is freed"))
        return data

    optimizer = train(run, model, batch_of=batch_of)
    gc.collect()
    return Kept([model], [optimizer], {"alive": [one.alive for one in finalizers]})


class LastLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 3)
        self.loss = None

    def forward(self, x):
        called(self)
        before = 1.0 if self.loss is None else self.loss.item()
        self.loss = self.layer(x).pow(2).mean()
        return self.loss / (1 + before)


@stateful
def model_that_keeps_its_loss(run):
    """The model keeps the last loss with its graph, and divides by it."""
    model = LastLoss()
    optimizer = train(run, model)
    return Kept([model], [optimizer], {"loss": model.loss})


@stateful
def graph_over_two_steps(run):
    """Each loss is sent backward in two steps, so its graph is kept from one to the next."""
    model, before = nn.Linear(8, 3), None
    optimizer = sgd(model)
    run.watch(model)
    for number in range(STEPS):
        batch = rows(number)
        with run.step(batch) as step:
            loss = model(batch).sigmoid().mean()
            optimizer.zero_grad()
            (loss if before is None else loss + 0.1 * before).backward(retain_graph=True)
            optimizer.step()
            step.log(loss=loss.item())
        before = loss
    return Kept([model], [optimizer], {"before": before})


@stateful
def models_one_after_the_other(run):
    """Cross-validation: each model is deleted, and must be gone before the next one."""
    gone = []
    for _ in range(3):
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
        optimizer = train(run, model, lambda model, x: model(x).pow(2).mean(), steps=6)
        references = [weakref.ref(one) for one in (model, optimizer, model[0].weight)]
        del model, optimizer
        gc.collect()
        gone.append([one() is None for one in references])
    print("gone", gone)
    return Kept([], [], {"gone": gone})


@stateful
def activations_freed_after_each_step(run):
    """After each step the loop looks whether the hidden activations and the graph are gone."""
    model, alive = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)), []
    optimizer = sgd(model)
    run.watch(model)
    for number in range(STEPS):
        batch = rows(number)
        with run.step(batch) as step:
            hidden = model[1](model[0](batch))
            loss = model[2](hidden).pow(2).mean()
            references = [weakref.ref(hidden), weakref.ref(batch)]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step.log(loss=loss)
        del hidden, loss, batch
        alive.append([one() is not None for one in references])
    return Kept([model], [optimizer], {"alive": alive})


DEPTH: contextvars.ContextVar[int] = contextvars.ContextVar("depth", default=0)


class InContext(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, x):
        called(self)
        DEPTH.set(DEPTH.get() + 1)
        return self.layer(x).pow(2).mean() / DEPTH.get()


@stateful
def context_variable(run):
    """`forward` increments a context variable."""
    model = InContext()
    return Kept([model], [train(run, model)], {"depth": DEPTH.get()})


class Locked(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 3)
        self.lock = threading.Lock()
        self.local = threading.local()
        self.calls = 0

    def forward(self, x):
        called(self)
        with self.lock:
            self.calls += 1
            self.local.calls = getattr(self.local, "calls", 0) + 1
        return self.layer(x).pow(2).mean() / self.local.calls


@stateful
def lock_and_thread_local(run):
    """A lock, which cannot be copied, and a `threading.local` in the model."""
    model = Locked()
    optimizer = train(run, model)
    return Kept([model], [optimizer], {"calls": model.calls, "local": model.local.calls})


@stateful
def thread_that_prefetches(run):
    """Batches are made by a thread with a bounded queue, as a loader does."""
    model, ready = nn.Linear(8, 3), queue.Queue(maxsize=2)

    def produce():
        own = torch.Generator().manual_seed(2)
        for _ in range(STEPS):
            ready.put(torch.randn(4, 8, generator=own))

    thread = threading.Thread(target=produce)
    thread.start()
    optimizer = train(run, model, lambda model, x: model(x).pow(2).mean(), lambda number: ready.get())
    thread.join()
    return Kept([model], [optimizer], {"left": ready.qsize()})


class Handle:
    """Counts every attempt to copy or pickle it."""

    attempts: list[str] = []  # noqa: RUF012

    def __copy__(self):
        self.attempts.append("copy")
        return self

    def __deepcopy__(self, memo):
        self.attempts.append("deepcopy")
        return self

    def __reduce_ex__(self, protocol):
        self.attempts.append("reduce")
        return Handle, ()


class Holds(nn.Module):
    def __init__(self, held):
        super().__init__()
        self.layer = nn.Linear(8, 3)
        self.held = held

    def forward(self, x):
        called(self)
        return self.layer(x).pow(2).mean()


@stateful
def object_that_counts_copies(run):
    """An object of the model counts how often it is copied."""
    model = Holds(Handle())
    optimizer = train(run, model)
    return Kept([model], [optimizer], {"attempts": Handle.attempts})


class NeverCopied(nn.Module):
    copies = 0

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def __deepcopy__(self, memo):
        type(self).copies += 1
        raise RuntimeError("this model must not be copied")

    def __getstate__(self):
        type(self).copies += 1
        raise RuntimeError("this model must not be pickled")

    def forward(self, x):
        called(self)
        return self.layer(x).pow(2).mean()


@stateful
def model_that_refuses_copies(run):
    """The model raises when it is copied or pickled, and counts the attempts."""
    model = NeverCopied()
    return Kept([model], [train(run, model)], {"copies": NeverCopied.copies})


class CountsCalls(nn.Module):
    """Counts calls of itself, and reads and writes of its attributes that have no place in `__dict__`."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 3)
        self.counts = {"call": 0, "train": 0, "parameters": 0}

    def __call__(self, *args, **kwargs):
        self.counts["call"] += 1
        return super().__call__(*args, **kwargs)

    def train(self, mode=True):
        if "counts" in self.__dict__:
            self.counts["train"] += 1
        return super().train(mode)

    def forward(self, x):
        called(self)
        return self.layer(x).pow(2).mean() / self.counts["call"]


@stateful
def overridden_methods(run):
    """`__call__` and `train` are overridden and count."""
    model = CountsCalls()
    optimizer = train(run, model)
    return Kept([model], [optimizer], {"counts": model.counts})


@stateful
def snapshots_by_deepcopy(run):
    """The loop copies the model every fourth step, and goes back to the best copy once."""
    model, best, history = Holds(None), None, []
    optimizer = sgd(model)
    run.watch(model)
    for number in range(STEPS):
        batch = rows(number)
        with run.step(batch) as step:
            loss = model(batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step.log(loss=loss)
        history.append(loss.item())
        if number % 4 == 0:
            best = copy.deepcopy(model)
        if number == 9:
            model.load_state_dict(best.state_dict())
    return Kept([model, best], [optimizer], {"history": history})
