"""One model, one loss: the loops most people write."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from testbeds.loops.audit import STEPS, Audit
from testbeds.loops.models import WIDTH, Block, TinyGPT, cnn, ids, llama, mlp, sgd, text
from testbeds.loops.truth import recomputing


def plain(audit: Audit) -> list[nn.Module]:
    """A model that returns its loss, a batch that is a dict."""
    model = llama()
    optimizer = sgd(model)
    audit.watch(model)
    for _ in range(STEPS):
        batch = text(2, 7)
        with audit.step(batch) as step:
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step.log(loss=loss)
    return [model]


def accumulation(audit: Audit) -> list[nn.Module]:
    """Three micro-batches to a step, each of its own length."""
    model = llama()
    optimizer = sgd(model)
    audit.watch(model)
    for _ in range(STEPS):
        with audit.step() as step:
            for length in (5, 8, 6):
                batch = text(2, length)
                step.micro_batch(batch)
                (model(**batch).loss / 3).backward()
            optimizer.step()
            optimizer.zero_grad()
    return [model]


def log_step_only(audit: Audit) -> list[nn.Module]:
    """No context, only `log_step` after each step."""
    model = llama()
    optimizer = sgd(model)
    audit.watch(model)
    for _ in range(STEPS):
        batch = text(2, 7)
        with audit.body() as number:
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        audit.monitor.log_step(number, loss=loss.item(), batch=batch)
    return [model]


def log_step_without_a_batch(audit: Audit) -> list[nn.Module]:
    """`log_step(number, loss=...)` and nothing else."""
    model = mlp(WIDTH, 16, 4)
    optimizer = sgd(model)
    audit.watch(model)
    for _ in range(STEPS):
        with audit.body() as number:
            loss = model(torch.randn(6, WIDTH)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        audit.monitor.log_step(number, loss=loss.detach())
    return [model]


def loss_outside_the_model(audit: Audit) -> list[nn.Module]:
    """`for x, y in loader`, cross entropy in the loop."""
    model = mlp(WIDTH, 16, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    audit.watch(model)
    for _ in range(STEPS):
        x, y = torch.randn(6, WIDTH), torch.randint(0, 4, (6,))
        with audit.step((x, y)) as step:
            loss = functional.cross_entropy(model(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step.log(loss=loss)
    return [model]


def nano_gpt(audit: Audit) -> list[nn.Module]:
    """`logits, loss = model(x, y)`."""
    model = TinyGPT()
    optimizer = sgd(model)
    audit.watch(model)
    for _ in range(STEPS):
        x, y = ids(3, 6), ids(3, 6)
        with audit.step((x, y)) as step:
            _, loss = model(x, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step.log(loss=loss)
    return [model]


def image_classifier(audit: Audit) -> list[nn.Module]:
    """A CNN with a depthwise convolution."""
    model = cnn()
    optimizer = sgd(model)
    audit.watch(model)
    for _ in range(STEPS):
        x, y = torch.randn(4, 3, 8, 8), torch.randint(0, 5, (4,))
        with audit.step((x, y)) as step:
            loss = functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step.log(loss=loss)
    return [model]


class Packed(nn.Module):
    """A recurrent network over rows of different lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.GRU(WIDTH, 6, batch_first=True)
        self.head = nn.Linear(6, 2)

    def forward(self, rows: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(rows, lengths, batch_first=True, enforce_sorted=False)
        _, last = self.recurrent(packed)
        return self.head(last[0])


def packed_recurrent(audit: Audit) -> list[nn.Module]:
    """A GRU over packed rows: what it costs depends on the values of the lengths."""
    model = Packed()
    optimizer = sgd(model)
    audit.watch(model)
    for _ in range(STEPS):
        batch = {"rows": torch.randn(3, 6, WIDTH), "lengths": torch.randint(1, 7, (3,))}
        with audit.step(batch):
            model(**batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [model]


class MessagePassing(nn.Module):
    """A graph network by hand: a message along every edge, a sum at every node."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.update = nn.Linear(2 * WIDTH, WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, nodes: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        source, target = edge_index
        messages = self.message(torch.cat([nodes[source], nodes[target]], -1)).relu()
        received = torch.zeros_like(nodes).index_add(0, target, messages)
        return self.update(torch.cat([nodes, received], -1))


def graph_network(audit: Audit) -> list[nn.Module]:
    """Graphs with other numbers of nodes and edges on every step."""
    model = MessagePassing()
    optimizer = sgd(model)
    audit.watch(model)
    for number in range(STEPS):
        nodes = 5 + number % 3
        batch = (torch.randn(nodes, WIDTH), torch.randint(0, nodes, (2, 9 + 2 * (number % 4))))
        with audit.step(batch):
            model(*batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [model]


class Checkpointed(nn.Module):
    """Runs each of its blocks as it is told to."""

    def __init__(self, run: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList([Block(), Block()])
        self.run = run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = self.run(block, x)
        return x


def _checkpointed(audit: Audit, run: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> list[nn.Module]:
    model = Checkpointed(run)
    optimizer = sgd(model)
    audit.watch(model)
    for _ in range(STEPS):
        x = torch.randn(2, 5, WIDTH)
        with audit.step(x) as step:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step.log(loss=loss)
    return [model]


def checkpointing(audit: Audit) -> list[nn.Module]:
    """Activation checkpointing: half of the forward pass runs twice."""
    return _checkpointed(audit, partial(checkpoint, use_reentrant=False))


def reentrant_checkpointing(audit: Audit) -> list[nn.Module]:
    """The older, reentrant checkpointing."""
    return _checkpointed(audit, partial(checkpoint, use_reentrant=True))


def nested_checkpointing(audit: Audit) -> list[nn.Module]:
    """A checkpoint inside of a checkpoint: the inner forward pass runs three times."""

    def run(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        def outer(hidden: torch.Tensor) -> torch.Tensor:
            hidden = hidden + block.attention(hidden)
            return hidden + checkpoint(block.wide, hidden, use_reentrant=False)

        return checkpoint(outer, x, use_reentrant=False)

    return _checkpointed(audit, run)


def selective_checkpointing(audit: Audit) -> list[nn.Module]:
    """Selective checkpointing: products of a weight are kept, only those of attention run again."""
    kept = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
    return _checkpointed(audit, partial(checkpoint, use_reentrant=False, context_fn=kept))


class Again(torch.autograd.Function):
    """A layer that keeps only its input and computes its product again, as memory-saving layers do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return (x @ weight.T).tanh()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        with recomputing():
            out = (x @ weight.T).tanh()
        grad = grad * (1 - out.square())
        return grad @ weight, grad.T @ x


def recomputing_function(audit: Audit) -> list[nn.Module]:
    """An autograd function of one's own computes a product of its forward pass again."""
    model = mlp(WIDTH, 16, 4)
    optimizer = sgd(model)
    audit.watch(model)
    for _ in range(STEPS):
        x = torch.randn(6, WIDTH)
        with audit.step(x):
            model[2](Again.apply(x, model[0].weight)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [model]


class Tagger(nn.Module):
    """A body and a head that the loop calls by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Block(), nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def parts_of_the_model(audit: Audit) -> list[nn.Module]:
    """`model.head(model.body(x))`: the model itself is never called."""
    model = Tagger()
    optimizer = sgd(model)
    audit.watch(model)
    for _ in range(STEPS):
        x = torch.randn(2, 5, WIDTH)
        with audit.step(x) as step:
            loss = model.head(model.body(x).mean(1)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step.log(loss=loss)
    return [model]


def _with_evaluation(audit: Audit, *, in_phase: bool, opens_steps: bool) -> list[nn.Module]:
    model = mlp(WIDTH, 16, 4)
    optimizer = sgd(model)
    audit.watch(model)

    def evaluate() -> None:
        model.eval()
        with torch.no_grad():
            model(torch.randn(50, WIDTH))
        model.train()

    for number in range(STEPS):
        x = torch.randn(6, WIDTH)
        with audit.step(x) if opens_steps else audit.body():
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if not opens_steps:
            audit.monitor.log_step(number, batch=x)
        if number % 3 == 2 and in_phase:
            with audit.monitor.phase("eval"):
                evaluate()
        elif number % 3 == 2:
            evaluate()
    return [model]


def evaluation_in_a_phase(audit: Audit) -> list[nn.Module]:
    """Evaluation between steps inside `monitor.phase("eval")`."""
    return _with_evaluation(audit, in_phase=True, opens_steps=True)


def evaluation_between_steps(audit: Audit) -> list[nn.Module]:
    """Evaluation between two `with monitor.step()`, without `monitor.phase`."""
    return _with_evaluation(audit, in_phase=False, opens_steps=True)


def evaluation_between_log_steps(audit: Audit) -> list[nn.Module]:
    """Evaluation between two `log_step`, without `monitor.phase`."""
    return _with_evaluation(audit, in_phase=False, opens_steps=False)


def evaluation_in_a_phase_of_log_steps(audit: Audit) -> list[nn.Module]:
    """Only `log_step`, evaluation inside `monitor.phase("eval")`."""
    return _with_evaluation(audit, in_phase=True, opens_steps=False)
