"""Small trainings, each compiled in another way, and what their steps cost when nothing is compiled."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

VOCABULARY, WIDTH, HEADS, LAYERS = 64, 32, 4, 3
Compile = Callable[..., Any]
"""`torch.compile` with a backend, or a function that compiles nothing."""


class Block(nn.Module):
    """Attention is written out, so that torch's own counter knows all of its products."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.output = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (each.unflatten(2, (HEADS, -1)).transpose(1, 2) for each in self.qkv(x).split(WIDTH, 2))
        mixed = (query @ key.transpose(2, 3)).softmax(-1) @ value
        x = x + self.output(mixed.transpose(1, 2).flatten(2))
        fed: Tensor = self.down(F.gelu(self.up(x)))
        return x + fed


class Model(nn.Module):
    """A language model.

    Attributes:
        checkpoints: Whether blocks run again in the backward pass.
        breaks: Whether the compiler must stop after each block.
    """

    checkpoints = breaks = False

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
            if self.breaks:
                torch._dynamo.graph_break()
        logits: Tensor = self.head(x)
        return logits


def loss_of(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


@dataclass
class Running:
    """A training that is set up: the model for the monitor, and what a step does with a batch."""

    model: nn.Module
    step: Callable[[Tensor], None]
    parameters: list[nn.Parameter] = field(default_factory=list)


def _trained(model: nn.Module, forward: Callable[[Tensor], Tensor], optimizer: Any = None) -> Running:
    parameters = [p for p in model.parameters() if p.requires_grad]
    own = optimizer or torch.optim.SGD(parameters, lr=0.01)

    def step(ids: Tensor) -> None:
        forward(ids).backward()
        own.step()
        own.zero_grad()

    return Running(model, step, parameters)


def whole(compile_: Compile, **options: Any) -> Running:
    model = compile_(Model(), **options)
    return _trained(model, lambda ids: loss_of(model(ids), ids))


def in_place(compile_: Compile) -> Running:
    model = Model()
    compile_.in_place(model)  # type: ignore[attr-defined]
    return _trained(model, lambda ids: loss_of(model(ids), ids))


def blocks(compile_: Compile, *, checkpoints: bool = False) -> Running:
    model = Model()
    model.checkpoints = checkpoints
    for block in model.blocks:
        compile_.in_place(block)  # type: ignore[attr-defined]
    return _trained(model, lambda ids: loss_of(model(ids), ids))


def wrapped_blocks(compile_: Compile) -> Running:
    model = Model()
    for index, block in enumerate(model.blocks):
        model.blocks[index] = compile_(block)
    return _trained(model, lambda ids: loss_of(model(ids), ids))


def graph_breaks(compile_: Compile) -> Running:
    model = Model()
    model.breaks = True
    compiled = compile_(model)
    return _trained(compiled, lambda ids: loss_of(compiled(ids), ids))


def function(compile_: Compile) -> Running:
    """Model and loss in one compiled function."""
    model = Model()
    forward = compile_(lambda ids: loss_of(model(ids), ids))
    return _trained(model, forward)


def loss_only(compile_: Compile) -> Running:
    model, weight = Model(), nn.Parameter(torch.randn(VOCABULARY, VOCABULARY))
    loss = compile_(lambda logits, ids: loss_of(logits @ weight, ids))
    model.register_parameter("weight", weight)
    return _trained(model, lambda ids: loss(model(ids), ids))


def compiled_optimizer(compile_: Compile) -> Running:
    model = compile_(Model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    optimizer.step = compile_(optimizer.step)  # type: ignore[method-assign]
    return _trained(model, lambda ids: loss_of(model(ids), ids), optimizer)


def teacher(compile_: Compile) -> Running:
    """A teacher without gradients, compiled too."""
    model, other = compile_(Model()), compile_(Model().eval())

    def forward(ids: Tensor) -> Tensor:
        with torch.no_grad():
            target = other(ids)
        return F.mse_loss(model(ids), target)

    return _trained(model, forward)


def eager_teacher(compile_: Compile) -> Running:
    model, other = compile_(Model()), Model().eval()

    def forward(ids: Tensor) -> Tensor:
        with torch.no_grad():
            target = other(ids)
        return F.mse_loss(model(ids), target)

    return _trained(model, forward)


def frozen(compile_: Compile) -> Running:
    model = Model()
    model.tokens.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    compiled = compile_(model)
    return _trained(compiled, lambda ids: loss_of(compiled(ids), ids))


def two_passes(compile_: Compile) -> Running:
    model = compile_(Model())
    return _trained(model, lambda ids: loss_of(model(ids), ids) + loss_of(model(ids.flip(1)), ids))


def accumulated(compile_: Compile) -> Running:
    model = compile_(Model())
    running = _trained(model, lambda ids: loss_of(model(ids), ids))
    optimizer = torch.optim.SGD(running.parameters, lr=0.01)

    def step(ids: Tensor) -> None:
        for part in ids.chunk(2):
            loss_of(model(part), part).backward()
        optimizer.step()
        optimizer.zero_grad()

    return Running(model, step, running.parameters)


def mixed_precision(compile_: Compile) -> Running:
    model = compile_(Model())

    def forward(ids: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss_of(model(ids), ids)

    return _trained(model, forward)


def penalty(compile_: Compile) -> Running:
    """Compiled blocks, and a product of the user's own around them."""
    running = blocks(compile_)
    model: Any = running.model

    def forward(ids: Tensor) -> Tensor:
        logits = model(ids).flatten(0, 1)
        penalised: Tensor = loss_of(model(ids), ids) + (logits.T @ logits).tanh().mean()
        return penalised

    return _trained(model, forward)


def backward_twice(compile_: Compile) -> Running:
    model = compile_(Model())
    running = _trained(model, lambda ids: loss_of(model(ids), ids))
    optimizer = torch.optim.SGD(running.parameters, lr=0.01)

    def step(ids: Tensor) -> None:
        loss = loss_of(model(ids), ids)
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return Running(model, step, running.parameters)


def no_backward(compile_: Compile) -> Running:
    """One of two results is not used."""
    model = compile_(Model())

    def forward(ids: Tensor) -> Tensor:
        model(ids)
        return loss_of(model(ids), ids)

    return _trained(model, forward)


def part_disabled(compile_: Compile) -> Running:
    model = Model()
    model.blocks[1].forward = torch.compiler.disable(model.blocks[1].forward)
    compiled = compile_(model)
    return _trained(compiled, lambda ids: loss_of(compiled(ids), ids))


def functional_call(compile_: Compile) -> Running:
    model = Model()
    forward = compile_(lambda ids: torch.func.functional_call(model, dict(model.named_parameters()), (ids,)))
    return _trained(model, lambda ids: loss_of(forward(ids), ids))


def with_backward(compile_: Compile) -> Running:
    """Forward and backward pass in one compiled function."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    both = compile_(lambda ids: loss_of(model(ids), ids).backward())

    def step(ids: Tensor) -> None:
        both(ids)
        optimizer.step()
        optimizer.zero_grad()

    return Running(model, step, list(model.parameters()))


TRAININGS: dict[str, Callable[[Compile], Running]] = {
    "whole": whole,
    "fullgraph": lambda compile_: whole(compile_, fullgraph=True),
    "dynamic": lambda compile_: whole(compile_, dynamic=True),
    "in_place": in_place,
    "blocks": blocks,
    "wrapped_blocks": wrapped_blocks,
    "checkpointed_blocks": lambda compile_: blocks(compile_, checkpoints=True),
    "graph_breaks": graph_breaks,
    "function": function,
    "loss_only": loss_only,
    "compiled_optimizer": compiled_optimizer,
    "teacher": teacher,
    "eager_teacher": eager_teacher,
    "frozen": frozen,
    "two_passes": two_passes,
    "accumulated": accumulated,
    "mixed_precision": mixed_precision,
    "penalty": penalty,
    "backward_twice": backward_twice,
    "no_backward": no_backward,
    "part_disabled": part_disabled,
    "functional_call": functional_call,
    "with_backward": with_backward,
}


class Compiler:
    """`torch.compile` with one backend."""

    def __init__(self, backend: str) -> None:
        self._backend = backend

    def __call__(self, what: Any, **options: Any) -> Any:
        return torch.compile(what, backend=self._backend, **options)

    def in_place(self, module: nn.Module) -> None:
        module.compile(backend=self._backend)


class Uncompiled:
    """Compiles nothing."""

    def __call__(self, what: Any, **_: Any) -> Any:
        return what

    def in_place(self, module: nn.Module) -> None:
        pass


def batch_of(step: int, *, lengths: tuple[int, ...] = (16,)) -> Tensor:
    return torch.randint(
        0, VOCABULARY, (4, lengths[step % len(lengths)]), generator=torch.Generator().manual_seed(step)
    )


def true_flops(name: str, ids: Tensor) -> int:
    """What the step needs, by torch's own counter in the same training without the compiler or checkpointing."""
    torch.manual_seed(0)
    running = TRAININGS[name](Uncompiled())
    with _no_checkpoints(running.model), FlopCounterMode(display=False) as counter:
        running.step(ids)
    return int(counter.get_total_flops())


@contextmanager
def _no_checkpoints(model: nn.Module) -> Iterator[None]:
    if isinstance(model, Model):
        model.checkpoints = False
    yield
